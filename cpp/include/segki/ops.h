// The ops: one argument struct and one function each.
//
// Conventions. `rows` is the number of sequences that decode together (1 to 64). "dtype" is the
// model's: f32, bf16 or f16; weights, activations and caches of one op have the same dtype unless
// said otherwise. Accumulation is fp32. "Rounded" means: to dtype, to nearest even, where the
// Hugging Face forward materialises the value; with f32 it means nothing. The last dimension of
// every view is dense (stride 1) and weights are dense. Outputs do not overlap inputs unless said
// otherwise. The order of each reduction is fixed by the shape of the weights (or, in attention, by
// the number of keys), never by `rows` or by the number of threads: a row's result is bit-identical
// in any batch.
//
// Each function checks its arguments (Error(kInvalidArgument) names the argument, what was given
// and what is accepted), asks the backend for its kernel (Error(kUnsupported) when there is none),
// and runs it: on the host before it returns, on a device on `stream`.
#pragma once

#include <cstdint>

#include "segki/backend.h"
#include "segki/export.h"
#include "segki/parallel.h"
#include "segki/tensor.h"

namespace segki {

constexpr int kMaxRows = 64;

// Where and how an op runs when it is called by itself. A null `parallel.run` is the default pool.
struct RunOptions {
  void* stream = nullptr;
  ParallelHook parallel;
};

enum class Activation : std::int32_t {
  kNone = 0,
  kSilu = 1,
  kGeluTanh = 2,
  kGeluErf = 3,
  kRelu = 4,
  kRelu2 = 5
};

enum class NormKind : std::int32_t { kNone = 0, kRms = 1, kLayer = 2 };

// How a value is normalised and meets its weight, in fp32 but for the roundings shown:
//   kRms:    n = x * rsqrt(mean(x^2) + eps)
//   kLayer:  n = (x - mean) * rsqrt(var + eps), var being the population variance
//   s = weight_offset + weight, or 1 where there is no weight
//   round_before_weight != 0:  y = round(round(n) * round(s))    as Hugging Face's LlamaRMSNorm
//   round_before_weight == 0:  y = round(n * s + bias)           as GemmaRMSNorm and LayerNorm
struct NormSpec {
  NormKind kind = NormKind::kNone;
  float eps = 0.0F;
  float weight_offset = 0.0F;
  std::int32_t round_before_weight = 0;
};

// out = round(round(table[token] * scale) + position_table[position + position_offset]); the second
// term only when position_table is present. A token outside [0, V) is the caller's error and is not
// looked at here: kernels clamp it into range, the runtime checks ids beforehand.
struct EmbeddingArgs {
  TensorView tokens;          // i64 [rows]
  TensorView table;           // [V, H]
  TensorView positions;       // i32 [rows], with position_table
  TensorView position_table;  // [P, H], optional
  TensorView out;             // [rows, H]
  float scale = 1.0F;
  std::int32_t position_offset = 0;
};

// out = norm(x). Optional weight [H] and bias [H] (bias only with kLayer). out may be x.
struct NormArgs {
  TensorView x;       // [rows, H]
  TensorView weight;  // [H], optional
  TensorView bias;    // [H], optional
  TensorView out;     // [rows, H]
  NormSpec norm;
};

// sum = ((t0 * s0) + (t1 * s1)) + (t2 * s2), rounded after every product with a scale that is not 1
// and after every addition; out = norm(sum). This is "residual add + norm" with scalars on either
// side; norm.kind == kNone leaves `out` out. `sum` may be any of the terms; `out` must be another
// buffer than `sum`.
struct SumNormArgs {
  TensorView terms[3];  // [rows, H]; the first `count` are used
  float scales[3] = {1.0F, 1.0F, 1.0F};
  std::int32_t count = 0;  // 1 to 3
  TensorView sum;          // [rows, H]
  TensorView weight;       // [H], optional
  TensorView bias;         // [H], optional
  TensorView out;          // [rows, H], absent when norm.kind is kNone
  NormSpec norm;
};

// 1 to 4 weights that share an input: y_i = round(x W_i^T + b_i), not rounded where out[i] is f32
// (the logits of a router that computes in fp32; no activation and no residual then, and weight and
// bias may be f32); then, where asked, y_i = round(activation(y_i)); then, for one weight and with
// `residual`, out = round(round(residual * residual_scale) + round(y * branch_scale)); out may be
// residual. The activation is evaluated in fp32 on the rounded value; kRelu2 rounds the relu
// (exact) and the square.
struct ProjectionArgs {
  TensorView x;          // [rows, K]
  TensorView weight[4];  // [N_i, K], or [K, N_i] when `transposed`
  TensorView bias[4];    // [N_i], optional
  TensorView out[4];     // [rows, N_i], any row stride; dtype or f32
  TensorView residual;   // [rows, N_0], optional, count == 1
  float residual_scale = 1.0F;
  float branch_scale = 1.0F;
  std::int32_t count = 0;
  std::int32_t transposed = 0;
  Activation activation = Activation::kNone;
};

// First half of a gated MLP: out = round(round(act(g)) * u) with g = round(x Wg^T + bg), u =
// round(x Wu^T + bu); with fp32_activation, out = round(act(g) * u). The second half is a
// projection.
struct GatedProjectionArgs {
  TensorView x;          // [rows, K]
  TensorView gate;       // [F, K]
  TensorView up;         // [F, K]
  TensorView gate_bias;  // [F], optional
  TensorView up_bias;    // [F], optional
  TensorView out;        // [rows, F]
  Activation activation = Activation::kSilu;
  std::int32_t fp32_activation = 0;
};

enum class RopeKind : std::int32_t { kNone = 0, kNeox = 1, kInterleaved = 2 };

// Optional norm of queries and keys, rotary embedding, and the write of the new key and value into
// the cache.
//
// For row r: cache row c = slots ? slots[r] : r, write index i = lengths[r] modulo L (a full layer
// has L > lengths[r]; a sliding layer is a ring). Rope, with p = positions[r] and R = 2 *
// cos.shape[1] rotary elements, pairs (a, b) = (x[j], x[j + R/2]) for kNeox, (x[2j], x[2j+1]) for
// kInterleaved:  a' = a * cos[p, j] - b * sin[p, j],  b' = b * cos[p, j] + a * sin[p, j]. With
// round_products the two products are rounded before they are added (Hugging Face's
// apply_rotary_pos_emb in bf16), else the result is rounded once. Elements past R pass through.
// With position_scale, q = round(q * position_scale[p]) at the end. The norm (q and k, never v) is
// over each head, or with norm_full_width over all heads of q (of k) at once; it comes before rope,
// or after with norm_after_rope.
struct RopeKvWriteArgs {
  TensorView q;  // [rows, Hkv, G, D], any strides but the last; query head h is (h / G, h % G)
  TensorView k;  // [rows, Hkv, D]
  TensorView v;  // [rows, Hkv, Dv]
  TensorView q_weight;  // [D], [Hq, D] or, with norm_full_width, [Hq * D]; optional
  TensorView q_bias;    // as q_weight; optional
  TensorView k_weight;  // [D], [Hkv, D] or [Hkv * D]; optional
  TensorView k_bias;    // as k_weight; optional
  TensorView
      cos;  // f32 [P, R/2], values as the model's forward has them (rounded to dtype where it does)
  TensorView sin;             // f32 [P, R/2]
  TensorView position_scale;  // f32 [P], optional
  TensorView positions;       // i32 [rows]
  TensorView lengths;         // i32 [rows], tokens already in the cache
  TensorView slots;           // i32 [rows], optional
  TensorView q_out;           // [rows, Hq, D], dense
  TensorView k_cache;         // [slots, Hkv, L, D]
  TensorView v_cache;         // [slots, Hkv, L, Dv]
  NormSpec q_norm;
  NormSpec k_norm;
  std::int32_t norm_full_width = 0;
  std::int32_t norm_after_rope = 0;
  RopeKind rope = RopeKind::kNone;
  std::int32_t round_products = 1;
};

// Attention of one new token a row over the cache, after rope_kv_write has written its key and
// value.
//
// Row r sees keys [max(first[r], lengths[r] + 1 - window), lengths[r]] (window 0: unlimited), key t
// at cache index t modulo L. score = q . k * scale, softcap: score = softcap * tanh(score /
// softcap); softmax and weighted sum in fp32, rounded once; with gate: out = round(out *
// round(sigmoid(gate))), where gate_bias makes it gate = round(gate + gate_bias of the query head).
// K and V are read once for the G query heads that share them. The reduction runs over keys in
// blocks counted from the first visible key, so that a left-padded row gives the bits of the row
// alone.
//
// With `partial`, a row's n visible keys are cut into min(S, ceil(n / kMinSplitKeys)) pieces of
// whole blocks, each a unit of work, so that few rows and heads keep many cores busy at long
// contexts. The part that finishes the last piece of a head adds all of them up in order; nobody
// waits. The cut depends on n and S alone.
struct AttentionArgs {
  TensorView q;        // [rows, Hq, D], dense
  TensorView k_cache;  // [slots, Hkv, L, D]
  TensorView v_cache;  // [slots, Hkv, L, Dv]
  TensorView lengths;  // i32 [rows], tokens in the cache before this one
  TensorView first;    // i32 [rows], optional: index of the first real token
  TensorView slots;    // i32 [rows], optional
  TensorView gate;     // [rows, Hkv, G, Dv], any strides but the last; optional
  TensorView out;      // [rows, Hq * Dv], dense
  TensorView partial;  // f32 [rows, Hkv, S, G * (Dv + 2)], dense, optional
  TensorView arrived;  // i32 [rows, Hkv], dense, with `partial`; zero between calls
  float scale = 1.0F;
  float softcap = 0.0F;  // 0: none
  std::int32_t window = 0;
  TensorView gate_bias;  // [Hq], with `gate`; optional
};

// Keys that one piece of a row's attention has at least, where `partial` lets it be split.
constexpr int kMinSplitKeys = 256;

// logits = softcap(round(round(x W^T + bias) * scale / divisor)), each step rounded to dtype as the
// model does; stored as f32. A scale or divisor of 1 and a softcap of 0 are left out. softcap(y) =
// round(round(tanh(round(y / cap))) * cap), with fp32_softcap without these three roundings.
struct LmHeadArgs {
  TensorView x;       // [rows, K]
  TensorView weight;  // [V, K], or [K, V] when transposed
  TensorView bias;    // [V], optional
  TensorView logits;  // f32 [rows, V]
  float scale = 1.0F;
  float divisor = 1.0F;
  float softcap = 0.0F;
  std::int32_t transposed = 0;
  std::int32_t fp32_softcap = 0;
};

// token = argmax(logits) with torch.argmax's answer: the lowest index among equals; NaN counts as
// the largest. log_prob = logits[token] - log(sum(exp(logits))), in fp32 with the maximum
// subtracted.
struct ArgmaxArgs {
  TensorView logits;    // f32 [rows, V]
  TensorView tokens;    // i64 [rows]
  TensorView log_prob;  // f32 [rows], optional
};

// Greedy choice of the next token and the bookkeeping of a step, for each row on its own.
// A row with finished[r] != 0:
//   next[r] = pad; history[r, generated[r]] = pad; generated[r] += 1; with `advance_finished` also
//   lengths[r] and positions[r] += 1 (transformers feeds pad tokens to stopped rows), else its
//   state stands still.
// Any other row:
//   t = argmax over its logits, with eos ids excluded while generated[r] < min_new_tokens;
//   history, log_prob and next get t; generated, lengths and positions += 1;
//   finished[r] = 1 when t is an eos id, else 2 when generated[r] reaches max_new_tokens, and 3
//   when a logit was NaN (t is then the NaN's index as torch.argmax gives it).
// With `forced` (teacher forcing), t = forced[r, generated[r]] and finished is never set to 1.
struct SelectTokenArgs {
  TensorView logits;     // f32 [rows, V]
  TensorView next;       // i64 [rows]
  TensorView lengths;    // i32 [rows]
  TensorView positions;  // i32 [rows]
  TensorView generated;  // i32 [rows]
  TensorView finished;   // i32 [rows], a StopReason
  TensorView history;    // i64 [rows, max_new_tokens + slack]; writes past its end are dropped
  TensorView log_prob;   // f32, as history; optional
  TensorView eos;        // i64 [n], optional
  TensorView forced;     // i64 [rows, T], optional
  TensorView
      frozen;  // i32 [rows], optional: set to 1 where the row's state stands still from now on
  std::int64_t pad = 0;
  std::int32_t min_new_tokens = 0;
  std::int32_t max_new_tokens = 0;
  std::int32_t advance_finished = 0;
};

// One step of a GatedDeltaNet (GDN) block, between its input projections and its output projection
// (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024; rounding points of Hugging Face's
// Qwen3-Next).
//
// Hk key heads serve R value heads each; value head h = (h / R, h % R). Channels of the
// convolution: queries [Hk * Dk], then keys [Hk * Dk], then values [Hk * R * Dv]; C in all. For row
// r with cache row c = slots ? slots[r] : r:
//   convolution: the new inputs are appended to conv_state[c], which keeps the last W inputs of
//   each channel, oldest first; y = round(conv_activation(round(sum_j weight[channel, j] *
//   window[j] + bias))) q = y_q * rsqrt(sum(y_q^2) + l2_eps) * query_scale,  k = y_k *
//   rsqrt(sum(y_k^2) + l2_eps)  (fp32) beta = round(round(sigmoid(b)) * beta_scale) g = -exp(a_log)
//   * softplus(a + dt_bias)    (fp32; softplus(x) = log1p(exp(x)), x above 20) S = S * exp(g);  S =
//   S + k (beta * (v - S^T k))^T;  o = round(S^T q)      (fp32, S is [Dk, Dv]) n = o *
//   rsqrt(mean(o^2) + norm.eps); norm.round_before_weight != 0: m = round(weight * round(n)), else
//   m = weight * n;  out = round(m * gate_activation(z)), the gate in fp32
// `norm` is kRms, its weight_offset is added to the weight. A row with frozen[r] != 0 leaves both
// states as they are and reads neither; its output is zero.
struct GatedDeltaArgs {
  TensorView q;            // [rows, Hk, Dk], before the convolution; any strides but the last
  TensorView k;            // as q
  TensorView v;            // [rows, Hk, R, Dv], any strides but the last
  TensorView z;            // as v
  TensorView a;            // [rows, Hk, R], any strides but the last
  TensorView b;            // as a
  TensorView conv_weight;  // [C, W], W 2 to 8
  TensorView conv_bias;    // [C], optional
  TensorView a_log;        // [Hk * R], dtype or f32
  TensorView dt_bias;      // [Hk * R], dtype or f32
  TensorView norm_weight;  // [Dv]
  TensorView slots;        // i32 [rows], optional
  TensorView frozen;       // i32 [rows], optional
  TensorView conv_state;   // [slots, C, W]
  TensorView state;        // f32 [slots, Hk * R, Dk, Dv]
  TensorView out;          // [rows, Hk * R * Dv]
  NormSpec norm;
  float l2_eps = 1e-6F;
  float query_scale = 1.0F;
  float beta_scale = 1.0F;
  Activation conv_activation = Activation::kSilu;
  Activation gate_activation = Activation::kSilu;
};

// The same for whole prompts, chunk by chunk: N tokens in all, sequence s being tokens [begins[s],
// ends[s]). Sequences do not overlap and know nothing of each other: rows of a left-padded batch,
// or packed sequences. Tokens of no sequence get a zero output. With `continued`, sequence s starts
// from conv_state[s] and state[s], else from zero; both are optional and get the state after the
// last token (a conv_state that is longer than the sequence is filled up with zeros on the left, or
// with what it held).
struct GatedDeltaPrefillArgs {
  TensorView q;            // [N, Hk, Dk], before the convolution; any strides but the last
  TensorView k;            // as q
  TensorView v;            // [N, Hk, R, Dv], any strides but the last
  TensorView z;            // as v
  TensorView a;            // [N, Hk, R], any strides but the last
  TensorView b;            // as a
  TensorView conv_weight;  // [C, W], W 2 to 8
  TensorView conv_bias;    // [C], optional
  TensorView a_log;        // [Hk * R], dtype or f32
  TensorView dt_bias;      // [Hk * R], dtype or f32
  TensorView norm_weight;  // [Dv]
  TensorView begins;       // i32 [S]
  TensorView ends;         // i32 [S]
  TensorView conv_state;   // [S, C, W], optional
  TensorView state;        // f32 [S, Hk * R, Dk, Dv], optional
  TensorView out;          // [N, Hk * R * Dv]
  NormSpec norm;
  float l2_eps = 1e-6F;
  float query_scale = 1.0F;
  float beta_scale = 1.0F;
  Activation conv_activation = Activation::kSilu;
  Activation gate_activation = Activation::kSilu;
  std::int32_t continued = 0;
};

enum class RouterScore : std::int32_t {
  kSoftmax = 0,        // over all experts
  kSoftmaxChosen = 1,  // over the chosen experts; the choice is made on the logits
  kSigmoid = 2
};

// The experts of each row and their weights.
//   s = softmax(l), sigmoid(l), or l itself with kSoftmaxChosen; c = (choose_by_logit ? l : s) +
//   bias With groups > 1 (DeepSeek-V3): the E experts are `groups` equal runs; a group's value is
//   the sum of its two largest c (its largest with group_by_max), and experts outside of the
//   group_top_k best groups are masked: they count as -infinity, or as 0 with mask_with_zero. The k
//   largest c are chosen with torch.topk's answer for ties and NaN (the same partial sort). w_j = s
//   of the chosen (kSoftmaxChosen: softmax over the chosen l); with normalise: w = w / max(sum(w) +
//   sum_eps, sum_min);  w = w * scale, rounded to dtype with round_weights.
// All in fp32. With round_scores, each of s, the sum and the quotient is rounded to `dtype`.
struct RouterArgs {
  TensorView
      logits;       // f32 [rows, E], values as the model has them (rounded to dtype where it does)
  TensorView bias;  // f32 or dtype [E], optional
  TensorView experts;  // i32 [rows, k]; experts of a row in torch.topk's order
  TensorView weights;  // f32 [rows, k]
  RouterScore score = RouterScore::kSoftmax;
  DType dtype = DType::kF32;  // the model's
  std::int32_t choose_by_logit = 0;
  std::int32_t groups = 1;
  std::int32_t group_top_k = 1;
  std::int32_t group_by_max = 0;
  std::int32_t mask_with_zero = 0;
  std::int32_t sorted = 1;  // as torch.topk's argument
  std::int32_t normalise = 0;
  float sum_eps = 0.0F;
  float sum_min = 0.0F;
  float scale = 1.0F;
  std::int32_t round_weights = 0;
  std::int32_t round_scores = 0;
};

// First half of the chosen experts' gated MLPs, e = experts[r, j]:
//   out[r, j] = round(round(act(g)) * u), g = round(x_r Wg_e^T + bg_e), u = round(x_r Wu_e^T +
//   bu_e); with fp32_activation, out[r, j] = round(act(g) * u).
// Experts' weights are named by address, so that one fused parameter [E, 2F, K] and a list of
// separate matrices are read where they lie: `gate[e]` is the address of a matrix [F, K] of dtype
// whose rows are `weight_stride` elements apart (with `transposed`, [K, F] with rows
// `weight_stride` apart). Only chosen experts are read, each once for all rows that chose it. An
// index outside [0, E) is the caller's error.
struct ExpertGatedProjectionArgs {
  TensorView x;          // [rows, K]
  TensorView experts;    // i32 [rows, k], different within a row
  TensorView gate;       // i64 [E], addresses
  TensorView up;         // i64 [E], addresses
  TensorView gate_bias;  // i64 [E], addresses of [F], optional
  TensorView up_bias;    // as gate_bias
  TensorView out;        // [rows, k, F], dense
  std::int64_t weight_stride = 0;
  std::int32_t transposed = 0;
  Activation activation = Activation::kSilu;
  std::int32_t fp32_activation = 0;
};

// Second half and the weighted sum:
//   y_j = round(x[r, j] W_e^T + b_e), p_j = y_j * weights[r, j], rounded with round_products
//   s = round(p_0 + p_1 + ...) in fp32, slot by slot; with round_sums the sum goes by ascending e
//   and is rounded after each addition out = round(round(round(s * routed_scale) + t) * out_scale),
//   t = shared, or with shared_gate t = round(round(sigmoid(shared_gate)) * shared); factors of 1
//   and an absent t are left out.
struct ExpertProjectionArgs {
  TensorView x;            // [rows, k, F], dense
  TensorView experts;      // i32 [rows, k]
  TensorView weights;      // f32 [rows, k]
  TensorView weight;       // i64 [E], addresses of [H, F] (transposed: [F, H])
  TensorView bias;         // i64 [E], addresses of [H], optional
  TensorView shared;       // [rows, H], optional
  TensorView shared_gate;  // [rows, 1], optional
  TensorView out;          // [rows, H]
  std::int64_t weight_stride = 0;
  std::int32_t transposed = 0;
  std::int32_t round_products = 0;
  std::int32_t round_sums = 0;
  float routed_scale = 1.0F;
  float out_scale = 1.0F;
};

SEGKI_EXPORT void embedding(const Backend& backend, const EmbeddingArgs& args,
                            const RunOptions& options = {});
SEGKI_EXPORT void norm(const Backend& backend, const NormArgs& args,
                       const RunOptions& options = {});
SEGKI_EXPORT void sum_norm(const Backend& backend, const SumNormArgs& args,
                           const RunOptions& options = {});
SEGKI_EXPORT void projection(const Backend& backend, const ProjectionArgs& args,
                             const RunOptions& options = {});
SEGKI_EXPORT void gated_projection(const Backend& backend, const GatedProjectionArgs& args,
                                   const RunOptions& options = {});
SEGKI_EXPORT void rope_kv_write(const Backend& backend, const RopeKvWriteArgs& args,
                                const RunOptions& options = {});
SEGKI_EXPORT void attention(const Backend& backend, const AttentionArgs& args,
                            const RunOptions& options = {});
SEGKI_EXPORT void lm_head(const Backend& backend, const LmHeadArgs& args,
                          const RunOptions& options = {});
SEGKI_EXPORT void argmax(const Backend& backend, const ArgmaxArgs& args,
                         const RunOptions& options = {});
SEGKI_EXPORT void select_token(const Backend& backend, const SelectTokenArgs& args,
                               const RunOptions& options = {});
SEGKI_EXPORT void gated_delta(const Backend& backend, const GatedDeltaArgs& args,
                              const RunOptions& options = {});
SEGKI_EXPORT void gated_delta_prefill(const Backend& backend, const GatedDeltaPrefillArgs& args,
                                      const RunOptions& options = {});
SEGKI_EXPORT void route_experts(const Backend& backend, const RouterArgs& args,
                                const RunOptions& options = {});
SEGKI_EXPORT void expert_gated_projection(const Backend& backend,
                                          const ExpertGatedProjectionArgs& args,
                                          const RunOptions& options = {});
SEGKI_EXPORT void expert_projection(const Backend& backend, const ExpertProjectionArgs& args,
                                    const RunOptions& options = {});

// The check alone, as each function above does it; a step program checks when it is built and not
// when it runs.
SEGKI_EXPORT void check(const EmbeddingArgs& args);
SEGKI_EXPORT void check(const NormArgs& args);
SEGKI_EXPORT void check(const SumNormArgs& args);
SEGKI_EXPORT void check(const ProjectionArgs& args);
SEGKI_EXPORT void check(const GatedProjectionArgs& args);
SEGKI_EXPORT void check(const RopeKvWriteArgs& args);
SEGKI_EXPORT void check(const AttentionArgs& args);
SEGKI_EXPORT void check(const LmHeadArgs& args);
SEGKI_EXPORT void check(const ArgmaxArgs& args);
SEGKI_EXPORT void check(const SelectTokenArgs& args);
SEGKI_EXPORT void check(const GatedDeltaArgs& args);
SEGKI_EXPORT void check(const GatedDeltaPrefillArgs& args);
SEGKI_EXPORT void check(const RouterArgs& args);
SEGKI_EXPORT void check(const ExpertGatedProjectionArgs& args);
SEGKI_EXPORT void check(const ExpertProjectionArgs& args);

// Which slot of a backend's table an argument struct belongs to.
template <typename Args>
struct OpTraits;

#define SEGKI_OP_TRAITS(Args, Id, slot_name)                                       \
  template <>                                                                      \
  struct OpTraits<Args> {                                                          \
    static constexpr OpId kId = OpId::Id;                                          \
    static constexpr const char* kName = #slot_name;                               \
    static constexpr Kernel<Args> BackendTable::*kSlot = &BackendTable::slot_name; \
  }
SEGKI_OP_TRAITS(EmbeddingArgs, kEmbedding, embedding);
SEGKI_OP_TRAITS(NormArgs, kNorm, norm);
SEGKI_OP_TRAITS(SumNormArgs, kSumNorm, sum_norm);
SEGKI_OP_TRAITS(ProjectionArgs, kProjection, projection);
SEGKI_OP_TRAITS(GatedProjectionArgs, kGatedProjection, gated_projection);
SEGKI_OP_TRAITS(RopeKvWriteArgs, kRopeKvWrite, rope_kv_write);
SEGKI_OP_TRAITS(AttentionArgs, kAttention, attention);
SEGKI_OP_TRAITS(LmHeadArgs, kLmHead, lm_head);
SEGKI_OP_TRAITS(ArgmaxArgs, kArgmax, argmax);
SEGKI_OP_TRAITS(SelectTokenArgs, kSelectToken, select_token);
SEGKI_OP_TRAITS(GatedDeltaArgs, kGatedDelta, gated_delta);
SEGKI_OP_TRAITS(GatedDeltaPrefillArgs, kGatedDeltaPrefill, gated_delta_prefill);
SEGKI_OP_TRAITS(RouterArgs, kRouter, route_experts);
SEGKI_OP_TRAITS(ExpertGatedProjectionArgs, kExpertGatedProjection, expert_gated_projection);
SEGKI_OP_TRAITS(ExpertProjectionArgs, kExpertProjection, expert_projection);
#undef SEGKI_OP_TRAITS

}  // namespace segki
