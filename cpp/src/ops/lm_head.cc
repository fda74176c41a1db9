#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const LmHeadArgs& args) {
  const ops::Checker checker("lm_head");
  ops::Dim rows{"rows"}, inputs{"K"}, vocabulary{"V"};
  checker.shape("x", args.x, {&rows, &inputs});
  const DType dtype = checker.model_dtype("x", args.x);
  checker.rows("x", rows);
  if (args.transposed != 0) {
    checker.shape("weight", args.weight, {&inputs, &vocabulary}, dtype);
  } else {
    checker.shape("weight", args.weight, {&vocabulary, &inputs}, dtype);
  }
  checker.dense("weight", args.weight);
  checker.optional("bias", args.bias, {&vocabulary}, dtype);
  checker.shape("logits", args.logits, {&rows, &vocabulary}, DType::kF32);
  checker.writable("logits", args.logits);
  checker.distinct("logits", args.logits, "x", args.x);
  checker.finite("scale", args.scale);
  checker.finite("divisor", args.divisor);
  if (args.divisor == 0.0F) {
    checker.refuse("divisor", "is 0", "another number");
  }
  checker.not_negative("softcap", args.softcap);
  checker.number("fp32_softcap", args.fp32_softcap, 0, 1);
}

void lm_head(const Backend& backend, const LmHeadArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, ops::bytes_of(args.weight));
}

}  // namespace segki
