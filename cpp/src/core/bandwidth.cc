#include "segki/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "segki/error.h"
#include "segki/huge_pages.h"
#include "segki/parallel.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define SEGKI_ALL_VECTOR_WIDTHS __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SEGKI_ALL_VECTOR_WIDTHS
#endif

namespace segki {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStreams = 4;  // pages read side by side, to keep more lines in flight
constexpr std::size_t kBlock = kStreams * kPage;
constexpr std::size_t kLine = 64;

typedef std::uint64_t Words __attribute__((vector_size(kLine)));

// The sum keeps the reads from being left out. `bytes` is a multiple of kBlock.
SEGKI_ALL_VECTOR_WIDTHS std::uint64_t sum(const std::byte* data, std::size_t bytes) {
  Words total[kStreams] = {};
  for (const std::byte* block = data; block != data + bytes; block += kBlock) {
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t stream = 0; stream < kStreams; ++stream) {
        total[stream] += *reinterpret_cast<const Words*>(block + stream * kPage + line);
      }
    }
  }
  const Words all = (total[0] + total[1]) + (total[2] + total[3]);
  std::uint64_t result = 0;
  for (std::size_t i = 0; i < kLine / sizeof(std::uint64_t); ++i) {
    result += all[i];
  }
  return result;
}

struct FreePages {
  void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{kPage}); }
};

struct Measurement {
  std::byte* data;
  std::size_t share;  // bytes a part
  std::atomic<std::uint64_t> sink{0};

  static void touch(void* self, std::int32_t part) {
    auto* m = static_cast<Measurement*>(self);
    std::byte* begin = m->data + static_cast<std::size_t>(part) * m->share;
    std::fill(begin, begin + m->share, std::byte{1});
  }
  static void read(void* self, std::int32_t part) {
    auto* m = static_cast<Measurement*>(self);
    m->sink.fetch_add(sum(m->data + static_cast<std::size_t>(part) * m->share, m->share),
                      std::memory_order_relaxed);
  }
};

}  // namespace

double read_bandwidth(std::size_t bytes, int threads, double seconds) {
  constexpr std::size_t kSmallest = std::size_t{1} << 20;
  if (bytes < kSmallest) {
    throw Error(ErrorCode::kInvalidArgument, "read_bandwidth: argument 'bytes' is " +
                                                 std::to_string(bytes) + ", accepted at least " +
                                                 std::to_string(kSmallest));
  }
  if (!(seconds > 0.0)) {
    throw Error(ErrorCode::kInvalidArgument, "read_bandwidth: argument 'seconds' is " +
                                                 std::to_string(seconds) + ", accepted > 0");
  }
  ThreadPool pool(threads);
  const ParallelHook hook = pool.hook();
  const auto parts = static_cast<std::size_t>(hook.parts);
  const std::size_t share = std::max<std::size_t>(bytes / parts / kBlock, 1) * kBlock;
  const std::unique_ptr<std::byte, FreePages> buffer(static_cast<std::byte*>(
      ::operator new (parts* share, std::align_val_t{kPage}, std::nothrow)));
  if (!buffer) {
    throw Error(ErrorCode::kOutOfMemory,
                "read_bandwidth: no memory for " + std::to_string(parts * share) + " bytes");
  }
  Measurement measurement{buffer.get(), share};
  // Each thread touches its share first, so that it lies in that thread's memory.
  hook.run(hook.context, hook.parts, &Measurement::touch, &measurement);
  use_huge_pages(buffer.get(), parts * share);  // as weights lie

  constexpr int kFewestPasses = 3;
  double best = 0.0;
  const Clock::time_point begin = Clock::now();
  for (int pass = 0;; ++pass) {
    const Clock::time_point start = Clock::now();
    if (pass >= kFewestPasses && std::chrono::duration<double>(start - begin).count() >= seconds) {
      break;
    }
    hook.run(hook.context, hook.parts, &Measurement::read, &measurement);
    const double taken = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(parts * share) / taken);
  }
  return best;
}

}  // namespace segki
