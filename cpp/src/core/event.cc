#include "core/event.h"

#include <algorithm>
#include <thread>

namespace segki {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr nanoseconds kLongestSpin{10'000};
constexpr nanoseconds kShortestSpin{500};
constexpr int kChecksBetweenClocks = 8;

// How long this thread spins before it yields. Where threads are more than cores, the one that is
// waited for often has no core until this one gives its own away: each wait that took longer than
// the longest spin halves it, a short one restores it.
thread_local nanoseconds current_spin = kLongestSpin;

void learn(nanoseconds waited) {
  current_spin = waited < kLongestSpin ? kLongestSpin : std::max(kShortestSpin, current_spin / 2);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace

void Event::wait_past(std::uint32_t seen, std::chrono::microseconds patience) {
  const auto passed = [&] { return count_.load(std::memory_order_acquire) != seen; };
  if (passed()) {
    return;
  }
  const Clock::time_point begin = Clock::now();
  nanoseconds waited{0};
  const nanoseconds spin = std::min<nanoseconds>(current_spin, patience);
  while (waited < patience) {
    if (waited < spin) {
      for (int i = 0; i < kChecksBetweenClocks && !passed(); ++i) {
        relax();
      }
    } else {
      std::this_thread::yield();
    }
    waited = Clock::now() - begin;
    if (passed()) {
      learn(waited);
      return;
    }
  }
  learn(waited);
  sleepers_.fetch_add(1);
  while (count_.load() == seen) {
    count_.wait(seen);
  }
  sleepers_.fetch_sub(1);
}

}  // namespace segki
