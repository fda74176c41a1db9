#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const ArgmaxArgs& args) {
  const ops::Checker checker("argmax");
  ops::Dim rows{"rows"}, vocabulary{"V"};
  checker.shape("logits", args.logits, {&rows, &vocabulary}, DType::kF32);
  checker.rows("logits", rows);
  checker.shape("tokens", args.tokens, {&rows}, DType::kI64);
  checker.optional("log_prob", args.log_prob, {&rows}, DType::kF32);
}

void argmax(const Backend& backend, const ArgmaxArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, ops::bytes_of(args.logits));
}

}  // namespace segki
