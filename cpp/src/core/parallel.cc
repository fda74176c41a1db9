#include "segki/parallel.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/cores.h"
#include "core/event.h"
#include "core/region.h"
#include "segki/error.h"

namespace segki {
namespace {

constexpr int kDefaultSpinUs = 50;
// How long the caller waits for its workers, and a part for the others, before it sleeps.
constexpr std::chrono::microseconds kPatience{1000};

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

// The first exception of a region's parts.
class Failure {
 public:
  // Calls body(argument, part).
  void guard(Body body, void* argument, std::int32_t part) noexcept {
    try {
      body(argument, part);
    } catch (...) {
      if (!happened_.test_and_set(std::memory_order_relaxed)) {
        thrown_ = std::current_exception();
      }
    }
  }

  // When all parts have ended.
  void rethrow() {
    if (thrown_) {
      happened_.clear(std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(thrown_, nullptr));
    }
  }

 private:
  std::atomic_flag happened_;
  std::exception_ptr thrown_;
};

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
  Failure failure;

  Event begun;                                       // publishes the fields above
  Event ended;                                       // all workers have ended the region
  alignas(64) std::atomic<std::int32_t> pending{0};  // workers that have not
};

void work(Crew& crew, std::int32_t part, std::uint32_t seen, std::chrono::microseconds spin) {
  for (;;) {
    crew.begun.wait_past(seen, spin);
    ++seen;
    if (crew.stop) {
      return;
    }
    if (part < crew.parts) {
      const FrameScope scope(crew.frame);
      crew.failure.guard(crew.body, crew.argument, part);
    }
    if (crew.pending.fetch_sub(1) == 1) {
      crew.ended.advance();
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

  // Workers that are too many go now; those that lack come with the next region.
  void set_threads(int threads) {
    if (threads == this->threads()) {
      return;
    }
    if (inside()) {
      throw Error(ErrorCode::kState,
                  "set_default_threads: called from within a parallel region of the default pool, "
                  "accepted between regions");
    }
    Crew& crew = this->crew();
    const std::lock_guard lock(crew.region);
    if (static_cast<int>(crew.workers.size()) >= threads) {
      dismiss(crew);
    }
    threads_.store(threads, std::memory_order_relaxed);
  }

  // Parts may wait for each other, so each gets a thread of its own, whatever threads() says. Only
  // a call from within a region of this same team runs its parts one after another.
  void run(std::int32_t parts, Body body, void* argument) {
    if (parts <= 1 || inside()) {
      Failure failure;
      for (std::int32_t part = 0; part < parts; ++part) {
        failure.guard(body, argument, part);
      }
      failure.rethrow();
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
    const std::uint32_t ended = crew.ended.count();
    crew.begun.advance();
    {
      const FrameScope scope(&frame);
      crew.failure.guard(body, argument, 0);
    }
    crew.ended.wait_past(ended, kPatience);
    crew.failure.rethrow();
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
    const std::uint32_t seen = crew.begun.count();
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
    crew.begun.advance();
    for (std::thread& worker : crew.workers) {
      worker.join();
    }
    crew.workers.clear();
    crew.stop = false;
  }

  std::atomic<int> threads_;
  std::chrono::microseconds spin_;
  std::atomic<Crew*> crew_{nullptr};
};

// Lives until the process ends: a host's threads may still call ops while destructors run.
WorkerTeam& default_team() {
  static WorkerTeam& team =
      *std::make_unique<WorkerTeam>(default_thread_count(), kDefaultSpinUs).release();
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

int default_threads() { return default_team().threads(); }

void set_default_threads(int threads) {
  check_threads("set_default_threads", threads, 1);
  default_team().set_threads(threads);
}

// All parts meet at `arrived`; the last one opens the barrier.
struct Barrier::State {
  std::int32_t parts = 1;
  alignas(64) std::atomic<std::int32_t> arrived{0};
  Event opened;
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
  const std::uint32_t opened = state.opened.count();
  if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == state.parts) {
    state.arrived.store(0, std::memory_order_relaxed);
    state.opened.advance();
    return;
  }
  state.opened.wait_past(opened, kPatience);
}

}  // namespace segki
