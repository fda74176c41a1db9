// Counts what the test program takes from the C++ heap, to show that a loop takes nothing.
#pragma once

namespace segki::testing {

// Calls of operator new so far, in all threads.
long allocation_count();

}  // namespace segki::testing
