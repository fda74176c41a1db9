// Opens a backend library. Knows nothing of the registry.
#pragma once

#include <string>

#include "segki/backend.h"

namespace segki {

// The library's table as this build knows it: slots that an older library lacks are null. `path`
// must name an existing file. The library stays open for the life of the process. Throws
// Error(kBackend).
BackendTable open_backend_library(const std::string& path);

}  // namespace segki
