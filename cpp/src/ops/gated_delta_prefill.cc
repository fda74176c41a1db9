#include <string>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/gated_delta.h"

namespace segki {

void check(const GatedDeltaPrefillArgs& args) {
  const ops::Checker checker("gated_delta_prefill");
  ops::GdnDims dims("N");
  ops::check_gdn(checker, args, dims);
  ops::Dim sequences{"S"};
  checker.shape("begins", args.begins, {&sequences}, DType::kI32);
  checker.shape("ends", args.ends, {&sequences}, DType::kI32);
  checker.optional("conv_state", args.conv_state, {&sequences, &dims.channels, &dims.width},
                   args.q.dtype);
  if (args.conv_state.present()) checker.dense("conv_state", args.conv_state);
  checker.optional("state", args.state,
                   {&sequences, &dims.value_heads, &dims.key_dim, &dims.value_dim}, DType::kF32);
  if (args.state.present()) checker.dense("state", args.state);
  checker.number("continued", args.continued, 0, 1);
}

namespace {

// The sequences lie inside of the tokens; for a backend whose memory the host can read.
void check_sequences(const GatedDeltaPrefillArgs& args) {
  for (std::int64_t s = 0; s < args.begins.shape[0]; ++s) {
    const std::int64_t begin = args.begins.as<const std::int32_t>()[s * args.begins.stride[0]];
    const std::int64_t end = args.ends.as<const std::int32_t>()[s * args.ends.stride[0]];
    if (begin < 0 || end < begin || end > args.q.shape[0]) {
      const ops::Checker checker("gated_delta_prefill");
      checker.refuse("begins",
                     "and 'ends' give sequence " + std::to_string(s) + " the tokens " +
                         std::to_string(begin) + " to " + std::to_string(end),
                     "0 <= begin <= end <= " + std::to_string(args.q.shape[0]));
    }
  }
}

}  // namespace

void gated_delta_prefill(const Backend& backend, const GatedDeltaPrefillArgs& args,
                         const RunOptions& options) {
  check(args);
  if (backend.table().is_host != 0) check_sequences(args);
  // A token costs about as much as reading its share of a state.
  const std::int64_t per_token = args.conv_weight.shape[0] + args.a_log.shape[0] * args.q.shape[2];
  ops::run(backend, args, options,
           static_cast<std::size_t>(args.q.shape[0] * per_token) * sizeof(float));
}

}  // namespace segki
