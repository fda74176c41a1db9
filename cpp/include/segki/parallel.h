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
// at a barrier: a step program then enters `run` once a step instead of once an op. The bodies that
// segki passes to a host's hook do not throw.
struct ParallelHook {
  void* context = nullptr;
  std::int32_t parts = 1;  // how many parts the host runs best
  std::int32_t concurrent = 0;
  void (*run)(void* context, std::int32_t parts, void (*body)(void* argument, std::int32_t part),
              void* argument) = nullptr;
};

// Fixed team of threads; the caller is part 0. Between regions workers spin for a few microseconds,
// yield until `spin_us` microseconds have passed (a native step follows within that time) and then
// sleep; so does whoever waits for the end of a region. Thread-safe: regions of several callers run
// one after another. A fork()ed child starts a new team.
//
// A body may throw: the other parts run to their end, then the first exception is thrown to the
// caller of `run` and the pool is as usable as before. A part that throws no longer reaches its
// barriers, so that bodies that wait for each other must not.
class SEGKI_EXPORT ThreadPool {
 public:
  // `threads` counts the caller, 1 to 1024; 0 is the number of cores this process may use: those of
  // its CPU affinity, and no more than its control group's CPU quota rounded up. Throws
  // Error(kInvalidArgument).
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

// The hook that ops use when none is given: a process-wide pool whose threads start at first use.
// It has a thread for each core this process may use (see ThreadPool), and no more than the
// environment variable SEGKI_NUM_THREADS or, where that is not set, OMP_NUM_THREADS says. Throws
// Error(kInvalidArgument) when SEGKI_NUM_THREADS is no number from 1 to 1024.
SEGKI_EXPORT ParallelHook default_parallel();

// Number of threads of the default pool, the caller among them.
SEGKI_EXPORT int default_threads();

// Gives the default pool that many threads from its next region on; results are bit-identical with
// any number. Waits for a running region. Costs nothing when it is the number already; else workers
// end or start, which takes some 0.1 ms. Throws Error(kInvalidArgument) for a number outside 1 to
// 1024, Error(kState) when called from within a region of the default pool.
SEGKI_EXPORT void set_default_threads(int threads);

// A barrier for the parts of one region: spins, then yields the core, then sleeps. Reusable; may be
// destroyed when the region has ended.
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
