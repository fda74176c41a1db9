#include <nanobind/stl/vector.h>

#include <array>
#include <vector>

#include "python/bindings.h"
#include "segki/error.h"
#include "segki/ops.h"

namespace nb = nanobind;

namespace segki::python {
namespace {

// A fixed array of views as a Python list; `count`, where the struct has one, follows the length.
template <typename Args, std::size_t N>
std::vector<TensorView> get_views(TensorView (Args::*field)[N], const Args& args) {
  return std::vector<TensorView>(args.*field, args.*field + N);
}

template <typename Args, std::size_t N>
void set_views(TensorView (Args::*field)[N], Args& args, const std::vector<TensorView>& views) {
  if (views.size() > N) {
    throw Error(ErrorCode::kInvalidArgument, "given " + std::to_string(views.size()) +
                                                 " views, accepted up to " + std::to_string(N));
  }
  for (std::size_t i = 0; i < N; ++i) {
    (args.*field)[i] = i < views.size() ? views[i] : TensorView();
  }
}

template <typename Args, auto Field>
void def_views(nb::class_<Args>& cls, const char* name) {
  cls.def_prop_rw(
      name, [](const Args& args) { return get_views(Field, args); },
      [](Args& args, const std::vector<TensorView>& views) { set_views(Field, args, views); });
}

template <typename Args>
void def_op(nb::module_& module, const char* name,
            void (*op)(const Backend&, const Args&, const RunOptions&)) {
  module.def(
      name, [op](const Backend& backend, const Args& args) { op(backend, args, RunOptions{}); },
      nb::arg("backend"), nb::arg("args"));
}

}  // namespace

void bind_ops(nb::module_& module) {
  nb::enum_<Activation>(module, "Activation")
      .value("none", Activation::kNone)
      .value("silu", Activation::kSilu)
      .value("gelu_tanh", Activation::kGeluTanh)
      .value("gelu_erf", Activation::kGeluErf)
      .value("relu", Activation::kRelu)
      .value("relu2", Activation::kRelu2);
  nb::enum_<NormKind>(module, "NormKind")
      .value("none", NormKind::kNone)
      .value("rms", NormKind::kRms)
      .value("layer", NormKind::kLayer);
  nb::enum_<RopeKind>(module, "RopeKind")
      .value("none", RopeKind::kNone)
      .value("neox", RopeKind::kNeox)
      .value("interleaved", RopeKind::kInterleaved);

  nb::enum_<RouterScore>(module, "RouterScore")
      .value("softmax", RouterScore::kSoftmax)
      .value("softmax_chosen", RouterScore::kSoftmaxChosen)
      .value("sigmoid", RouterScore::kSigmoid);

  nb::class_<NormSpec>(module, "NormSpec")
      .def(nb::init<>())
      .def_rw("kind", &NormSpec::kind)
      .def_rw("eps", &NormSpec::eps)
      .def_rw("weight_offset", &NormSpec::weight_offset)
      .def_rw("round_before_weight", &NormSpec::round_before_weight);

  nb::class_<EmbeddingArgs>(module, "EmbeddingArgs")
      .def(nb::init<>())
      .def_rw("tokens", &EmbeddingArgs::tokens)
      .def_rw("table", &EmbeddingArgs::table)
      .def_rw("positions", &EmbeddingArgs::positions)
      .def_rw("position_table", &EmbeddingArgs::position_table)
      .def_rw("out", &EmbeddingArgs::out)
      .def_rw("scale", &EmbeddingArgs::scale)
      .def_rw("position_offset", &EmbeddingArgs::position_offset);

  nb::class_<NormArgs>(module, "NormArgs")
      .def(nb::init<>())
      .def_rw("x", &NormArgs::x)
      .def_rw("weight", &NormArgs::weight)
      .def_rw("bias", &NormArgs::bias)
      .def_rw("out", &NormArgs::out)
      .def_rw("norm", &NormArgs::norm);

  nb::class_<SumNormArgs> sum_norm_args(module, "SumNormArgs");
  sum_norm_args.def(nb::init<>())
      .def_rw("count", &SumNormArgs::count)
      .def_rw("sum", &SumNormArgs::sum)
      .def_rw("weight", &SumNormArgs::weight)
      .def_rw("bias", &SumNormArgs::bias)
      .def_rw("out", &SumNormArgs::out)
      .def_rw("norm", &SumNormArgs::norm)
      .def_prop_rw(
          "scales",
          [](const SumNormArgs& args) { return std::vector<float>(args.scales, args.scales + 3); },
          [](SumNormArgs& args, const std::vector<float>& scales) {
            for (std::size_t i = 0; i < 3; ++i) {
              args.scales[i] = i < scales.size() ? scales[i] : 1.0F;
            }
          });
  def_views<SumNormArgs, &SumNormArgs::terms>(sum_norm_args, "terms");

  nb::class_<ProjectionArgs> projection_args(module, "ProjectionArgs");
  projection_args.def(nb::init<>())
      .def_rw("x", &ProjectionArgs::x)
      .def_rw("residual", &ProjectionArgs::residual)
      .def_rw("residual_scale", &ProjectionArgs::residual_scale)
      .def_rw("branch_scale", &ProjectionArgs::branch_scale)
      .def_rw("count", &ProjectionArgs::count)
      .def_rw("transposed", &ProjectionArgs::transposed)
      .def_rw("activation", &ProjectionArgs::activation)
      .def(
          "out_at",
          [](ProjectionArgs& args, int i) -> TensorView& {
            if (i < 0 || i > 3) throw nb::index_error();
            return args.out[i];
          },
          nb::rv_policy::reference_internal);
  def_views<ProjectionArgs, &ProjectionArgs::weight>(projection_args, "weight");
  def_views<ProjectionArgs, &ProjectionArgs::bias>(projection_args, "bias");
  def_views<ProjectionArgs, &ProjectionArgs::out>(projection_args, "out");

  nb::class_<GatedProjectionArgs>(module, "GatedProjectionArgs")
      .def(nb::init<>())
      .def_rw("x", &GatedProjectionArgs::x)
      .def_rw("gate", &GatedProjectionArgs::gate)
      .def_rw("up", &GatedProjectionArgs::up)
      .def_rw("gate_bias", &GatedProjectionArgs::gate_bias)
      .def_rw("up_bias", &GatedProjectionArgs::up_bias)
      .def_rw("out", &GatedProjectionArgs::out)
      .def_rw("activation", &GatedProjectionArgs::activation)
      .def_rw("fp32_activation", &GatedProjectionArgs::fp32_activation);

  nb::class_<RopeKvWriteArgs>(module, "RopeKvWriteArgs")
      .def(nb::init<>())
      .def_rw("q", &RopeKvWriteArgs::q)
      .def_rw("k", &RopeKvWriteArgs::k)
      .def_rw("v", &RopeKvWriteArgs::v)
      .def_rw("q_weight", &RopeKvWriteArgs::q_weight)
      .def_rw("q_bias", &RopeKvWriteArgs::q_bias)
      .def_rw("k_weight", &RopeKvWriteArgs::k_weight)
      .def_rw("k_bias", &RopeKvWriteArgs::k_bias)
      .def_rw("cos", &RopeKvWriteArgs::cos)
      .def_rw("sin", &RopeKvWriteArgs::sin)
      .def_rw("position_scale", &RopeKvWriteArgs::position_scale)
      .def_rw("positions", &RopeKvWriteArgs::positions)
      .def_rw("lengths", &RopeKvWriteArgs::lengths)
      .def_rw("slots", &RopeKvWriteArgs::slots)
      .def_rw("q_out", &RopeKvWriteArgs::q_out)
      .def_rw("k_cache", &RopeKvWriteArgs::k_cache)
      .def_rw("v_cache", &RopeKvWriteArgs::v_cache)
      .def_rw("q_norm", &RopeKvWriteArgs::q_norm)
      .def_rw("k_norm", &RopeKvWriteArgs::k_norm)
      .def_rw("norm_full_width", &RopeKvWriteArgs::norm_full_width)
      .def_rw("norm_after_rope", &RopeKvWriteArgs::norm_after_rope)
      .def_rw("rope", &RopeKvWriteArgs::rope)
      .def_rw("round_products", &RopeKvWriteArgs::round_products);

  nb::class_<AttentionArgs>(module, "AttentionArgs")
      .def(nb::init<>())
      .def_rw("q", &AttentionArgs::q)
      .def_rw("k_cache", &AttentionArgs::k_cache)
      .def_rw("v_cache", &AttentionArgs::v_cache)
      .def_rw("lengths", &AttentionArgs::lengths)
      .def_rw("first", &AttentionArgs::first)
      .def_rw("slots", &AttentionArgs::slots)
      .def_rw("gate", &AttentionArgs::gate)
      .def_rw("out", &AttentionArgs::out)
      .def_rw("partial", &AttentionArgs::partial)
      .def_rw("arrived", &AttentionArgs::arrived)
      .def_rw("scale", &AttentionArgs::scale)
      .def_rw("softcap", &AttentionArgs::softcap)
      .def_rw("window", &AttentionArgs::window)
      .def_rw("gate_bias", &AttentionArgs::gate_bias);

  nb::class_<LmHeadArgs>(module, "LmHeadArgs")
      .def(nb::init<>())
      .def_rw("x", &LmHeadArgs::x)
      .def_rw("weight", &LmHeadArgs::weight)
      .def_rw("bias", &LmHeadArgs::bias)
      .def_rw("logits", &LmHeadArgs::logits)
      .def_rw("scale", &LmHeadArgs::scale)
      .def_rw("divisor", &LmHeadArgs::divisor)
      .def_rw("softcap", &LmHeadArgs::softcap)
      .def_rw("transposed", &LmHeadArgs::transposed)
      .def_rw("fp32_softcap", &LmHeadArgs::fp32_softcap);

  nb::class_<ArgmaxArgs>(module, "ArgmaxArgs")
      .def(nb::init<>())
      .def_rw("logits", &ArgmaxArgs::logits)
      .def_rw("tokens", &ArgmaxArgs::tokens)
      .def_rw("log_prob", &ArgmaxArgs::log_prob);

  nb::class_<SelectTokenArgs>(module, "SelectTokenArgs")
      .def(nb::init<>())
      .def_rw("logits", &SelectTokenArgs::logits)
      .def_rw("next", &SelectTokenArgs::next)
      .def_rw("lengths", &SelectTokenArgs::lengths)
      .def_rw("positions", &SelectTokenArgs::positions)
      .def_rw("generated", &SelectTokenArgs::generated)
      .def_rw("finished", &SelectTokenArgs::finished)
      .def_rw("history", &SelectTokenArgs::history)
      .def_rw("log_prob", &SelectTokenArgs::log_prob)
      .def_rw("eos", &SelectTokenArgs::eos)
      .def_rw("forced", &SelectTokenArgs::forced)
      .def_rw("frozen", &SelectTokenArgs::frozen)
      .def_rw("pad", &SelectTokenArgs::pad)
      .def_rw("min_new_tokens", &SelectTokenArgs::min_new_tokens)
      .def_rw("max_new_tokens", &SelectTokenArgs::max_new_tokens)
      .def_rw("advance_finished", &SelectTokenArgs::advance_finished);

  nb::class_<GatedDeltaArgs>(module, "GatedDeltaArgs")
      .def(nb::init<>())
      .def_rw("q", &GatedDeltaArgs::q)
      .def_rw("k", &GatedDeltaArgs::k)
      .def_rw("v", &GatedDeltaArgs::v)
      .def_rw("z", &GatedDeltaArgs::z)
      .def_rw("a", &GatedDeltaArgs::a)
      .def_rw("b", &GatedDeltaArgs::b)
      .def_rw("conv_weight", &GatedDeltaArgs::conv_weight)
      .def_rw("conv_bias", &GatedDeltaArgs::conv_bias)
      .def_rw("a_log", &GatedDeltaArgs::a_log)
      .def_rw("dt_bias", &GatedDeltaArgs::dt_bias)
      .def_rw("norm_weight", &GatedDeltaArgs::norm_weight)
      .def_rw("slots", &GatedDeltaArgs::slots)
      .def_rw("frozen", &GatedDeltaArgs::frozen)
      .def_rw("conv_state", &GatedDeltaArgs::conv_state)
      .def_rw("state", &GatedDeltaArgs::state)
      .def_rw("out", &GatedDeltaArgs::out)
      .def_rw("norm", &GatedDeltaArgs::norm)
      .def_rw("l2_eps", &GatedDeltaArgs::l2_eps)
      .def_rw("query_scale", &GatedDeltaArgs::query_scale)
      .def_rw("beta_scale", &GatedDeltaArgs::beta_scale)
      .def_rw("conv_activation", &GatedDeltaArgs::conv_activation)
      .def_rw("gate_activation", &GatedDeltaArgs::gate_activation);

  nb::class_<GatedDeltaPrefillArgs>(module, "GatedDeltaPrefillArgs")
      .def(nb::init<>())
      .def_rw("q", &GatedDeltaPrefillArgs::q)
      .def_rw("k", &GatedDeltaPrefillArgs::k)
      .def_rw("v", &GatedDeltaPrefillArgs::v)
      .def_rw("z", &GatedDeltaPrefillArgs::z)
      .def_rw("a", &GatedDeltaPrefillArgs::a)
      .def_rw("b", &GatedDeltaPrefillArgs::b)
      .def_rw("conv_weight", &GatedDeltaPrefillArgs::conv_weight)
      .def_rw("conv_bias", &GatedDeltaPrefillArgs::conv_bias)
      .def_rw("a_log", &GatedDeltaPrefillArgs::a_log)
      .def_rw("dt_bias", &GatedDeltaPrefillArgs::dt_bias)
      .def_rw("norm_weight", &GatedDeltaPrefillArgs::norm_weight)
      .def_rw("begins", &GatedDeltaPrefillArgs::begins)
      .def_rw("ends", &GatedDeltaPrefillArgs::ends)
      .def_rw("conv_state", &GatedDeltaPrefillArgs::conv_state)
      .def_rw("state", &GatedDeltaPrefillArgs::state)
      .def_rw("out", &GatedDeltaPrefillArgs::out)
      .def_rw("norm", &GatedDeltaPrefillArgs::norm)
      .def_rw("l2_eps", &GatedDeltaPrefillArgs::l2_eps)
      .def_rw("query_scale", &GatedDeltaPrefillArgs::query_scale)
      .def_rw("beta_scale", &GatedDeltaPrefillArgs::beta_scale)
      .def_rw("conv_activation", &GatedDeltaPrefillArgs::conv_activation)
      .def_rw("gate_activation", &GatedDeltaPrefillArgs::gate_activation)
      .def_rw("continued", &GatedDeltaPrefillArgs::continued);

  nb::class_<RouterArgs>(module, "RouterArgs")
      .def(nb::init<>())
      .def_rw("logits", &RouterArgs::logits)
      .def_rw("bias", &RouterArgs::bias)
      .def_rw("experts", &RouterArgs::experts)
      .def_rw("weights", &RouterArgs::weights)
      .def_rw("score", &RouterArgs::score)
      .def_rw("dtype", &RouterArgs::dtype)
      .def_rw("choose_by_logit", &RouterArgs::choose_by_logit)
      .def_rw("groups", &RouterArgs::groups)
      .def_rw("group_top_k", &RouterArgs::group_top_k)
      .def_rw("group_by_max", &RouterArgs::group_by_max)
      .def_rw("mask_with_zero", &RouterArgs::mask_with_zero)
      .def_rw("sorted", &RouterArgs::sorted)
      .def_rw("normalise", &RouterArgs::normalise)
      .def_rw("sum_eps", &RouterArgs::sum_eps)
      .def_rw("sum_min", &RouterArgs::sum_min)
      .def_rw("scale", &RouterArgs::scale)
      .def_rw("round_weights", &RouterArgs::round_weights)
      .def_rw("round_scores", &RouterArgs::round_scores);

  nb::class_<ExpertGatedProjectionArgs>(module, "ExpertGatedProjectionArgs")
      .def(nb::init<>())
      .def_rw("x", &ExpertGatedProjectionArgs::x)
      .def_rw("experts", &ExpertGatedProjectionArgs::experts)
      .def_rw("gate", &ExpertGatedProjectionArgs::gate)
      .def_rw("up", &ExpertGatedProjectionArgs::up)
      .def_rw("gate_bias", &ExpertGatedProjectionArgs::gate_bias)
      .def_rw("up_bias", &ExpertGatedProjectionArgs::up_bias)
      .def_rw("out", &ExpertGatedProjectionArgs::out)
      .def_rw("weight_stride", &ExpertGatedProjectionArgs::weight_stride)
      .def_rw("transposed", &ExpertGatedProjectionArgs::transposed)
      .def_rw("activation", &ExpertGatedProjectionArgs::activation)
      .def_rw("fp32_activation", &ExpertGatedProjectionArgs::fp32_activation);

  nb::class_<ExpertProjectionArgs>(module, "ExpertProjectionArgs")
      .def(nb::init<>())
      .def_rw("x", &ExpertProjectionArgs::x)
      .def_rw("experts", &ExpertProjectionArgs::experts)
      .def_rw("weights", &ExpertProjectionArgs::weights)
      .def_rw("weight", &ExpertProjectionArgs::weight)
      .def_rw("bias", &ExpertProjectionArgs::bias)
      .def_rw("shared", &ExpertProjectionArgs::shared)
      .def_rw("shared_gate", &ExpertProjectionArgs::shared_gate)
      .def_rw("out", &ExpertProjectionArgs::out)
      .def_rw("weight_stride", &ExpertProjectionArgs::weight_stride)
      .def_rw("transposed", &ExpertProjectionArgs::transposed)
      .def_rw("round_products", &ExpertProjectionArgs::round_products)
      .def_rw("round_sums", &ExpertProjectionArgs::round_sums)
      .def_rw("routed_scale", &ExpertProjectionArgs::routed_scale)
      .def_rw("out_scale", &ExpertProjectionArgs::out_scale);

  def_op<EmbeddingArgs>(module, "embedding", &embedding);
  def_op<NormArgs>(module, "norm", &norm);
  def_op<SumNormArgs>(module, "sum_norm", &sum_norm);
  def_op<ProjectionArgs>(module, "projection", &projection);
  def_op<GatedProjectionArgs>(module, "gated_projection", &gated_projection);
  def_op<RopeKvWriteArgs>(module, "rope_kv_write", &rope_kv_write);
  def_op<AttentionArgs>(module, "attention", &attention);
  def_op<LmHeadArgs>(module, "lm_head", &lm_head);
  def_op<ArgmaxArgs>(module, "argmax", &argmax);
  def_op<SelectTokenArgs>(module, "select_token", &select_token);
  def_op<GatedDeltaArgs>(module, "gated_delta", &gated_delta);
  // A prompt takes milliseconds: other Python threads go on meanwhile.
  module.def(
      "gated_delta_prefill",
      [](const Backend& backend, const GatedDeltaPrefillArgs& args) {
        nb::gil_scoped_release unlocked;
        gated_delta_prefill(backend, args);
      },
      nb::arg("backend"), nb::arg("args"));
  def_op<RouterArgs>(module, "route_experts", &route_experts);
  def_op<ExpertGatedProjectionArgs>(module, "expert_gated_projection", &expert_gated_projection);
  def_op<ExpertProjectionArgs>(module, "expert_projection", &expert_projection);
}

}  // namespace segki::python
