#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const SumNormArgs& args) {
  const ops::Checker checker("sum_norm");
  constexpr const char* kTerms[] = {"terms[0]", "terms[1]", "terms[2]"};
  constexpr const char* kScales[] = {"scales[0]", "scales[1]", "scales[2]"};
  checker.number("count", args.count, 1, 3);
  ops::Dim rows{"rows"}, hidden{"H"};
  checker.shape("terms[0]", args.terms[0], {&rows, &hidden});
  const DType dtype = checker.model_dtype("terms[0]", args.terms[0]);
  checker.rows("terms[0]", rows);
  for (int i = 0; i < args.count; ++i) {
    checker.shape(kTerms[i], args.terms[i], {&rows, &hidden}, dtype);
    checker.finite(kScales[i], args.scales[i]);
  }
  checker.shape("sum", args.sum, {&rows, &hidden}, dtype);
  checker.writable("sum", args.sum);
  checker.norm_spec("norm", args.norm);
  if (args.norm.kind == NormKind::kNone) {
    checker.absent("out", args.out, "where norm.kind is 0 (none)");
    return;
  }
  checker.optional("weight", args.weight, {&hidden}, dtype);
  checker.optional("bias", args.bias, {&hidden}, dtype);
  if (args.norm.kind != NormKind::kLayer) {
    checker.absent("bias", args.bias, "unless norm.kind is 2 (layer)");
  }
  checker.shape("out", args.out, {&rows, &hidden}, dtype);
  checker.writable("out", args.out);
  checker.distinct("out", args.out, "sum", args.sum);
  for (int i = 0; i < args.count; ++i) {
    checker.distinct("out", args.out, kTerms[i], args.terms[i]);
  }
}

void sum_norm(const Backend& backend, const SumNormArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options,
           static_cast<std::size_t>(args.count + 2) * ops::bytes_of(args.sum));
}

}  // namespace segki
