// Vectors of fp32: loads that widen, stores that round to nearest even, rounding in registers, and
// the elementary functions. Compiled once for each instruction set.

#include <cstdint>
#include <cstring>

#include "cpu/targets.h"
#include "hwy/highway.h"
#include "segki/ops.h"

#ifndef SEGKI_CPU_STORAGE_TYPES_
#define SEGKI_CPU_STORAGE_TYPES_
namespace segki::cpu {

// Elements as they lie in memory; fp32 is float.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

}  // namespace segki::cpu
#endif

// Per-target include guard.
#if defined(SEGKI_CPU_NUMERIC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_NUMERIC_INL_H_
#undef SEGKI_CPU_NUMERIC_INL_H_
#else
#define SEGKI_CPU_NUMERIC_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using DU16 = hn::Rebind<std::uint16_t, DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VI = hn::Vec<DI>;

constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(DF()));

HWY_INLINE VF zero() { return hn::Zero(DF()); }
HWY_INLINE VF set(float value) { return hn::Set(DF(), value); }

// --- Conversion of half-width values held in the low halves of 32-bit lanes.

HWY_INLINE VF bf16_to_f32(VU bits) { return hn::BitCast(DF(), hn::ShiftLeft<16>(bits)); }

HWY_INLINE VU f32_to_bf16(VF v) {
  const DU du;
  const VU bits = hn::BitCast(du, v);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu))));
  const VU quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3

HWY_INLINE VF f16_bits_to_f32(hn::Vec<DU16> bits) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(DF(), hn::BitCast(d16, bits));
}
HWY_INLINE hn::Vec<DU16> f32_to_f16_bits(VF v) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::BitCast(DU16(), hn::DemoteTo(d16, v));
}

#else

HWY_INLINE VF f16_bits_to_f32(hn::Vec<DU16> bits16) {
  const DF df;
  const DU du;
  const VU bits = hn::PromoteTo(du, bits16);
  const VU magnitude = hn::And(bits, hn::Set(du, 0x7FFFu));
  const VU sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  // The product moves the exponent's bias and makes subnormal numbers normal.
  const VF scaled = hn::Mul(hn::BitCast(df, hn::ShiftLeft<13>(magnitude)), hn::Set(df, 0x1p112f));
  const VU special = hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(du, 0x7F800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(du, 0x7BFFu));
  return hn::BitCast(df,
                     hn::Or(sign, hn::IfThenElse(is_special, special, hn::BitCast(du, scaled))));
}
HWY_INLINE hn::Vec<DU16> f32_to_f16_bits(VF v) {
  const DF df;
  const DU du;
  const VU bits = hn::BitCast(du, v);
  const VU sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(du, 0x80000000u)));
  const VF magnitude = hn::Abs(v);
  const VU m = hn::BitCast(du, magnitude);
  // Subnormal result: adding 0.5 lets the addition round at 2^-24, the spacing of subnormals.
  const VU subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(magnitude, hn::Set(df, 0.5f))), hn::Set(du, 0x3F000000u));
  const VU odd = hn::And(hn::ShiftRight<13>(m), hn::Set(du, 1u));
  const VU normal = hn::ShiftRight<13>(
      hn::Sub(hn::Add(m, hn::Add(odd, hn::Set(du, 0xFFFu))), hn::Set(du, 112u << 23)));
  VU result = hn::IfThenElse(hn::Lt(m, hn::Set(du, 113u << 23)), subnormal, normal);
  // 65520 and above round to infinity.
  result = hn::IfThenElse(hn::Gt(m, hn::Set(du, 0x477FEFFFu)), hn::Set(du, 0x7C00u), result);
  result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7E00u), result);
  return hn::TruncateTo(DU16(), hn::Or(result, sign));
}

#endif

// --- Memory. Addresses need the alignment of an element only.

HWY_INLINE VF load(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE VF load(const Bf16* p) {
  return bf16_to_f32(
      hn::PromoteTo(DU(), hn::LoadU(DU16(), reinterpret_cast<const std::uint16_t*>(p))));
}
HWY_INLINE VF load(const F16* p) {
  return f16_bits_to_f32(hn::LoadU(DU16(), reinterpret_cast<const std::uint16_t*>(p)));
}

HWY_INLINE void store(VF v, float* p) { hn::StoreU(v, DF(), p); }
HWY_INLINE void store(VF v, Bf16* p) {
  hn::StoreU(hn::TruncateTo(DU16(), f32_to_bf16(v)), DU16(), reinterpret_cast<std::uint16_t*>(p));
}
HWY_INLINE void store(VF v, F16* p) {
  hn::StoreU(f32_to_f16_bits(v), DU16(), reinterpret_cast<std::uint16_t*>(p));
}

// The first n lanes, 0 <= n <= kLanes; nothing past p[n - 1] is touched and other lanes are 0.
template <typename T>
HWY_INLINE VF load_n(const T* p, std::int64_t n) {
  HWY_ASSUME(n >= 0 && n <= kLanes);
  alignas(64) T buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(T));
  return load(buffer);
}
template <typename T>
HWY_INLINE void store_n(VF v, T* p, std::int64_t n) {
  HWY_ASSUME(n >= 0 && n <= kLanes);
  alignas(64) T buffer[kLanes];
  store(v, buffer);
  std::memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(T));
}

template <typename T>
HWY_INLINE float load_one(const T* p) {
  return hn::GetLane(load_n(p, 1));
}
template <typename T>
HWY_INLINE void store_one(float value, T* p) {
  store_n(set(value), p, 1);
}

// The value that storing to T and loading again would give.
template <typename T>
VF rounded(VF v);
template <>
HWY_INLINE VF rounded<float>(VF v) {
  return v;
}
template <>
HWY_INLINE VF rounded<Bf16>(VF v) {
  return bf16_to_f32(f32_to_bf16(v));
}
template <>
HWY_INLINE VF rounded<F16>(VF v) {
  return f16_bits_to_f32(f32_to_f16_bits(v));
}

HWY_INLINE float round_one(float value, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return hn::GetLane(rounded<Bf16>(set(value)));
    case DType::kF16:
      return hn::GetLane(rounded<F16>(set(value)));
    default:
      return value;
  }
}

// Element i of a dense vector of dtype or f32.
HWY_INLINE float number_at(const TensorView& view, std::int64_t i) {
  switch (view.dtype) {
    case DType::kBF16:
      return load_one(view.as<const Bf16>() + i);
    case DType::kF16:
      return load_one(view.as<const F16>() + i);
    default:
      return view.as<const float>()[i];
  }
}

// --- Elementary functions: within about 1 ulp of fp32, NaN stays NaN.

namespace detail {

// As Min, but NaN in v stays.
HWY_INLINE VF at_most(VF v, float limit) {
  return hn::IfThenElse(hn::Gt(v, set(limit)), set(limit), v);
}
HWY_INLINE VF at_least(VF v, float limit) {
  return hn::IfThenElse(hn::Lt(v, set(limit)), set(limit), v);
}

// 2^n for n in [-126, 127].
HWY_INLINE VF pow2(VI n) {
  return hn::BitCast(DF(), hn::ShiftLeft<23>(hn::Add(n, hn::Set(DI(), 127))));
}

}  // namespace detail

HWY_INLINE VF exp(VF x) {
  // Overflows to infinity and underflows to zero inside these limits.
  x = detail::at_least(detail::at_most(x, 89.0f), -105.0f);
  const VF n = hn::Round(hn::Mul(x, set(1.44269504f)));
  // ln 2 in two parts; n times the first is exact.
  VF r = hn::NegMulAdd(n, set(0.693359375f), x);
  r = hn::NegMulAdd(n, set(-2.12194440e-4f), r);
  VF q = set(1.381446476e-3f);
  q = hn::MulAdd(q, r, set(8.368780623e-3f));
  q = hn::MulAdd(q, r, set(4.166839426e-2f));
  q = hn::MulAdd(q, r, set(1.666652011e-1f));
  q = hn::MulAdd(q, r, set(4.999999341e-1f));
  const VF p = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), set(1.0f));
  const VI whole = hn::ConvertTo(DI(), n);
  const VI half = hn::ShiftRight<1>(whole);
  return hn::Mul(hn::Mul(p, detail::pow2(half)), detail::pow2(hn::Sub(whole, half)));
}

HWY_INLINE VF sigmoid(VF x) { return hn::Div(set(1.0f), hn::Add(set(1.0f), exp(hn::Neg(x)))); }

HWY_INLINE VF tanh(VF x) {
  const VF magnitude = hn::Abs(x);
  const VF z = hn::Mul(x, x);
  VF q = set(-5.528624594e-3f);
  q = hn::MulAdd(q, z, set(2.048330652e-2f));
  q = hn::MulAdd(q, z, set(-5.369296452e-2f));
  q = hn::MulAdd(q, z, set(1.333089971e-1f));
  q = hn::MulAdd(q, z, set(-3.333326288e-1f));
  const VF small = hn::MulAdd(hn::Mul(magnitude, z), q, magnitude);
  const VF e = exp(hn::Add(magnitude, magnitude));
  const VF big = hn::Sub(set(1.0f), hn::Div(set(2.0f), hn::Add(e, set(1.0f))));
  return hn::CopySign(hn::IfThenElse(hn::Lt(magnitude, set(0.625f)), small, big), x);
}

HWY_INLINE VF erf(VF x) {
  const VF magnitude = hn::Abs(x);
  const VF z = hn::Mul(x, x);
  VF q = set(7.889119412e-5f);
  q = hn::MulAdd(q, z, set(-8.020841244e-4f));
  q = hn::MulAdd(q, z, set(5.189535335e-3f));
  q = hn::MulAdd(q, z, set(-2.685444459e-2f));
  q = hn::MulAdd(q, z, set(1.128360018e-1f));
  q = hn::MulAdd(q, z, set(-3.761262714e-1f));
  q = hn::MulAdd(q, z, set(1.283791669e-1f));
  const VF small = hn::MulAdd(q, magnitude, magnitude);
  // 1 - exp(p), p near log(erfc); past 4.1 the result is 1.
  const VF t = detail::at_most(magnitude, 4.1f);
  VF p = set(-2.168681494e-5f);
  p = hn::MulAdd(p, t, set(4.413359124e-4f));
  p = hn::MulAdd(p, t, set(-4.204559283e-3f));
  p = hn::MulAdd(p, t, set(2.520824887e-2f));
  p = hn::MulAdd(p, t, set(-1.084185633e-1f));
  p = hn::MulAdd(p, t, set(-6.332199079e-1f));
  p = hn::MulAdd(p, t, set(-1.129578416e+0f));
  p = hn::MulAdd(p, t, set(1.880381875e-4f));
  const VF big = hn::Sub(set(1.0f), exp(p));
  return hn::CopySign(hn::IfThenElse(hn::Lt(magnitude, set(1.0f)), small, big), x);
}

// --- Activations, in the order of operations of torch's fp32 kernels. `x` is already rounded to T;
// the result is rounded to T.

template <Activation kActivation, typename T>
HWY_INLINE VF activate(VF x) {
  if constexpr (kActivation == Activation::kSilu) {
    return rounded<T>(hn::Div(x, hn::Add(set(1.0f), exp(hn::Neg(x)))));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const VF cube = hn::Mul(hn::Mul(x, x), x);
    const VF inner = hn::Mul(set(0.797884561f), hn::Add(x, hn::Mul(set(0.044715f), cube)));
    return rounded<T>(hn::Mul(hn::Mul(set(0.5f), x), hn::Add(set(1.0f), tanh(inner))));
  } else if constexpr (kActivation == Activation::kGeluErf) {
    const VF e = erf(hn::Mul(x, set(0.707106781f)));
    return rounded<T>(hn::Mul(hn::Mul(x, set(0.5f)), hn::Add(set(1.0f), e)));
  } else if constexpr (kActivation == Activation::kRelu) {
    return detail::at_least(x, 0.0f);
  } else if constexpr (kActivation == Activation::kRelu2) {
    const VF positive = detail::at_least(x, 0.0f);
    return rounded<T>(hn::Mul(positive, positive));
  } else {
    return x;
  }
}

template <typename T>
HWY_INLINE VF activate(Activation activation, VF x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return activate<Activation::kSilu, T>(x);
    case Activation::kGeluTanh:
      return activate<Activation::kGeluTanh, T>(x);
    case Activation::kGeluErf:
      return activate<Activation::kGeluErf, T>(x);
    case Activation::kRelu:
      return activate<Activation::kRelu, T>(x);
    case Activation::kRelu2:
      return activate<Activation::kRelu2, T>(x);
  }
  return x;
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
