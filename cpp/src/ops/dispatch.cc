#include "ops/dispatch.h"

namespace segki::ops {

void throw_no_kernel(const char* op, const Backend& backend) {
  throw Error(ErrorCode::kUnsupported,
              std::string(op) + ": backend '" + backend.name() + "' has no kernel for this op");
}

void throw_failed(const char* op, const Backend& backend, std::int32_t code) {
  const bool known = code > static_cast<std::int32_t>(ErrorCode::kOk) &&
                     code <= static_cast<std::int32_t>(ErrorCode::kState);
  throw Error(
      known ? static_cast<ErrorCode>(code) : ErrorCode::kBackend,
      std::string(op) + ": backend '" + backend.name() + "' reports error " + std::to_string(code));
}

void throw_no_scratch(const char* op, std::size_t bytes) {
  throw Error(ErrorCode::kOutOfMemory,
              std::string(op) + ": no memory for " + std::to_string(bytes) + " bytes of scratch");
}

}  // namespace segki::ops
