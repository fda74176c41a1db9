#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/experts.h"

namespace segki {

void check(const ExpertProjectionArgs& args) {
  const ops::Checker checker("expert_projection");
  ops::Dim rows{"rows"}, inputs{"F"}, chosen{"k"}, experts{"E"}, width{"H"}, one{"1", 1};
  checker.shape("x", args.x, {&rows, &chosen, &inputs});
  const DType dtype = checker.model_dtype("x", args.x);
  checker.rows("x", rows);
  checker.dense("x", args.x);
  checker.shape("experts", args.experts, {&rows, &chosen}, DType::kI32);
  checker.shape("weights", args.weights, {&rows, &chosen}, DType::kF32);
  checker.shape("weight", args.weight, {&experts}, DType::kI64);
  checker.optional("bias", args.bias, {&experts}, DType::kI64);
  checker.number("experts' k", chosen.value, 1, experts.value);
  checker.shape("out", args.out, {&rows, &width}, dtype);
  checker.writable("out", args.out);
  checker.optional("shared", args.shared, {&rows, &width}, dtype);
  checker.optional("shared_gate", args.shared_gate, {&rows, &one}, dtype);
  if (!args.shared.present()) {
    checker.absent("shared_gate", args.shared_gate, "where 'shared' is absent");
  }
  ops::check_weight_stride(checker, args.weight_stride, args.transposed != 0, inputs, width);
  checker.finite("routed_scale", args.routed_scale);
  checker.finite("out_scale", args.out_scale);
}

void expert_projection(const Backend& backend, const ExpertProjectionArgs& args,
                       const RunOptions& options) {
  check(args);
  ops::run(backend, args, options,
           ops::bytes_of(args.x) * static_cast<std::size_t>(args.out.shape[1]));
}

}  // namespace segki
