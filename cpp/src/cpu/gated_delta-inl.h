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

// Drops the oldest of `width` inputs and appends x, for `count` channels.
template <std::int64_t kWidth, typename T>
HWY_INLINE void shift_windows(T* window, const T* x, std::int64_t count, std::int64_t width) {
  if constexpr (kWidth != 0) width = kWidth;
  for (std::int64_t c = 0; c < count; ++c) {
    T kept[kMaxConvWidth];
    std::memcpy(kept, window + c * width + 1, static_cast<std::size_t>(width - 1) * sizeof(T));
    kept[width - 1] = x[c];
    std::memcpy(window + c * width, kept, static_cast<std::size_t>(width) * sizeof(T));
  }
}

// sum_j taps[., j] * w[., j] of kLanes channels, w as in convolve_token.
template <std::int64_t kWidth>
HWY_INLINE VF window_sums(const float* HWY_RESTRICT old, const float* HWY_RESTRICT taps, VF newest,
                          std::int64_t width) {
  VF sum = zero();
  if constexpr (kWidth == 4) {
    VF w[4], t[4];
    hn::LoadInterleaved4(DF(), old, w[0], w[1], w[2], w[3]);
    hn::LoadInterleaved4(DF(), taps, t[0], t[1], t[2], t[3]);
    for (int j = 0; j < 3; ++j) sum = hn::MulAdd(w[j + 1], t[j], sum);
    return hn::MulAdd(newest, t[3], sum);
  } else {
    HWY_ALIGN float input[kLanes], factor[kLanes];
    for (std::int64_t j = 0; j < width; ++j) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) factor[lane] = taps[lane * width + j];
      VF value = newest;
      if (j + 1 < width) {
        for (std::int64_t lane = 0; lane < kLanes; ++lane) input[lane] = old[lane * width + j + 1];
        value = hn::Load(DF(), input);
      }
      sum = hn::MulAdd(value, hn::Load(DF(), factor), sum);
    }
    return sum;
  }
}

template <std::int64_t kWidth, typename T>
HWY_INLINE void convolve_token(const T* x, const T* weight, const T* bias, T* window,
                               std::int64_t count, std::int64_t width, Activation activation,
                               float* out) {
  HWY_ALIGN float old[kMaxConvWidth * kLanes] = {};
  HWY_ALIGN float taps[kMaxConvWidth * kLanes] = {};
  for (std::int64_t c = 0; c < count; c += kLanes) {
    const std::int64_t n = std::min(kLanes, count - c);
    for (std::int64_t i = 0; i < n * width; i += kLanes) {
      hn::Store(load_row(window + c * width + i, n * width - i), DF(), old + i);
      hn::Store(load_row(weight + c * width + i, n * width - i), DF(), taps + i);
    }
    VF sum = window_sums<kWidth>(old, taps, load_row(x + c, n), width);
    if (bias != nullptr) sum = hn::Add(sum, load_row(bias + c, n));
    store_row(activate<T>(activation, rounded<T>(sum)), out + c, n);
    shift_windows<kWidth>(window + c * width, x + c, n, width);
  }
}

// Channels [0, count) at one token: out = round(activation(round(sum_j weight[., j] * w[., j] +
// bias))), where w is `window` [count, width] without its oldest input and with x at its end; that
// becomes the window. `bias` may be null.
template <typename T>
HWY_INLINE void convolve_token(const T* x, const T* weight, const T* bias, T* window,
                               std::int64_t count, std::int64_t width, Activation activation,
                               float* out) {
  if (width == 4) {
    convolve_token<4>(x, weight, bias, window, count, width, activation, out);
  } else {
    convolve_token<0>(x, weight, bias, window, count, width, activation, out);
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
    if (norm.weight_offset != 0.0F) {
      s = hn::Add(s, set(norm.weight_offset));
      if (norm.round_before_weight != 0) s = rounded<T>(s);
    }
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
