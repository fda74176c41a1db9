#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/experts.h"

namespace segki {

void check(const ExpertGatedProjectionArgs& args) {
  const ops::Checker checker("expert_gated_projection");
  ops::Dim rows{"rows"}, inputs{"K"}, chosen{"k"}, experts{"E"}, width{"F"};
  checker.shape("x", args.x, {&rows, &inputs});
  const DType dtype = checker.model_dtype("x", args.x);
  checker.rows("x", rows);
  checker.shape("experts", args.experts, {&rows, &chosen}, DType::kI32);
  checker.shape("gate", args.gate, {&experts}, DType::kI64);
  checker.shape("up", args.up, {&experts}, DType::kI64);
  checker.optional("gate_bias", args.gate_bias, {&experts}, DType::kI64);
  checker.optional("up_bias", args.up_bias, {&experts}, DType::kI64);
  checker.number("experts' k", chosen.value, 1, experts.value);
  checker.shape("out", args.out, {&rows, &chosen, &width}, dtype);
  checker.dense("out", args.out);
  ops::check_weight_stride(checker, args.weight_stride, args.transposed != 0, inputs, width);
  checker.number("activation", static_cast<std::int32_t>(args.activation), 0,
                 static_cast<std::int32_t>(Activation::kRelu2));
  checker.number("fp32_activation", args.fp32_activation, 0, 1);
}

void expert_gated_projection(const Backend& backend, const ExpertGatedProjectionArgs& args,
                             const RunOptions& options) {
  check(args);
  ops::run(backend, args, options,
           2 * ops::bytes_of(args.out) * static_cast<std::size_t>(args.x.shape[1]));
}

}  // namespace segki
