// One step of a GatedDeltaNet block on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gated_delta.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/gated_delta-inl.h"

#ifndef SEGKI_CPU_GATED_DELTA_SHARED_
#define SEGKI_CPU_GATED_DELTA_SHARED_
namespace segki::cpu {

// Scratch of one part, in floats: q and k of a key head, v of its value heads, o of one.
inline std::int64_t gated_delta_scratch_floats(const GatedDeltaArgs& args) {
  const std::int64_t group = args.v.shape[2], value_dim = args.v.shape[3];
  return 2 * args.q.shape[2] + (group + 1) * value_dim;
}

}  // namespace segki::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

// Vectors of a state's row whose running sums stay in registers.
#if HWY_TARGET == HWY_AVX3
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif

// Columns [0, N * kLanes) of a state [Dk, `stride`], the last vector holding `last` of them:
// S = S * decay + k (beta (v - decay S^T k))^T, o = S^T q. The state comes from memory in the first
// pass and from cache in the second.
template <int N>
HWY_INLINE void advance_columns(float* HWY_RESTRICT state, std::int64_t stride, std::int64_t rows,
                                std::int64_t last, const Gates& gates, const float* q,
                                const float* k, const float* v, float* HWY_RESTRICT o) {
  const VF decay = set(gates.decay);
  const auto left = [last](int i) { return i + 1 < N ? kLanes : last; };
  VF sums[N];
  for (int i = 0; i < N; ++i) sums[i] = zero();
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row = state + r * stride;
    const VF key = set(k[r]);
    for (int i = 0; i < N; ++i) {
      sums[i] = hn::MulAdd(hn::Mul(load_row(row + i * kLanes, left(i)), decay), key, sums[i]);
    }
  }
  VF delta[N];
  const VF beta = set(gates.beta);
  for (int i = 0; i < N; ++i) {
    delta[i] = hn::Mul(hn::Sub(load_row(v + i * kLanes, left(i)), sums[i]), beta);
    sums[i] = zero();
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = state + r * stride;
    const VF key = set(k[r]);
    const VF query = set(q[r]);
    for (int i = 0; i < N; ++i) {
      const VF kept = hn::Mul(load_row(row + i * kLanes, left(i)), decay);
      const VF now = hn::MulAdd(key, delta[i], kept);
      store_row(now, row + i * kLanes, left(i));
      sums[i] = hn::MulAdd(now, query, sums[i]);
    }
  }
  for (int i = 0; i < N; ++i) store_row(sums[i], o + i * kLanes, left(i));
}

HWY_INLINE void advance(float* state, std::int64_t key_dim, std::int64_t value_dim,
                        const Gates& gates, const float* q, const float* k, const float* v,
                        float* o) {
  std::int64_t c = 0;
  for (; c + kWide * kLanes <= value_dim; c += kWide * kLanes) {
    advance_columns<kWide>(state + c, value_dim, key_dim, kLanes, gates, q, k, v + c, o + c);
  }
  for (; c < value_dim; c += kLanes) {
    advance_columns<1>(state + c, value_dim, key_dim, std::min(kLanes, value_dim - c), gates, q, k,
                       v + c, o + c);
  }
}

// Key head h of row r: its convolutions and its value heads.
template <typename T>
void step_head(const GatedDeltaArgs& args, std::int64_t r, std::int64_t h, float* scratch) {
  const std::int64_t key_heads = args.q.shape[1], key_dim = args.q.shape[2];
  const std::int64_t group = args.v.shape[2], value_dim = args.v.shape[3];
  const std::int64_t channels = args.conv_weight.shape[0], width = args.conv_weight.shape[1];
  const std::int64_t slot =
      args.slots.present() ? args.slots.as<const std::int32_t>()[r * args.slots.stride[0]] : r;
  T* out = args.out.as<T>() + r * args.out.stride[0] + h * group * value_dim;
  if (args.frozen.present() &&
      args.frozen.as<const std::int32_t>()[r * args.frozen.stride[0]] != 0) {
    std::fill_n(out, group * value_dim, T{});
    return;
  }
  T* windows = args.conv_state.as<T>() + slot * channels * width;
  const auto convolve = [&](const T* x, std::int64_t first, std::int64_t count, float* y) {
    const T* bias = args.conv_bias.present() ? args.conv_bias.as<const T>() + first : nullptr;
    convolve_token(x, args.conv_weight.as<const T>() + first * width, bias, windows + first * width,
                   count, width, args.conv_activation, y);
  };
  float* q = scratch;
  float* k = q + key_dim;
  float* v = k + key_dim;
  float* o = v + group * value_dim;
  const auto at = [r, h](const TensorView& view) {
    return r * view.stride[0] + h * view.stride[1];
  };
  convolve(args.q.as<const T>() + at(args.q), h * key_dim, key_dim, q);
  convolve(args.k.as<const T>() + at(args.k), (key_heads + h) * key_dim, key_dim, k);
  l2_normalise(q, key_dim, args.l2_eps, args.query_scale);
  l2_normalise(k, key_dim, args.l2_eps, 1.0F);
  for (std::int64_t g = 0; g < group; ++g) {
    const std::int64_t head = h * group + g;
    convolve(args.v.as<const T>() + at(args.v) + g * args.v.stride[2],
             2 * key_heads * key_dim + head * value_dim, value_dim, v + g * value_dim);
    const Gates gates =
        gates_of(args, load_one(args.a.as<const T>() + at(args.a) + g * args.a.stride[2]),
                 load_one(args.b.as<const T>() + at(args.b) + g * args.b.stride[2]), head);
    float* state = args.state.as<float>() + (slot * key_heads * group + head) * key_dim * value_dim;
    advance(state, key_dim, value_dim, gates, q, k, v + g * value_dim, o);
    gated_norm(args.norm, args.norm_weight.as<const T>(), args.gate_activation, o,
               args.z.as<const T>() + at(args.z) + g * args.z.stride[2], out + g * value_dim,
               value_dim);
  }
}

template <typename T>
void run(const GatedDeltaArgs& args, const Exec& exec) {
  const std::int64_t heads = args.q.shape[1];
  const Range units = part_range(args.q.shape[0] * heads, 1, exec.part, exec.parts);
  for (std::int64_t u = units.begin; u < units.end; ++u) {
    step_head<T>(args, u / heads, u % heads, static_cast<float*>(exec.scratch));
  }
}

}  // namespace

std::int32_t gated_delta(const GatedDeltaArgs* args, const Exec* exec) {
  return with_type(args->q.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<GatedDeltaArgs> gated_delta_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, gated_delta);
}

std::size_t gated_delta_scratch_bytes(const GatedDeltaArgs& args) {
  return static_cast<std::size_t>(gated_delta_scratch_floats(args)) * sizeof(float);
}

}  // namespace segki::cpu
#endif  // HWY_ONCE
