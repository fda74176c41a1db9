#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const EmbeddingArgs& args) {
  const ops::Checker checker("embedding");
  ops::Dim rows{"rows"}, vocabulary{"V"}, hidden{"H"}, positions{"P"};
  checker.shape("tokens", args.tokens, {&rows}, DType::kI64);
  checker.rows("tokens", rows);
  checker.shape("table", args.table, {&vocabulary, &hidden});
  const DType dtype = checker.model_dtype("table", args.table);
  checker.dense("table", args.table);
  checker.shape("out", args.out, {&rows, &hidden}, dtype);
  checker.writable("out", args.out);
  checker.distinct("out", args.out, "table", args.table);
  checker.distinct("out", args.out, "tokens", args.tokens);
  checker.finite("scale", args.scale);
  if (args.position_table.present()) {
    checker.shape("position_table", args.position_table, {&positions, &hidden}, dtype);
    checker.dense("position_table", args.position_table);
    checker.shape("positions", args.positions, {&rows}, DType::kI32);
  }
}

void embedding(const Backend& backend, const EmbeddingArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, ops::bytes_of(args.out));
}

}  // namespace segki
