#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const NormArgs& args) {
  const ops::Checker checker("norm");
  ops::Dim rows{"rows"}, hidden{"H"};
  checker.shape("x", args.x, {&rows, &hidden});
  const DType dtype = checker.model_dtype("x", args.x);
  checker.rows("x", rows);
  checker.norm_spec("norm", args.norm);
  if (args.norm.kind == NormKind::kNone) {
    checker.refuse("norm.kind", "is 0 (none)", "1 (rms) or 2 (layer)");
  }
  checker.optional("weight", args.weight, {&hidden}, dtype);
  checker.optional("bias", args.bias, {&hidden}, dtype);
  if (args.norm.kind != NormKind::kLayer) {
    checker.absent("bias", args.bias, "unless norm.kind is 2 (layer)");
  }
  checker.shape("out", args.out, {&rows, &hidden}, dtype);
  checker.writable("out", args.out);
}

void norm(const Backend& backend, const NormArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, 2 * ops::bytes_of(args.out));
}

}  // namespace segki
