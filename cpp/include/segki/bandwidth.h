// The measured speed of this machine's memory: the denominator of every "share of the bandwidth".
#pragma once

#include <cstddef>

#include "segki/export.h"

namespace segki {

// Bytes a second that `threads` threads (0: all cores this process may run on) read from a buffer
// of `bytes` bytes, in order, each its own share: the best pass of those that fit into `seconds`
// (at least three). Give a buffer of several times the caches. Throws Error(kInvalidArgument) for
// less than 1 MiB, threads outside 0 to 1024 or seconds <= 0, Error(kOutOfMemory).
SEGKI_EXPORT double read_bandwidth(std::size_t bytes, int threads, double seconds);

}  // namespace segki
