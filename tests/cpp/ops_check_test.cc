// Each op refuses what its contract excludes, and names the argument.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "segki/error.h"
#include "segki/ops.h"

namespace segki {
namespace {

constexpr std::int64_t kRows = 2;
constexpr std::int64_t kHidden = 8;
constexpr std::int64_t kOut = 6;
constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kGroup = 3;
constexpr std::int64_t kDim = 4;
constexpr std::int64_t kLength = 16;
constexpr std::int64_t kVocab = 10;

// Distinct memory for each view; never read by a check.
class Memory {
 public:
  template <typename... Sizes>
  TensorView f32(Sizes... sizes) {
    return dense_view(take(), DType::kF32, sizes...);
  }
  TensorView i32(std::int64_t n) { return dense_view(take(), DType::kI32, n); }
  template <typename... Sizes>
  TensorView i64(Sizes... sizes) {
    return dense_view(take(), DType::kI64, sizes...);
  }

 private:
  void* take() {
    blocks_.emplace_back(4096);
    return blocks_.back().data();
  }
  std::vector<std::vector<double>> blocks_;
};

// `call` throws kInvalidArgument with the op's and the argument's name in the message.
void expect_refused(const std::string& op, const std::string& argument,
                    const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << op << " accepted a bad '" << argument << "'";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << message;
    EXPECT_NE(message.find(op), std::string::npos) << message;
    EXPECT_NE(message.find(argument), std::string::npos) << message;
    EXPECT_NE(message.find("accepted"), std::string::npos) << message;
  }
}

// Tries every damage to a copy of good arguments.
template <typename Args>
struct Damage {
  std::string argument;
  std::function<void(Args&)> apply;
};

template <typename Args>
void expect_all_refused(const std::string& op, const Args& good,
                        const std::vector<Damage<Args>>& damages) {
  EXPECT_NO_THROW(check(good)) << op;
  for (const Damage<Args>& damage : damages) {
    Args bad = good;
    damage.apply(bad);
    expect_refused(op, damage.argument, [&bad] { check(bad); });
  }
}

TEST(OpsCheck, Norm) {
  Memory memory;
  NormArgs args;
  args.x = memory.f32(kRows, kHidden);
  args.weight = memory.f32(kHidden);
  args.out = memory.f32(kRows, kHidden);
  args.norm.kind = NormKind::kRms;
  using D = Damage<NormArgs>;
  expect_all_refused<NormArgs>(
      "norm", args,
      {D{"x", [](NormArgs& a) { a.x = {}; }}, D{"x", [](NormArgs& a) { a.x.stride[1] = 2; }},
       D{"x", [](NormArgs& a) { a.x.dtype = DType::kI32; }},
       D{"weight", [](NormArgs& a) { a.weight.shape[0] = kHidden + 1; }},
       D{"weight", [](NormArgs& a) { a.weight.dtype = DType::kBF16; }},
       D{"out", [](NormArgs& a) { a.out.shape[0] = kRows + 1; }},
       D{"x", [](NormArgs& a) { a.x.shape[0] = a.out.shape[0] = kMaxRows + 1; }}});
}

TEST(OpsCheck, Embedding) {
  Memory memory;
  EmbeddingArgs args;
  args.tokens = memory.i64(kRows);
  args.table = memory.f32(kVocab, kHidden);
  args.out = memory.f32(kRows, kHidden);
  using D = Damage<EmbeddingArgs>;
  expect_all_refused<EmbeddingArgs>(
      "embedding", args,
      {D{"tokens", [](EmbeddingArgs& a) { a.tokens.dtype = DType::kI32; }},
       D{"table", [](EmbeddingArgs& a) { a.table.rank = 1; }},
       D{"out", [](EmbeddingArgs& a) { a.out.shape[1] = kHidden - 1; }},
       D{"positions",
         [&memory](EmbeddingArgs& a) { a.position_table = memory.f32(kLength, kHidden); }}});
}

TEST(OpsCheck, SumNorm) {
  Memory memory;
  SumNormArgs args;
  args.count = 2;
  args.terms[0] = memory.f32(kRows, kHidden);
  args.terms[1] = memory.f32(kRows, kHidden);
  args.sum = memory.f32(kRows, kHidden);
  args.weight = memory.f32(kHidden);
  args.out = memory.f32(kRows, kHidden);
  args.norm.kind = NormKind::kRms;
  using D = Damage<SumNormArgs>;
  expect_all_refused<SumNormArgs>(
      "sum_norm", args,
      {D{"count", [](SumNormArgs& a) { a.count = 4; }},
       D{"terms[1]", [](SumNormArgs& a) { a.terms[1].shape[1] = kHidden + 1; }},
       D{"sum", [](SumNormArgs& a) { a.sum = {}; }}, D{"out", [](SumNormArgs& a) { a.out = {}; }},
       D{"out", [](SumNormArgs& a) { a.out = a.sum; }}});
}

TEST(OpsCheck, Projection) {
  Memory memory;
  ProjectionArgs args;
  args.count = 2;
  args.x = memory.f32(kRows, kHidden);
  for (int i = 0; i < 2; ++i) {
    args.weight[i] = memory.f32(kOut, kHidden);
    args.out[i] = memory.f32(kRows, kOut);
  }
  using D = Damage<ProjectionArgs>;
  expect_all_refused<ProjectionArgs>(
      "projection", args,
      {D{"count", [](ProjectionArgs& a) { a.count = 0; }},
       D{"count", [](ProjectionArgs& a) { a.count = 5; }},
       D{"weight[1]", [](ProjectionArgs& a) { a.weight[1].shape[1] = kHidden - 1; }},
       D{"weight[0]", [](ProjectionArgs& a) { a.weight[0].stride[0] = kHidden + 4; }},
       D{"bias[0]", [&memory](ProjectionArgs& a) { a.bias[0] = memory.f32(kOut + 1); }},
       D{"out[1]", [](ProjectionArgs& a) { a.out[1] = a.out[0]; }},
       D{"residual",
         [&memory](ProjectionArgs& a) { a.residual = memory.f32(kRows, kOut); }},  // two weights
       D{"weight[0]", [](ProjectionArgs& a) { a.transposed = 1; }}});
}

TEST(OpsCheck, GatedProjection) {
  Memory memory;
  GatedProjectionArgs args;
  args.x = memory.f32(kRows, kHidden);
  args.gate = memory.f32(kOut, kHidden);
  args.up = memory.f32(kOut, kHidden);
  args.out = memory.f32(kRows, kOut);
  using D = Damage<GatedProjectionArgs>;
  expect_all_refused<GatedProjectionArgs>(
      "gated_projection", args,
      {D{"gate", [](GatedProjectionArgs& a) { a.gate = {}; }},
       D{"up", [](GatedProjectionArgs& a) { a.up.shape[0] = kOut + 1; }},
       D{"up_bias", [&memory](GatedProjectionArgs& a) { a.up_bias = memory.f32(kOut - 1); }},
       D{"out", [](GatedProjectionArgs& a) { a.out.dtype = DType::kF16; }},
       D{"fp32_activation", [](GatedProjectionArgs& a) { a.fp32_activation = 2; }}});
}

RopeKvWriteArgs good_rope(Memory& memory) {
  RopeKvWriteArgs args;
  args.q = memory.f32(kRows, kHeads, kGroup, kDim);
  args.k = memory.f32(kRows, kHeads, kDim);
  args.v = memory.f32(kRows, kHeads, kDim);
  args.cos = memory.f32(kLength, kDim / 2);
  args.sin = memory.f32(kLength, kDim / 2);
  args.positions = memory.i32(kRows);
  args.lengths = memory.i32(kRows);
  args.q_out = memory.f32(kRows, kHeads * kGroup, kDim);
  args.k_cache = memory.f32(kRows, kHeads, kLength, kDim);
  args.v_cache = memory.f32(kRows, kHeads, kLength, kDim);
  args.rope = RopeKind::kNeox;
  return args;
}

TEST(OpsCheck, RopeKvWrite) {
  Memory memory;
  using D = Damage<RopeKvWriteArgs>;
  expect_all_refused<RopeKvWriteArgs>(
      "rope_kv_write", good_rope(memory),
      {D{"k", [](RopeKvWriteArgs& a) { a.k.shape[1] = kHeads + 1; }},
       D{"cos", [](RopeKvWriteArgs& a) { a.cos = {}; }},
       D{"sin", [](RopeKvWriteArgs& a) { a.sin.shape[1] = kDim; }},
       D{"positions", [](RopeKvWriteArgs& a) { a.positions = {}; }},
       D{"lengths", [](RopeKvWriteArgs& a) { a.lengths.dtype = DType::kI64; }},
       D{"q_out", [](RopeKvWriteArgs& a) { a.q_out.shape[1] = kHeads; }},
       D{"v_cache", [](RopeKvWriteArgs& a) { a.v_cache.shape[2] = kLength - 1; }}});
}

TEST(OpsCheck, Attention) {
  Memory memory;
  AttentionArgs args;
  args.q = memory.f32(kRows, kHeads * kGroup, kDim);
  args.k_cache = memory.f32(kRows, kHeads, kLength, kDim);
  args.v_cache = memory.f32(kRows, kHeads, kLength, kDim);
  args.lengths = memory.i32(kRows);
  args.out = memory.f32(kRows, kHeads * kGroup * kDim);
  using D = Damage<AttentionArgs>;
  expect_all_refused<AttentionArgs>(
      "attention", args,
      {D{"q", [](AttentionArgs& a) { a.q.shape[2] = kDim + 1; }},
       D{"k_cache", [](AttentionArgs& a) { a.k_cache.dtype = DType::kBF16; }},
       D{"lengths", [](AttentionArgs& a) { a.lengths = {}; }},
       D{"out", [](AttentionArgs& a) { a.out.shape[1] = kDim; }},
       D{"window", [](AttentionArgs& a) { a.window = -1; }},
       D{"gate_bias", [&memory](AttentionArgs& a) { a.gate_bias = memory.f32(kHeads); }}});
}

TEST(OpsCheck, LmHeadAndArgmax) {
  Memory memory;
  LmHeadArgs head;
  head.x = memory.f32(kRows, kHidden);
  head.weight = memory.f32(kVocab, kHidden);
  head.logits = memory.f32(kRows, kVocab);
  using H = Damage<LmHeadArgs>;
  expect_all_refused<LmHeadArgs>(
      "lm_head", head,
      {H{"logits", [](LmHeadArgs& a) { a.logits.dtype = DType::kBF16; }},
       H{"weight", [](LmHeadArgs& a) { a.weight.shape[1] = kHidden + 1; }},
       H{"divisor", [](LmHeadArgs& a) { a.divisor = 0.0F; }},
       H{"fp32_softcap", [](LmHeadArgs& a) { a.fp32_softcap = -1; }}});
  ArgmaxArgs args;
  args.logits = head.logits;
  args.tokens = memory.i64(kRows);
  using A = Damage<ArgmaxArgs>;
  expect_all_refused<ArgmaxArgs>(
      "argmax", args,
      {A{"tokens", [](ArgmaxArgs& a) { a.tokens.dtype = DType::kI32; }},
       A{"log_prob", [&memory](ArgmaxArgs& a) { a.log_prob = memory.f32(kRows + 1); }}});
}

TEST(OpsCheck, SelectToken) {
  Memory memory;
  SelectTokenArgs args;
  args.logits = memory.f32(kRows, kVocab);
  args.next = memory.i64(kRows);
  args.lengths = memory.i32(kRows);
  args.positions = memory.i32(kRows);
  args.generated = memory.i32(kRows);
  args.finished = memory.i32(kRows);
  args.history = memory.i64(kRows, kLength);
  args.max_new_tokens = 8;
  using D = Damage<SelectTokenArgs>;
  expect_all_refused<SelectTokenArgs>(
      "select_token", args,
      {D{"next", [](SelectTokenArgs& a) { a.next = {}; }},
       D{"finished", [](SelectTokenArgs& a) { a.finished.shape[0] = kRows + 1; }},
       D{"history", [](SelectTokenArgs& a) { a.history.dtype = DType::kI32; }},
       D{"max_new_tokens", [](SelectTokenArgs& a) { a.max_new_tokens = 0; }},
       D{"frozen", [&memory](SelectTokenArgs& a) { a.frozen = memory.i32(kRows + 1); }},
       D{"frozen", [&memory](SelectTokenArgs& a) { a.frozen = memory.i64(kRows); }},
       D{"min_new_tokens", [](SelectTokenArgs& a) { a.min_new_tokens = -1; }}});
}

GatedDeltaArgs good_gated_delta(Memory& memory) {
  constexpr std::int64_t kValue = 5, kWidth = 4;
  constexpr std::int64_t kChannels = 2 * kHeads * kDim + kHeads * kGroup * kValue;
  GatedDeltaArgs args;
  args.q = memory.f32(kRows, kHeads, kDim);
  args.k = memory.f32(kRows, kHeads, kDim);
  args.v = memory.f32(kRows, kHeads, kGroup, kValue);
  args.z = memory.f32(kRows, kHeads, kGroup, kValue);
  args.a = memory.f32(kRows, kHeads, kGroup);
  args.b = memory.f32(kRows, kHeads, kGroup);
  args.conv_weight = memory.f32(kChannels, kWidth);
  args.conv_bias = memory.f32(kChannels);
  args.a_log = memory.f32(kHeads * kGroup);
  args.dt_bias = memory.f32(kHeads * kGroup);
  args.norm_weight = memory.f32(kValue);
  args.slots = memory.i32(kRows);
  args.frozen = memory.i32(kRows);
  args.conv_state = memory.f32(kRows + 1, kChannels, kWidth);
  args.state = memory.f32(kRows + 1, kHeads * kGroup, kDim, kValue);
  args.out = memory.f32(kRows, kHeads * kGroup * kValue);
  args.norm.kind = NormKind::kRms;
  return args;
}

TEST(OpsCheck, GatedDelta) {
  Memory memory;
  using D = Damage<GatedDeltaArgs>;
  expect_all_refused<GatedDeltaArgs>(
      "gated_delta", good_gated_delta(memory),
      {D{"q", [](GatedDeltaArgs& a) { a.q = {}; }},
       D{"q", [](GatedDeltaArgs& a) { a.q.dtype = DType::kI32; }},
       D{"q", [](GatedDeltaArgs& a) { a.q.stride[2] = 2; }},
       D{"q",
         [](GatedDeltaArgs& a) {
           for (TensorView* view : {&a.q, &a.k, &a.v, &a.z, &a.a, &a.b, &a.out}) {
             view->shape[0] = kMaxRows + 1;
           }
           a.slots = a.frozen = {};
         }},
       D{"k", [](GatedDeltaArgs& a) { a.k.shape[2] = kDim + 1; }},
       D{"v", [](GatedDeltaArgs& a) { a.v.shape[1] = kHeads + 1; }},
       D{"z", [](GatedDeltaArgs& a) { a.z.shape[3] += 1; }},
       D{"a", [](GatedDeltaArgs& a) { a.a.rank = 2; }},
       D{"b", [](GatedDeltaArgs& a) { a.b.dtype = DType::kBF16; }},
       D{"conv_weight", [](GatedDeltaArgs& a) { a.conv_weight.shape[0] -= 1; }},
       D{"conv_weight", [](GatedDeltaArgs& a) { a.conv_weight.stride[0] += 1; }},
       D{"conv_weight",
         [](GatedDeltaArgs& a) {
           a.conv_weight.shape[1] = a.conv_state.shape[2] = 1;
           a.conv_weight.stride[0] = 1;
         }},
       D{"conv_weight",
         [](GatedDeltaArgs& a) {
           a.conv_weight.shape[1] = a.conv_state.shape[2] = 9;
           a.conv_weight.stride[0] = 9;
         }},
       D{"conv_bias", [](GatedDeltaArgs& a) { a.conv_bias.shape[0] += 1; }},
       D{"a_log", [](GatedDeltaArgs& a) { a.a_log.shape[0] = kHeads; }},
       D{"a_log", [](GatedDeltaArgs& a) { a.a_log.dtype = DType::kF16; }},
       D{"dt_bias", [](GatedDeltaArgs& a) { a.dt_bias = {}; }},
       D{"norm_weight", [](GatedDeltaArgs& a) { a.norm_weight.shape[0] = kDim; }},
       D{"norm.kind", [](GatedDeltaArgs& a) { a.norm.kind = NormKind::kLayer; }},
       D{"norm.eps", [](GatedDeltaArgs& a) { a.norm.eps = -1.0F; }},
       D{"slots", [](GatedDeltaArgs& a) { a.slots.dtype = DType::kI64; }},
       D{"frozen", [](GatedDeltaArgs& a) { a.frozen.shape[0] = kRows + 1; }},
       D{"conv_state", [](GatedDeltaArgs& a) { a.conv_state.shape[2] = 3; }},
       D{"conv_state", [](GatedDeltaArgs& a) { a.conv_state.stride[1] += 1; }},
       D{"state", [](GatedDeltaArgs& a) { a.state.dtype = DType::kBF16; }},
       D{"state", [](GatedDeltaArgs& a) { a.state.shape[0] = kRows; }},
       D{"state", [](GatedDeltaArgs& a) { a.state.stride[2] += 1; }},
       D{"state",
         [](GatedDeltaArgs& a) {
           a.slots = {};
           a.conv_state.shape[0] = a.state.shape[0] = kRows - 1;
         }},
       D{"out", [](GatedDeltaArgs& a) { a.out.shape[1] = kDim; }},
       D{"out", [](GatedDeltaArgs& a) { a.out.stride[0] = 1; }},
       D{"l2_eps", [](GatedDeltaArgs& a) { a.l2_eps = -1e-6F; }},
       D{"query_scale", [](GatedDeltaArgs& a) { a.query_scale = INFINITY; }},
       D{"beta_scale", [](GatedDeltaArgs& a) { a.beta_scale = NAN; }},
       D{"conv_activation",
         [](GatedDeltaArgs& a) { a.conv_activation = static_cast<Activation>(6); }},
       D{"gate_activation",
         [](GatedDeltaArgs& a) { a.gate_activation = static_cast<Activation>(-1); }}});
}

}  // namespace
}  // namespace segki
