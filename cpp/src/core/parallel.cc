#include "segki/parallel.h"

#include <pthread.h>

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/region.h"
#include "segki/error.h"

namespace segki {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kDefaultSpinUs = 50;
constexpr int kSpinsBeforeYield = 4000;
constexpr int kYieldsBeforeSleep = 200;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

int usable_cores() {
#if defined(__linux__)
  for (int cores = 1024; cores <= 1 << 20; cores *= 2) {
    cpu_set_t* set = CPU_ALLOC(cores);
    if (set == nullptr) {
      break;
    }
    const std::size_t bytes = CPU_ALLOC_SIZE(cores);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) {
      return std::min(count, kMaxThreads);
    }
  }
#endif
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

void check_threads(const char* function, int threads, int smallest) {
  if (threads < smallest || threads > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument, std::string(function) + ": argument 'threads' is " +
                                                 std::to_string(threads) + ", accepted " +
                                                 std::to_string(smallest) + " to " +
                                                 std::to_string(kMaxThreads));
  }
}

// Number of fork()s between the program's start and this process: a child has none of its parent's
// threads and may find their locks held.
std::atomic<std::uint32_t>& forks() {
  static std::atomic<std::uint32_t> count{0};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return count;
}

class WorkerTeam;

// Which teams' regions the current thread is inside of; a worker continues its caller's chain.
struct Frame {
  const WorkerTeam* team;
  const Frame* outer;
};
thread_local const Frame* current_frame = nullptr;

class FrameScope {
 public:
  explicit FrameScope(const Frame* frame) : previous_(current_frame) { current_frame = frame; }
  ~FrameScope() { current_frame = previous_; }
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;

 private:
  const Frame* previous_;
};

using Body = void (*)(void* argument, std::int32_t part);

// Worker threads and what they share with the caller of a region. `region` is held during a region
// and while the number of workers changes.
struct Crew {
  std::mutex region;
  std::uint32_t born = 0;  // forks() at creation
  std::vector<std::thread> workers;

  Body body = nullptr;
  void* argument = nullptr;
  std::int32_t parts = 0;
  const Frame* frame = nullptr;
  bool stop = false;

  alignas(64) std::atomic<std::uint32_t> generation{0};  // publishes the fields above
  alignas(64) std::atomic<std::int32_t> pending{0};      // workers that have not ended the region
};

void wait_for_generation(Crew& crew, std::uint32_t seen, std::chrono::microseconds spin) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + spin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (crew.generation.load(std::memory_order_acquire) != seen) {
        return;
      }
      relax();
    }
  } while (Clock::now() < end);
  while (crew.generation.load(std::memory_order_acquire) == seen) {
    crew.generation.wait(seen, std::memory_order_acquire);
  }
}

void work(Crew& crew, std::int32_t part, std::uint32_t seen, std::chrono::microseconds spin) {
  for (;;) {
    wait_for_generation(crew, seen, spin);
    ++seen;
    if (crew.stop) {
      return;
    }
    if (part < crew.parts) {
      const FrameScope scope(crew.frame);
      crew.body(crew.argument, part);
    }
    if (crew.pending.fetch_sub(1) == 1) {
      crew.pending.notify_one();
    }
  }
}

class WorkerTeam {
 public:
  WorkerTeam(int threads, int spin_us) : threads_(threads), spin_(spin_us) {}
  ~WorkerTeam() {
    Crew* crew = crew_.load(std::memory_order_acquire);
    if (crew != nullptr && crew->born == forks().load(std::memory_order_relaxed)) {
      const std::unique_ptr<Crew> owner(crew);
      dismiss(*owner);
    }
  }
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void set_threads(int threads) {
    Crew& crew = this->crew();
    const std::lock_guard lock(crew.region);
    dismiss(crew);
    threads_.store(threads, std::memory_order_relaxed);
  }

  // Parts may wait for each other, so each gets a thread of its own, whatever threads() says. Only
  // a call from within a region of this same team runs its parts one after another.
  void run(std::int32_t parts, Body body, void* argument) {
    if (parts <= 1 || inside()) {
      for (std::int32_t part = 0; part < parts; ++part) {
        body(argument, part);
      }
      return;
    }
    Crew& crew = this->crew();
    const std::lock_guard lock(crew.region);
    hire(crew, parts - 1);
    const Frame frame{this, current_frame};
    crew.body = body;
    crew.argument = argument;
    crew.parts = parts;
    crew.frame = &frame;
    crew.pending.store(static_cast<std::int32_t>(crew.workers.size()), std::memory_order_relaxed);
    crew.generation.fetch_add(1);
    crew.generation.notify_all();
    {
      const FrameScope scope(&frame);
      body(argument, 0);
    }
    wait_for_workers(crew);
  }

  static void run_hook(void* context, std::int32_t parts, Body body, void* argument) {
    static_cast<WorkerTeam*>(context)->run(parts, body, argument);
  }

  ParallelHook hook() {
    ParallelHook result;
    result.context = this;
    result.parts = threads();
    result.concurrent = 1;
    result.run = &WorkerTeam::run_hook;
    return result;
  }

 private:
  bool inside() const {
    for (const Frame* frame = current_frame; frame != nullptr; frame = frame->outer) {
      if (frame->team == this) {
        return true;
      }
    }
    return false;
  }

  // A crew from before a fork is abandoned as it is: its threads are in the parent.
  Crew& crew() {
    const std::uint32_t now = forks().load(std::memory_order_relaxed);
    Crew* present = crew_.load(std::memory_order_acquire);
    if (present != nullptr && present->born == now) {
      return *present;
    }
    auto fresh = std::make_unique<Crew>();
    fresh->born = now;
    if (crew_.compare_exchange_strong(present, fresh.get(), std::memory_order_acq_rel)) {
      return *fresh.release();
    }
    return *present;
  }

  void hire(Crew& crew, std::int32_t count) {
    const std::uint32_t seen = crew.generation.load(std::memory_order_relaxed);
    while (static_cast<std::int32_t>(crew.workers.size()) < count) {
      const auto part = static_cast<std::int32_t>(crew.workers.size()) + 1;
      try {
        crew.workers.emplace_back(work, std::ref(crew), part, seen, spin_);
      } catch (const std::system_error& failure) {
        throw Error(ErrorCode::kState, "thread pool: cannot start thread " + std::to_string(part) +
                                           " of " + std::to_string(count) + ": " + failure.what());
      }
    }
  }

  void dismiss(Crew& crew) {
    crew.stop = true;
    crew.generation.fetch_add(1);
    crew.generation.notify_all();
    for (std::thread& worker : crew.workers) {
      worker.join();
    }
    crew.workers.clear();
    crew.stop = false;
  }

  static void wait_for_workers(Crew& crew) {
    for (int i = 0; i < kSpinsBeforeYield + kYieldsBeforeSleep; ++i) {
      if (crew.pending.load(std::memory_order_acquire) == 0) {
        return;
      }
      if (i < kSpinsBeforeYield) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
    std::int32_t pending = crew.pending.load(std::memory_order_acquire);
    while (pending != 0) {
      crew.pending.wait(pending, std::memory_order_acquire);
      pending = crew.pending.load(std::memory_order_acquire);
    }
  }

  std::atomic<int> threads_;
  std::chrono::microseconds spin_;
  std::atomic<Crew*> crew_{nullptr};
};

// Lives until the process ends: a host's threads may still call ops while destructors run.
WorkerTeam& default_team() {
  static WorkerTeam& team = *std::make_unique<WorkerTeam>(usable_cores(), kDefaultSpinUs).release();
  return team;
}

}  // namespace

bool inside_region() { return current_frame != nullptr; }

class ThreadPool::Team : public WorkerTeam {
 public:
  using WorkerTeam::WorkerTeam;
};

ThreadPool::ThreadPool(int threads, int spin_us) {
  check_threads("ThreadPool", threads, 0);
  if (spin_us < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "ThreadPool: argument 'spin_us' is " + std::to_string(spin_us) + ", accepted >= 0");
  }
  team_ = std::make_unique<Team>(threads == 0 ? usable_cores() : threads, spin_us);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const { return team_->threads(); }

ParallelHook ThreadPool::hook() { return team_->hook(); }

ParallelHook default_parallel() { return default_team().hook(); }

void set_default_threads(int threads) {
  check_threads("set_default_threads", threads, 1);
  default_team().set_threads(threads);
}

// All parts meet at `arrived`; the last one opens the next generation.
struct Barrier::State {
  std::int32_t parts = 1;
  alignas(64) std::atomic<std::int32_t> arrived{0};
  alignas(64) std::atomic<std::uint32_t> generation{0};
};

Barrier::Barrier(std::int32_t parts) : state_(std::make_unique<State>()) {
  if (parts < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "Barrier: argument 'parts' is " + std::to_string(parts) + ", accepted >= 1");
  }
  state_->parts = parts;
}

Barrier::~Barrier() = default;

void Barrier::wait() {
  State& state = *state_;
  if (state.parts == 1) {
    return;
  }
  const std::uint32_t generation = state.generation.load(std::memory_order_relaxed);
  if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == state.parts) {
    state.arrived.store(0, std::memory_order_relaxed);
    state.generation.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; state.generation.load(std::memory_order_acquire) == generation; ++spins) {
    if (spins < kSpinsBeforeYield) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace segki
