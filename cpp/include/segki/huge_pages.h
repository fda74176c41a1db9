// Weights in huge pages: streams of several rows then cross a page boundary, and walk the page
// table, 512 times less often.
#pragma once

#include <cstddef>

#include "segki/export.h"

namespace segki {

// Asks the kernel to back the memory that holds [address, address + bytes) with huge pages, now and
// in place (Linux 6.1, MADV_COLLAPSE): addresses and contents stay as they are, other threads may
// read and write meanwhile. Whole huge pages around the range are meant, so that neighbouring
// ranges join up. Returns how many bytes lie in huge pages then: less than `bytes`, down to 0,
// where the kernel cannot (a memory-mapped file, an older kernel, no free memory) or must not
// (transparent huge pages set to "never"). Costs a copy of what was not so before, about 0.6 s a
// GB.
SEGKI_EXPORT std::size_t use_huge_pages(const void* address, std::size_t bytes);

}  // namespace segki
