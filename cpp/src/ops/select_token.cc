#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const SelectTokenArgs& args) {
  const ops::Checker checker("select_token");
  ops::Dim rows{"rows"}, vocabulary{"V"}, capacity{"capacity"}, ids{"n"}, forced{"T"};
  checker.shape("logits", args.logits, {&rows, &vocabulary}, DType::kF32);
  checker.rows("logits", rows);
  checker.shape("next", args.next, {&rows}, DType::kI64);
  checker.shape("lengths", args.lengths, {&rows}, DType::kI32);
  checker.shape("positions", args.positions, {&rows}, DType::kI32);
  checker.distinct("positions", args.positions, "lengths", args.lengths);
  checker.shape("generated", args.generated, {&rows}, DType::kI32);
  checker.distinct("generated", args.generated, "lengths", args.lengths);
  checker.distinct("generated", args.generated, "positions", args.positions);
  checker.shape("finished", args.finished, {&rows}, DType::kI32);
  checker.shape("history", args.history, {&rows, &capacity}, DType::kI64);
  checker.writable("history", args.history);
  checker.optional("log_prob", args.log_prob, {&rows, &capacity}, DType::kF32);
  checker.optional("eos", args.eos, {&ids}, DType::kI64);
  checker.optional("frozen", args.frozen, {&rows}, DType::kI32);
  checker.optional("forced", args.forced, {&rows, &forced}, DType::kI64);
  checker.number("pad", args.pad, 0, INT64_MAX);
  checker.number("min_new_tokens", args.min_new_tokens, 0, INT32_MAX);
  checker.number("max_new_tokens", args.max_new_tokens, 1, INT32_MAX);
  if (capacity.value < args.max_new_tokens) {
    checker.refuse("history", "has " + std::to_string(capacity.value) + " columns",
                   "at least max_new_tokens, which is " + std::to_string(args.max_new_tokens));
  }
}

void select_token(const Backend& backend, const SelectTokenArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, ops::bytes_of(args.logits));
}

}  // namespace segki
