#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const GatedProjectionArgs& args) {
  const ops::Checker checker("gated_projection");
  ops::Dim rows{"rows"}, inputs{"K"}, outputs{"F"};
  checker.shape("x", args.x, {&rows, &inputs});
  const DType dtype = checker.model_dtype("x", args.x);
  checker.rows("x", rows);
  checker.shape("gate", args.gate, {&outputs, &inputs}, dtype);
  checker.dense("gate", args.gate);
  checker.shape("up", args.up, {&outputs, &inputs}, dtype);
  checker.dense("up", args.up);
  checker.optional("gate_bias", args.gate_bias, {&outputs}, dtype);
  checker.optional("up_bias", args.up_bias, {&outputs}, dtype);
  checker.shape("out", args.out, {&rows, &outputs}, dtype);
  checker.writable("out", args.out);
  checker.distinct("out", args.out, "x", args.x);
  checker.number("activation", static_cast<std::int32_t>(args.activation), 0,
                 static_cast<std::int32_t>(Activation::kRelu2));
  checker.number("fp32_activation", args.fp32_activation, 0, 1);
}

void gated_projection(const Backend& backend, const GatedProjectionArgs& args,
                      const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, ops::bytes_of(args.gate) + ops::bytes_of(args.up));
}

}  // namespace segki
