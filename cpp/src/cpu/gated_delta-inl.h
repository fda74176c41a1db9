// What the one-token step and the prefill of a GatedDeltaNet block share: convolution of a token,
// gates, L2 norm and gated norm. Compiled once for each instruction set.
#if defined(SEGKI_CPU_GATED_DELTA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_GATED_DELTA_INL_H_
#undef SEGKI_CPU_GATED_DELTA_INL_H_
#else
#define SEGKI_CPU_GATED_DELTA_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

constexpr std::int64_t kMaxConvWidth = 8;

// log(1 + exp(x)) as torch computes it, x itself above 20.
inline float softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

// What a value head does to its state at one token: S = S * decay + k (beta (v - decay S^T k))^T.
struct Gates {
  float decay;
  float log_decay;
  float beta;
};

template <typename Args>
HWY_INLINE Gates gates_of(const Args& args, float a, float b, std::int64_t head) {
  const DType dtype = args.q.dtype;
  Gates gates;
  gates.log_decay =
      -std::exp(number_at(args.a_log, head)) * softplus(a + number_at(args.dt_bias, head));
  gates.decay = std::exp(gates.log_decay);
  gates.beta = round_one(1.0F / (1.0F + std::exp(-b)), dtype);
  if (args.beta_scale != 1.0F) gates.beta = round_one(gates.beta * args.beta_scale, dtype);
  return gates;
}

// Channels [0, count) at one token: out = round(activation(round(sum_j weight[., j] * w[., j] +
// bias))), where w is `window` [count, width] without its oldest input and with x at its end. With
// `keep`, that becomes the window. `bias` may be null.
template <typename T>
HWY_INLINE void convolve_token(const T* x, const T* weight, const T* bias, T* window, bool keep,
                               std::int64_t count, std::int64_t width, Activation activation,
                               float* out) {
  HWY_ALIGN float old[kMaxConvWidth * kLanes + kLanes];
  HWY_ALIGN float taps[kMaxConvWidth * kLanes + kLanes];
  HWY_ALIGN float input[kLanes], factor[kLanes];
  for (std::int64_t c = 0; c < count; c += kLanes) {
    const std::int64_t n = std::min(kLanes, count - c);
    for (std::int64_t i = 0; i < n * width; i += kLanes) {
      const std::int64_t left = n * width - i;
      hn::StoreU(load_row(window + c * width + i, left), DF(), old + i);
      hn::StoreU(load_row(weight + c * width + i, left), DF(), taps + i);
    }
    const VF newest = load_row(x + c, n);
    VF sum = zero();
    for (std::int64_t j = 0; j < width; ++j) {
      for (std::int64_t lane = 0; lane < n; ++lane) factor[lane] = taps[lane * width + j];
      for (std::int64_t lane = n; lane < kLanes; ++lane) factor[lane] = 0.0F;
      VF value = newest;
      if (j + 1 < width) {
        for (std::int64_t lane = 0; lane < n; ++lane) input[lane] = old[lane * width + j + 1];
        for (std::int64_t lane = n; lane < kLanes; ++lane) input[lane] = 0.0F;
        value = hn::Load(DF(), input);
      }
      sum = hn::MulAdd(value, hn::Load(DF(), factor), sum);
    }
    if (bias != nullptr) sum = hn::Add(sum, load_row(bias + c, n));
    store_row(activate<T>(activation, rounded<T>(sum)), out + c, n);
    if (keep) {
      for (std::int64_t lane = 0; lane < n; ++lane) {
        T* channel = window + (c + lane) * width;
        std::memmove(channel, channel + 1, static_cast<std::size_t>(width - 1) * sizeof(T));
        channel[width - 1] = x[c + lane];
      }
    }
  }
}

// x = x * rsqrt(sum(x^2) + eps) * scale.
HWY_INLINE void l2_normalise(float* x, std::int64_t count, float eps, float scale) {
  RowSum squares;
  squares.add(x, count, [](VF v) { return hn::Mul(v, v); });
  const VF inverse = set(1.0F / std::sqrt(squares.total() + eps));
  const VF factor = set(scale);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const VF v = hn::Mul(load_row(x + i, count - i), inverse);
    store_row(hn::Mul(v, factor), x + i, count - i);
  }
}

// out = round(norm(round(o)) * gate(z)) of one value head; o is changed.
template <typename T>
HWY_INLINE void gated_norm(const NormSpec& norm, const T* weight, Activation activation, float* o,
                           const T* z, T* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    store_row(rounded<T>(load_row(o + i, count - i)), o + i, count - i);
  }
  const RowStatistics statistics =
      row_statistics(norm, count, [o, count](const auto& visit) { visit(o, count); });
  const VF scale = set(statistics.scale);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t left = count - i;
    VF s = load_row(weight + i, left);
    if (norm.weight_offset != 0.0F) s = hn::Add(s, set(norm.weight_offset));
    VF y = hn::Mul(load_row(o + i, left), scale);
    if (norm.round_before_weight != 0) {
      y = rounded<T>(hn::Mul(rounded<T>(y), s));
    } else {
      y = hn::Mul(y, s);
    }
    const VF gate = activate<float>(activation, load_row(z + i, left));
    store_row(hn::Mul(y, gate), out + i, left);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
