#include "segki/error.h"

#include "segki/tensor.h"

namespace segki {

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

// Here and not in the header, so that the type has one identity across libraries.
Error::~Error() = default;

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "unknown";
}

}  // namespace segki
