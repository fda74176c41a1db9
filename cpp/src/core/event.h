// A counter that threads wait on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace segki {

// Whoever waits goes on within nanoseconds while it has a core of its own, and gives the core away
// where threads are more than cores: it spins for up to 10 microseconds, then yields, and sleeps
// once its patience is used up. advance() costs a system call only while somebody sleeps.
class Event {
 public:
  std::uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  // Publishes what the caller wrote before.
  void advance() {
    // Sequentially consistent, as the sleepers' side is: either this side sees the sleeper, or the
    // sleeper sees the new count.
    count_.fetch_add(1);
    if (sleepers_.load() != 0) {
      count_.notify_all();
    }
  }

  // Returns when the count is no longer `seen`.
  void wait_past(std::uint32_t seen, std::chrono::microseconds patience);

 private:
  alignas(64) std::atomic<std::uint32_t> count_{0};
  std::atomic<std::int32_t> sleepers_{0};
};

}  // namespace segki
