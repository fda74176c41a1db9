#include "ops/gated_delta.h"

#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const GatedDeltaArgs& args) {
  const ops::Checker checker("gated_delta");
  ops::GdnDims dims("rows");
  ops::check_gdn(checker, args, dims);
  checker.rows("q", dims.tokens);
  checker.optional("slots", args.slots, {&dims.tokens}, DType::kI32);
  checker.optional("frozen", args.frozen, {&dims.tokens}, DType::kI32);
  ops::Dim slots{"slots"};
  checker.shape("conv_state", args.conv_state, {&slots, &dims.channels, &dims.width}, args.q.dtype);
  checker.dense("conv_state", args.conv_state);
  checker.shape("state", args.state, {&slots, &dims.value_heads, &dims.key_dim, &dims.value_dim},
                DType::kF32);
  checker.dense("state", args.state);
  if (!args.slots.present() && slots.value < dims.tokens.value) {
    checker.refuse("state", "has " + std::to_string(slots.value) + " slots",
                   "at least " + std::to_string(dims.tokens.value) + ", one a row");
  }
}

void gated_delta(const Backend& backend, const GatedDeltaArgs& args, const RunOptions& options) {
  check(args);
  const auto rows = static_cast<std::size_t>(args.q.shape[0]);
  ops::run(backend, args, options,
           2 * rows * ops::bytes_of(args.state) / static_cast<std::size_t>(args.state.shape[0]));
}

}  // namespace segki
