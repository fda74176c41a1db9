#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const RouterArgs& args) {
  const ops::Checker checker("route_experts");
  ops::Dim rows{"rows"}, experts{"E"}, chosen{"k"};
  checker.shape("logits", args.logits, {&rows, &experts}, DType::kF32);
  checker.rows("logits", rows);
  if (args.bias.present()) {
    checker.shape("bias", args.bias, {&experts});
    checker.model_dtype("bias", args.bias);
  }
  checker.shape("experts", args.experts, {&rows, &chosen}, DType::kI32);
  checker.writable("experts", args.experts);
  checker.number("experts' k", chosen.value, 1, experts.value);
  checker.shape("weights", args.weights, {&rows, &chosen}, DType::kF32);
  checker.writable("weights", args.weights);
  checker.number("score", static_cast<std::int32_t>(args.score), 0,
                 static_cast<std::int32_t>(RouterScore::kSigmoid));
  checker.number("dtype", static_cast<std::int32_t>(args.dtype),
                 static_cast<std::int32_t>(DType::kF32), static_cast<std::int32_t>(DType::kF16));
  checker.number("groups", args.groups, 1, experts.value);
  if (experts.value % args.groups != 0) {
    checker.refuse("groups", "is " + std::to_string(args.groups),
                   "a divisor of E, which is " + std::to_string(experts.value));
  }
  if (args.groups > 1) {
    checker.number("group_top_k", args.group_top_k, 1, args.groups);
    if (experts.value / args.groups * args.group_top_k < chosen.value) {
      checker.refuse(
          "group_top_k", "is " + std::to_string(args.group_top_k),
          "enough groups to choose k experts from, which is " + std::to_string(chosen.value));
    }
  }
  checker.not_negative("sum_eps", args.sum_eps);
  checker.not_negative("sum_min", args.sum_min);
  checker.finite("scale", args.scale);
}

void route_experts(const Backend& backend, const RouterArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, ops::bytes_of(args.logits));
}

}  // namespace segki
