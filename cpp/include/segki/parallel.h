// How work is spread over the cores of a host. segki brings a thread pool; a host may supply its
// own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "segki/export.h"

namespace segki {

// A host's `parallel_for`. `run(context, parts, body, argument)` calls `body(argument, part)` once
// for each part in [0, parts) and returns when all have returned. With `concurrent` non-zero the
// host promises that all parts make progress at the same time, so that they may wait for each other
// at a barrier: a step program then enters `run` once a step instead of once an op.
struct ParallelHook {
  void* context = nullptr;
  std::int32_t parts = 1;  // how many parts the host runs best
  std::int32_t concurrent = 0;
  void (*run)(void* context, std::int32_t parts, void (*body)(void* argument, std::int32_t part),
              void* argument) = nullptr;
};

// Fixed team of threads; the caller is part 0. Between regions workers spin for `spin_us`
// microseconds (a native step follows within that time) and then sleep. Thread-safe: regions of
// several callers run one after another. A fork()ed child starts a new team.
class SEGKI_EXPORT ThreadPool {
 public:
  // `threads` counts the caller; 0 is the number of cores this process may run on.
  explicit ThreadPool(int threads = 0, int spin_us = 50);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  // Valid as long as the pool.
  ParallelHook hook();

 private:
  class Team;
  std::unique_ptr<Team> team_;
};

// The hook that ops use when none is given: a process-wide pool over all cores, started at first
// use.
SEGKI_EXPORT ParallelHook default_parallel();

// Number of threads of the default pool, from now on (1 to 1024). Not while a decode loop runs.
// Throws Error(kInvalidArgument).
SEGKI_EXPORT void set_default_threads(int threads);

// A barrier for the parts of one region: spins, then yields the core. Reusable.
class SEGKI_EXPORT Barrier {
 public:
  explicit Barrier(std::int32_t parts);
  ~Barrier();
  void wait();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace segki
