// A view in words, for error messages.
#pragma once

#include <string>

#include "segki/tensor.h"

namespace segki {

inline std::string describe(const TensorView& view) {
  if (!view.present()) return "absent";
  std::string text = std::string(name_of(view.dtype)) + " [";
  for (int d = 0; d < view.rank; ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(view.shape[d]);
  }
  return text + "]";
}

}  // namespace segki
