#include "ops/check.h"
#include "ops/dispatch.h"

namespace segki {
namespace {

struct NormNames {
  const char* spec;
  const char* weight;
  const char* bias;
};

// Weight and bias of the norm of queries or keys: [D], [heads, D] or, over the full width,
// [heads * D].
void check_norm(const ops::Checker& checker, const NormNames& names, const NormSpec& norm,
                const TensorView& weight, const TensorView& bias, const ops::Dim& heads,
                const ops::Dim& head_dim, bool full_width, DType dtype) {
  checker.norm_spec(names.spec, norm);
  if (norm.kind == NormKind::kNone) {
    return;
  }
  ops::Dim heads_size = heads;
  ops::Dim head_size = head_dim;
  ops::Dim width{"Hq * D", heads.value * head_dim.value};
  const auto one = [&](const char* name, const TensorView& view) {
    if (!view.present()) {
      return;
    }
    if (full_width) {
      checker.shape(name, view, {&width}, dtype);
    } else if (view.rank == 2) {
      checker.shape(name, view, {&heads_size, &head_size}, dtype);
    } else {
      checker.shape(name, view, {&head_size}, dtype);
    }
    checker.dense(name, view);
  };
  one(names.weight, weight);
  one(names.bias, bias);
  if (bias.present() && weight.present() && bias.rank != weight.rank) {
    checker.refuse(
        names.bias, "has rank " + std::to_string(bias.rank),
        "the rank of '" + std::string(names.weight) + "', " + std::to_string(weight.rank));
  }
  if (norm.kind != NormKind::kLayer) {
    checker.absent(names.bias, bias, "unless the norm's kind is 2 (layer)");
  }
}

}  // namespace

void check(const RopeKvWriteArgs& args) {
  const ops::Checker checker("rope_kv_write");
  ops::Dim rows{"rows"}, kv_heads{"Hkv"}, group{"G"}, head_dim{"D"}, v_head_dim{"Dv"};
  ops::Dim slots{"slots"}, length{"L"}, positions{"P"}, half{"R/2"};
  checker.shape("q", args.q, {&rows, &kv_heads, &group, &head_dim});
  const DType dtype = checker.model_dtype("q", args.q);
  checker.rows("q", rows);
  checker.shape("k", args.k, {&rows, &kv_heads, &head_dim}, dtype);
  checker.shape("v", args.v, {&rows, &kv_heads, &v_head_dim}, dtype);
  ops::Dim heads{"Hq", kv_heads.value * group.value};
  checker.shape("q_out", args.q_out, {&rows, &heads, &head_dim}, dtype);
  checker.dense("q_out", args.q_out);
  checker.shape("k_cache", args.k_cache, {&slots, &kv_heads, &length, &head_dim}, dtype);
  checker.writable("k_cache", args.k_cache);
  checker.shape("v_cache", args.v_cache, {&slots, &kv_heads, &length, &v_head_dim}, dtype);
  checker.writable("v_cache", args.v_cache);
  checker.distinct("v_cache", args.v_cache, "k_cache", args.k_cache);
  checker.shape("positions", args.positions, {&rows}, DType::kI32);
  checker.shape("lengths", args.lengths, {&rows}, DType::kI32);
  checker.optional("slots", args.slots, {&rows}, DType::kI32);
  if (!args.slots.present() && slots.value < rows.value) {
    checker.refuse("k_cache", "has " + std::to_string(slots.value) + " slots",
                   "at least " + std::to_string(rows.value) + ", one a row");
  }

  checker.number("rope", static_cast<std::int32_t>(args.rope), 0,
                 static_cast<std::int32_t>(RopeKind::kInterleaved));
  if (args.rope != RopeKind::kNone) {
    checker.shape("cos", args.cos, {&positions, &half}, DType::kF32);
    checker.shape("sin", args.sin, {&positions, &half}, DType::kF32);
    if (2 * half.value > head_dim.value) {
      checker.refuse("cos", "has " + std::to_string(half.value) + " columns",
                     "at most half of D, which is " + std::to_string(head_dim.value));
    }
  }
  checker.optional("position_scale", args.position_scale, {&positions}, DType::kF32);
  const bool full_width = args.norm_full_width != 0;
  check_norm(checker, {"q_norm", "q_weight", "q_bias"}, args.q_norm, args.q_weight, args.q_bias,
             heads, head_dim, full_width, dtype);
  check_norm(checker, {"k_norm", "k_weight", "k_bias"}, args.k_norm, args.k_weight, args.k_bias,
             kv_heads, head_dim, full_width, dtype);
}

void rope_kv_write(const Backend& backend, const RopeKvWriteArgs& args, const RunOptions& options) {
  check(args);
  ops::run(backend, args, options, 2 * (ops::bytes_of(args.q) + ops::bytes_of(args.k)));
}

}  // namespace segki
