// Normalisation of one row, and the loops over rows of dense elements that go with it. Included
// once for each instruction set.
#if defined(SEGKI_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_NORM_INL_H_
#undef SEGKI_CPU_NORM_INL_H_
#else
#define SEGKI_CPU_NORM_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/numeric-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

// As load and store, for the last, partial vector of a row too: `left` elements remain.
template <typename T>
HWY_INLINE VF load_row(const T* p, std::int64_t left) {
  return HWY_LIKELY(left >= kLanes) ? load(p) : load_n(p, left);
}
template <typename T>
HWY_INLINE void store_row(VF v, T* p, std::int64_t left) {
  if (HWY_LIKELY(left >= kLanes)) {
    store(v, p);
  } else {
    store_n(v, p, left);
  }
}

// Calls `run` with a null pointer of the element type that `dtype` names; an ErrorCode as integer.
template <typename Run>
std::int32_t with_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kF32:
      run(static_cast<float*>(nullptr));
      return 0;
    case DType::kBF16:
      run(static_cast<Bf16*>(nullptr));
      return 0;
    case DType::kF16:
      run(static_cast<F16*>(nullptr));
      return 0;
    default:
      return static_cast<std::int32_t>(ErrorCode::kInvalidArgument);
  }
}

// A sum over one or several runs of elements, in an order that depends on their sizes alone.
class RowSum {
 public:
  // Not implicit: those are compiled without the instruction set.
  HWY_INLINE RowSum() : lanes_{zero(), zero(), zero(), zero()} {}

  template <typename T, typename Term>
  HWY_INLINE void add(const T* x, std::int64_t count, const Term& term) {
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) {
        lanes_[j] = hn::Add(lanes_[j], term(load(x + i + j * kLanes)));
      }
    }
    for (; i + kLanes <= count; i += kLanes) {
      lanes_[0] = hn::Add(lanes_[0], term(load(x + i)));
    }
    if (i < count) {
      const VF last = term(load_n(x + i, count - i));
      const auto live = hn::FirstN(DF(), static_cast<std::size_t>(count - i));
      lanes_[1] = hn::Add(lanes_[1], hn::IfThenElseZero(live, last));
    }
  }

  HWY_INLINE float total() const {
    const VF sum = hn::Add(hn::Add(lanes_[0], lanes_[1]), hn::Add(lanes_[2], lanes_[3]));
    return hn::GetLane(hn::SumOfLanes(DF(), sum));
  }

 private:
  VF lanes_[4];
};

// What the elements of a row share: n = (x - mean) * scale.
struct RowStatistics {
  float mean = 0.0F;
  float scale = 1.0F;
};

// `each(visit)` calls visit(pointer, count) for each run of elements that is normalised together;
// `size` is their number.
template <typename Each>
HWY_INLINE RowStatistics row_statistics(const NormSpec& spec, std::int64_t size, const Each& each) {
  RowStatistics statistics;
  const float count = static_cast<float>(size);
  if (spec.kind == NormKind::kLayer) {
    RowSum sum;
    each([&sum](const auto* x, std::int64_t n) { sum.add(x, n, [](VF v) { return v; }); });
    statistics.mean = sum.total() / count;
  }
  const VF mean = set(statistics.mean);
  RowSum squares;
  each([&squares, mean](const auto* x, std::int64_t n) {
    squares.add(x, n, [mean](VF v) {
      const VF centred = hn::Sub(v, mean);
      return hn::Mul(centred, centred);
    });
  });
  statistics.scale = 1.0F / std::sqrt(squares.total() / count + spec.eps);
  return statistics;
}

template <bool kRoundBefore, typename T>
HWY_INLINE void apply_norm(const NormSpec& spec, const RowStatistics& statistics, const T* x,
                           const T* weight, const T* bias, T* out, std::int64_t count) {
  const VF mean = set(statistics.mean);
  const VF scale = set(statistics.scale);
  const VF offset = set(spec.weight_offset);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t left = count - i;
    VF y = hn::Mul(hn::Sub(load_row(x + i, left), mean), scale);
    if constexpr (kRoundBefore) y = rounded<T>(y);
    if (weight != nullptr) {
      VF s = load_row(weight + i, left);
      if (spec.weight_offset != 0.0F) {
        s = hn::Add(s, offset);
        if constexpr (kRoundBefore) s = rounded<T>(s);
      }
      y = hn::Mul(y, s);
    }
    if (bias != nullptr) {
      if constexpr (kRoundBefore) y = rounded<T>(y);
      y = hn::Add(y, load_row(bias + i, left));
    }
    store_row(y, out + i, left);
  }
}

// Weight and bias may be null; out may be x.
template <typename T>
void apply_norm(const NormSpec& spec, const RowStatistics& statistics, const T* x, const T* weight,
                const T* bias, T* out, std::int64_t count) {
  if (spec.round_before_weight != 0) {
    apply_norm<true>(spec, statistics, x, weight, bias, out, count);
  } else {
    apply_norm<false>(spec, statistics, x, weight, bias, out, count);
  }
}

template <typename T>
void norm_row(const NormSpec& spec, const T* x, const T* weight, const T* bias, T* out,
              std::int64_t count) {
  if (spec.kind == NormKind::kNone) {
    std::copy(x, x + count, out);
    return;
  }
  const RowStatistics statistics =
      row_statistics(spec, count, [x, count](const auto& visit) { visit(x, count); });
  apply_norm(spec, statistics, x, weight, bias, out, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // SEGKI_CPU_NORM_INL_H_
