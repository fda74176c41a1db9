#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {

void check(const AttentionArgs& args) {
  const ops::Checker checker("attention");
  ops::Dim rows{"rows"}, heads{"Hq"}, kv_heads{"Hkv"}, head_dim{"D"}, v_head_dim{"Dv"};
  ops::Dim slots{"slots"}, length{"L"};
  checker.shape("q", args.q, {&rows, &heads, &head_dim});
  const DType dtype = checker.model_dtype("q", args.q);
  checker.rows("q", rows);
  checker.dense("q", args.q);
  checker.shape("k_cache", args.k_cache, {&slots, &kv_heads, &length, &head_dim}, dtype);
  checker.shape("v_cache", args.v_cache, {&slots, &kv_heads, &length, &v_head_dim}, dtype);
  if (heads.value % kv_heads.value != 0) {
    checker.refuse("q", "has " + std::to_string(heads.value) + " heads",
                   "a multiple of the cache's " + std::to_string(kv_heads.value));
  }
  ops::Dim group{"G", heads.value / kv_heads.value};
  ops::Dim width{"Hq * Dv", heads.value * v_head_dim.value};
  checker.shape("lengths", args.lengths, {&rows}, DType::kI32);
  checker.optional("first", args.first, {&rows}, DType::kI32);
  checker.optional("slots", args.slots, {&rows}, DType::kI32);
  if (!args.slots.present() && slots.value < rows.value) {
    checker.refuse("k_cache", "has " + std::to_string(slots.value) + " slots",
                   "at least " + std::to_string(rows.value) + ", one a row");
  }
  checker.optional("gate", args.gate, {&rows, &kv_heads, &group, &v_head_dim}, dtype);
  if (args.gate.present()) {
    checker.optional("gate_bias", args.gate_bias, {&heads}, dtype);
  } else {
    checker.absent("gate_bias", args.gate_bias, "where 'gate' is absent");
  }
  checker.shape("out", args.out, {&rows, &width}, dtype);
  checker.dense("out", args.out);
  checker.distinct("out", args.out, "q", args.q);
  checker.distinct("out", args.out, "gate", args.gate);
  if (args.partial.present()) {
    ops::Dim splits{"S"}, sums{"G * (Dv + 2)", group.value * (v_head_dim.value + 2)};
    checker.shape("partial", args.partial, {&rows, &kv_heads, &splits, &sums}, DType::kF32);
    checker.dense("partial", args.partial);
    checker.shape("arrived", args.arrived, {&rows, &kv_heads}, DType::kI32);
    checker.dense("arrived", args.arrived);
  } else {
    checker.absent("arrived", args.arrived, "where 'partial' is absent");
  }
  checker.finite("scale", args.scale);
  checker.not_negative("softcap", args.softcap);
  checker.number("window", args.window, 0, INT32_MAX);
}

void attention(const Backend& backend, const AttentionArgs& args, const RunOptions& options) {
  check(args);
  // What the rows may see at most; how much they do see is known to the kernel alone.
  ops::run(backend, args, options, ops::bytes_of(args.k_cache) + ops::bytes_of(args.v_cache));
}

}  // namespace segki
