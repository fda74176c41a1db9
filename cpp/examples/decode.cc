// Decodes with a one-layer model of random weights, without Python: embedding, attention block,
// gated MLP, final norm, LM head and the choice of the next token, as a step program under a decode
// loop. Prints the new tokens of each row.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <random>
#include <vector>

#include "segki/segki.h"

namespace {

constexpr int kRows = 3;
constexpr int kHidden = 64;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 16;
constexpr int kFeedForward = 160;
constexpr int kVocabulary = 300;
constexpr int kNewTokens = 40;

// Owns the model's memory. A deque, so that nothing moves when more is added.
class Memory {
 public:
  template <typename... Sizes>
  segki::TensorView random(Sizes... sizes) {
    segki::TensorView view = zeros(sizes...);
    const auto fan_in = static_cast<float>(view.shape[view.rank - 1]);
    std::normal_distribution<float> normal(0.0F, 1.0F / std::sqrt(fan_in));
    for (float& value : floats_.back()) value = normal(engine_);
    return view;
  }

  template <typename... Sizes>
  segki::TensorView zeros(Sizes... sizes) {
    std::vector<float>& values = floats_.emplace_back((static_cast<std::size_t>(sizes) * ...));
    return segki::dense_view(values.data(), segki::DType::kF32, sizes...);
  }

  segki::TensorView ones(int size) {
    segki::TensorView view = zeros(size);
    for (float& value : floats_.back()) value = 1.0F;
    return view;
  }

  segki::TensorView i32(int size) {
    return segki::dense_view(i32_.emplace_back(size).data(), segki::DType::kI32, size);
  }

  segki::TensorView i64(int rows, int columns) {
    auto& values = i64_.emplace_back(rows * columns);
    return segki::dense_view(values.data(), segki::DType::kI64, rows, columns);
  }

  segki::TensorView i64(std::vector<std::int64_t> given) {
    const auto size = static_cast<std::int64_t>(given.size());
    return segki::dense_view(i64_.emplace_back(std::move(given)).data(), segki::DType::kI64, size);
  }

 private:
  std::mt19937 engine_{17};
  std::deque<std::vector<float>> floats_;
  std::deque<std::vector<std::int32_t>> i32_;
  std::deque<std::vector<std::int64_t>> i64_;
};

segki::NormSpec rms_norm() {
  segki::NormSpec norm;
  norm.kind = segki::NormKind::kRms;
  norm.eps = 1e-5F;
  norm.round_before_weight = 1;
  return norm;
}

segki::ProjectionArgs projection(const segki::TensorView& x, const segki::TensorView& weight,
                                 const segki::TensorView& out) {
  segki::ProjectionArgs args;
  args.count = 1;
  args.x = x;
  args.weight[0] = weight;
  args.out[0] = out;
  return args;
}

// The same memory seen as [rows, heads, ..., head_dim].
template <typename... Sizes>
segki::TensorView as_heads(const segki::TensorView& view, Sizes... sizes) {
  return segki::dense_view(view.data, view.dtype, kRows, sizes...);
}

segki::StepProgram build_step(const segki::DecodeState& state, const segki::StopRule& rule,
                              const segki::HybridCache& cache, Memory& memory) {
  const segki::TensorView hidden = memory.zeros(kRows, kHidden);
  const segki::TensorView normed = memory.zeros(kRows, kHidden);
  const segki::TensorView q = memory.zeros(kRows, kHeads * kHeadDim);
  const segki::TensorView k = memory.zeros(kRows, kKvHeads * kHeadDim);
  const segki::TensorView v = memory.zeros(kRows, kKvHeads * kHeadDim);
  const segki::TensorView rotated = memory.zeros(kRows, kHeads, kHeadDim);
  const segki::TensorView attended = memory.zeros(kRows, kHeads * kHeadDim);
  const segki::TensorView product = memory.zeros(kRows, kFeedForward);
  const segki::TensorView logits = memory.zeros(kRows, kVocabulary);
  const segki::TensorView table = memory.random(kVocabulary, kHidden);

  const segki::TensorView cos = memory.zeros(kNewTokens, kHeadDim / 2);
  const segki::TensorView sin = memory.zeros(kNewTokens, kHeadDim / 2);
  for (int p = 0; p < kNewTokens; ++p) {
    for (int j = 0; j < kHeadDim / 2; ++j) {
      const double angle = p * std::pow(10000.0, -2.0 * j / kHeadDim);
      cos.as<float>()[p * kHeadDim / 2 + j] = static_cast<float>(std::cos(angle));
      sin.as<float>()[p * kHeadDim / 2 + j] = static_cast<float>(std::sin(angle));
    }
  }

  segki::StepProgramBuilder builder(segki::backend("cpu"));

  segki::EmbeddingArgs embedding;
  embedding.tokens = state.next;
  embedding.table = table;
  embedding.out = hidden;
  embedding.scale = std::sqrt(static_cast<float>(kHidden));
  builder.add(embedding);

  segki::NormArgs norm;
  norm.x = hidden;
  norm.weight = memory.ones(kHidden);
  norm.out = normed;
  norm.norm = rms_norm();
  builder.add(norm);

  segki::ProjectionArgs qkv;
  qkv.count = 3;
  qkv.x = normed;
  qkv.weight[0] = memory.random(kHeads * kHeadDim, kHidden);
  qkv.weight[1] = memory.random(kKvHeads * kHeadDim, kHidden);
  qkv.weight[2] = memory.random(kKvHeads * kHeadDim, kHidden);
  qkv.out[0] = q;
  qkv.out[1] = k;
  qkv.out[2] = v;
  builder.add(qkv);

  segki::RopeKvWriteArgs rope;
  rope.q = as_heads(q, kKvHeads, kHeads / kKvHeads, kHeadDim);
  rope.k = as_heads(k, kKvHeads, kHeadDim);
  rope.v = as_heads(v, kKvHeads, kHeadDim);
  rope.cos = cos;
  rope.sin = sin;
  rope.positions = state.positions;
  rope.lengths = state.lengths;
  rope.q_out = rotated;
  rope.k_cache = cache.keys(0);
  rope.v_cache = cache.values(0);
  rope.rope = segki::RopeKind::kNeox;
  builder.add(rope);

  segki::AttentionArgs attention;
  attention.q = rotated;
  attention.k_cache = cache.keys(0);
  attention.v_cache = cache.values(0);
  attention.lengths = state.lengths;
  attention.out = attended;
  attention.scale = 1.0F / std::sqrt(static_cast<float>(kHeadDim));
  builder.add(attention);

  segki::ProjectionArgs output =
      projection(attended, memory.random(kHidden, kHeads * kHeadDim), hidden);
  output.residual = hidden;
  builder.add(output);

  norm.weight = memory.ones(kHidden);
  builder.add(norm);

  segki::GatedProjectionArgs gated;
  gated.x = normed;
  gated.gate = memory.random(kFeedForward, kHidden);
  gated.up = memory.random(kFeedForward, kHidden);
  gated.out = product;
  builder.add(gated);

  segki::ProjectionArgs down = projection(product, memory.random(kHidden, kFeedForward), hidden);
  down.residual = hidden;
  builder.add(down);

  norm.weight = memory.ones(kHidden);
  builder.add(norm);

  segki::LmHeadArgs head;
  head.x = normed;
  head.weight = memory.random(kVocabulary, kHidden);
  head.logits = logits;
  builder.add(head);

  segki::SelectTokenArgs select;
  select.logits = logits;
  select.next = state.next;
  select.lengths = state.lengths;
  select.positions = state.positions;
  select.generated = state.generated;
  select.finished = state.finished;
  select.history = state.history;
  select.eos = memory.i64(rule.eos);
  select.pad = rule.pad;
  select.min_new_tokens = rule.min_new_tokens;
  select.max_new_tokens = rule.max_new_tokens;
  builder.add(select);

  return builder.finish();
}

void decode() {
  Memory memory;
  segki::StopRule rule;
  rule.eos = {2, 3, 5, 7};
  rule.max_new_tokens = kNewTokens;

  segki::CacheSpec spec;
  spec.rows = kRows;
  spec.max_len = kNewTokens;
  spec.layers = {segki::KvLayer{kKvHeads, kHeadDim, kHeadDim, 0, segki::DType::kF32}};
  const segki::HybridCache cache(spec);

  segki::DecodeState state;
  state.next = memory.i64({11, 12, 13});  // one start token a row
  state.lengths = memory.i32(kRows);
  state.positions = memory.i32(kRows);
  state.generated = memory.i32(kRows);
  state.finished = memory.i32(kRows);
  state.history = memory.i64(kRows, kNewTokens);

  segki::StepProgram program = build_step(state, rule, cache, memory);
  segki::DecodeLoop loop([&program] { program.run(); }, state, rule);
  const segki::DecodeResult result = loop.run();

  std::printf("%zu ops a step, %d steps\n", program.size(), result.steps_run);
  for (int r = 0; r < kRows; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const bool by_eos = result.reasons[row] == segki::StopReason::kEos;
    std::printf("row %d, %d tokens (%s):", r, result.lengths[row], by_eos ? "eos" : "length");
    const auto* tokens = state.history.as<const std::int64_t>() + r * state.history.stride[0];
    for (int c = 0; c < result.lengths[row]; ++c) {
      std::printf(" %lld", static_cast<long long>(tokens[c]));
    }
    std::printf("\n");
  }
}

}  // namespace

int main() {
  try {
    decode();
  } catch (const segki::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
