// The check that both halves of a mixture of experts share.
#pragma once

#include <string>

#include "ops/check.h"

namespace segki::ops {

// Matrices [outputs, inputs] must be dense; those stored transposed may lie side by side.
inline void check_weight_stride(const Checker& checker, std::int64_t stride, bool transposed,
                                const Dim& inputs, const Dim& outputs) {
  const bool good = transposed ? stride >= outputs.value : stride == inputs.value;
  if (good) return;
  checker.refuse("weight_stride", "is " + std::to_string(stride),
                 transposed
                     ? "at least the number of outputs, which is " + std::to_string(outputs.value)
                     : "the number of inputs, which is " + std::to_string(inputs.value));
}

}  // namespace segki::ops
