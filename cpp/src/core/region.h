#pragma once

namespace segki {

// Whether the calling thread runs a part of a ThreadPool's region. A region opened from there may
// run its parts one after another, so that they must not wait for each other.
bool inside_region();

}  // namespace segki
