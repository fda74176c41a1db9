// The checks that the one-token and the prompt form of a GatedDeltaNet block share.
#pragma once

#include <string>

#include "ops/check.h"

namespace segki::ops {

struct GdnDims {
  explicit GdnDims(const char* tokens_symbol) : tokens{tokens_symbol} {}

  Dim tokens;
  Dim key_heads{"Hk"};
  Dim key_dim{"Dk"};
  Dim group{"R"};
  Dim value_dim{"Dv"};
  Dim value_heads{"Hk * R"};
  Dim channels{"C"};
  Dim width{"W"};
};

template <typename Args>
void check_gdn(const Checker& checker, const Args& args, GdnDims& dims) {
  checker.shape("q", args.q, {&dims.tokens, &dims.key_heads, &dims.key_dim});
  const DType dtype = checker.model_dtype("q", args.q);
  checker.shape("k", args.k, {&dims.tokens, &dims.key_heads, &dims.key_dim}, dtype);
  checker.shape("v", args.v, {&dims.tokens, &dims.key_heads, &dims.group, &dims.value_dim}, dtype);
  checker.shape("z", args.z, {&dims.tokens, &dims.key_heads, &dims.group, &dims.value_dim}, dtype);
  checker.shape("a", args.a, {&dims.tokens, &dims.key_heads, &dims.group}, dtype);
  checker.shape("b", args.b, {&dims.tokens, &dims.key_heads, &dims.group}, dtype);
  dims.value_heads.value = dims.key_heads.value * dims.group.value;
  dims.channels.value =
      2 * dims.key_heads.value * dims.key_dim.value + dims.value_heads.value * dims.value_dim.value;
  checker.shape("conv_weight", args.conv_weight, {&dims.channels, &dims.width}, dtype);
  checker.dense("conv_weight", args.conv_weight);
  checker.number("conv_weight's width", dims.width.value, 2, 8);
  checker.optional("conv_bias", args.conv_bias, {&dims.channels}, dtype);
  const auto numbers = [&](const char* name, const TensorView& view) {
    checker.shape(name, view, {&dims.value_heads});
    if (view.dtype != DType::kF32) checker.dtype(name, view, dtype);
  };
  numbers("a_log", args.a_log);
  numbers("dt_bias", args.dt_bias);
  checker.shape("norm_weight", args.norm_weight, {&dims.value_dim}, dtype);
  checker.number("norm.kind", static_cast<std::int32_t>(args.norm.kind),
                 static_cast<std::int32_t>(NormKind::kRms),
                 static_cast<std::int32_t>(NormKind::kRms));
  checker.norm_spec("norm", args.norm);
  checker.not_negative("l2_eps", args.l2_eps);
  checker.finite("query_scale", args.query_scale);
  checker.finite("beta_scale", args.beta_scale);
  checker.number("conv_activation", static_cast<std::int32_t>(args.conv_activation), 0,
                 static_cast<std::int32_t>(Activation::kRelu2));
  checker.number("gate_activation", static_cast<std::int32_t>(args.gate_activation), 0,
                 static_cast<std::int32_t>(Activation::kRelu2));
  Dim out_width{"Hk * R * Dv", dims.value_heads.value * dims.value_dim.value};
  checker.shape("out", args.out, {&dims.tokens, &out_width}, dtype);
  checker.writable("out", args.out);
}

}  // namespace segki::ops
