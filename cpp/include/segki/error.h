// The library never aborts and never prints: what goes wrong is thrown as `Error`, and is a code
// across the C boundary.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "segki/export.h"

namespace segki {

enum class ErrorCode : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // an argument is outside what the function accepts (Python: ValueError)
  kUnsupported = 2,      // correct, but this backend has no kernel for it (Python: RuntimeError)
  kBackend = 3,          // a backend could not be loaded, or reported a failure
  kOutOfMemory = 4,      // the host's allocator returned null
  kNumeric = 5,          // NaN where a number is needed
  kInterrupted = 6,      // the host asked the decode loop to end
  kState = 7,            // the object is not in a state that allows the call
};

class SEGKI_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  ~Error() override;
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace segki
