// How many threads are of use to this process.
#pragma once

#include <string>

namespace segki {

constexpr int kMaxThreads = 1024;

// Cores that the scheduler and the control groups give this process: the CPUs of its affinity mask,
// and no more than its CPU quota (of its control group and of each one above) rounded up. 1 to
// kMaxThreads.
int usable_cores();

// usable_cores(), and no more than SEGKI_NUM_THREADS or, where that is not set, OMP_NUM_THREADS
// (its first number; what is no number is for OpenMP to complain about). Throws
// Error(kInvalidArgument) when SEGKI_NUM_THREADS is no number from 1 to kMaxThreads.
int default_thread_count();

// The quota in cores, rounded up; 0 where there is none. `root` stands before every path that is
// read.
int quota_cores(const std::string& root);

// default_thread_count() for given cores and values of the two variables (null or empty: not set).
int limit_threads(int cores, const char* segki_num_threads, const char* omp_num_threads);

}  // namespace segki
