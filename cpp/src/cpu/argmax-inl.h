// Argmax of a row of logits, and the log of the sum of its exponentials. Included once for each
// instruction set.
#if defined(SEGKI_CPU_ARGMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_ARGMAX_INL_H_
#undef SEGKI_CPU_ARGMAX_INL_H_
#else
#define SEGKI_CPU_ARGMAX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/numeric-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

// The largest logit seen so far and the lowest index that has it; `nan` is the lowest index of a
// NaN, which is no candidate for `value`. An index is -1 while there is none.
struct RowMax {
  float value = -std::numeric_limits<float>::infinity();
  std::int64_t index = -1;
  std::int64_t nan = -1;
};

// Takes logits [begin, end) into `best`; calls come in rising order.
inline void update_max(const float* HWY_RESTRICT logits, std::int64_t begin, std::int64_t end,
                       RowMax& best) {
  const DF d;
  constexpr std::int64_t kBlock = 1024;
  for (std::int64_t block = begin; block < end; block += kBlock) {
    const std::int64_t block_end = std::min(end, block + kBlock);
    const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
    auto max0 = lowest, max1 = lowest, max2 = lowest, max3 = lowest;
    auto nan0 = hn::IsNaN(lowest), nan1 = nan0;
    std::int64_t i = block;
    for (; i + 4 * kLanes <= block_end; i += 4 * kLanes) {
      const auto v0 = hn::LoadU(d, logits + i);
      const auto v1 = hn::LoadU(d, logits + i + kLanes);
      const auto v2 = hn::LoadU(d, logits + i + 2 * kLanes);
      const auto v3 = hn::LoadU(d, logits + i + 3 * kLanes);
      max0 = hn::Max(max0, v0);
      max1 = hn::Max(max1, v1);
      max2 = hn::Max(max2, v2);
      max3 = hn::Max(max3, v3);
      nan0 = hn::Or(nan0, hn::Or(hn::IsNaN(v0), hn::IsNaN(v1)));
      nan1 = hn::Or(nan1, hn::Or(hn::IsNaN(v2), hn::IsNaN(v3)));
    }
    bool nan = !hn::AllFalse(d, hn::Or(nan0, nan1));
    float max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(max0, max1), hn::Max(max2, max3))));
    for (std::int64_t j = i; j < block_end; ++j) {
      nan = nan || std::isnan(logits[j]);
      max = std::max(max, logits[j]);
    }
    if (nan) {
      // A NaN beside it can hide a lane's maximum.
      max = -std::numeric_limits<float>::infinity();
      for (std::int64_t j = block; j < block_end; ++j) {
        if (std::isnan(logits[j])) {
          if (best.nan < 0) best.nan = j;
        } else {
          max = std::max(max, logits[j]);
        }
      }
    }
    if (best.index >= 0 && !(max > best.value)) continue;
    for (std::int64_t j = block; j < block_end; ++j) {
      if (logits[j] == max) {
        best.value = max;
        best.index = j;
        break;
      }
    }
  }
}

// log(sum(exp(logits - max))), summed in an order that depends on `count` alone.
inline float log_sum_exp(const float* HWY_RESTRICT logits, std::int64_t count, float max) {
  const DF d;
  constexpr std::int64_t kBlock = 128 * kLanes;  // few enough terms to add in fp32
  const auto shift = hn::Set(d, max);
  double total = 0.0;
  for (std::int64_t block = 0; block < count; block += kBlock) {
    const std::int64_t block_end = std::min(count, block + kBlock);
    auto sum0 = hn::Zero(d), sum1 = sum0;
    std::int64_t i = block;
    for (; i + 2 * kLanes <= block_end; i += 2 * kLanes) {
      sum0 = hn::Add(sum0, exp(hn::Sub(hn::LoadU(d, logits + i), shift)));
      sum1 = hn::Add(sum1, exp(hn::Sub(hn::LoadU(d, logits + i + kLanes), shift)));
    }
    if (i < block_end) {
      HWY_ALIGN float rest[2 * kLanes];
      std::fill(rest, rest + 2 * kLanes, -std::numeric_limits<float>::infinity());
      std::copy(logits + i, logits + block_end, rest);
      sum0 = hn::Add(sum0, exp(hn::Sub(hn::Load(d, rest), shift)));
      sum1 = hn::Add(sum1, exp(hn::Sub(hn::Load(d, rest + kLanes), shift)));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))));
  }
  return static_cast<float>(std::log(total));
}

// Log-probability of `token`; `all` is update_max over the whole row. NaN where a logit is NaN, or
// where the largest is infinite.
inline float log_prob_of(const float* logits, std::int64_t count, std::int64_t token,
                         const RowMax& all) {
  if (all.nan >= 0 || std::isinf(all.value)) return std::numeric_limits<float>::quiet_NaN();
  return (logits[token] - all.value) - log_sum_exp(logits, count, all.value);
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // SEGKI_CPU_ARGMAX_INL_H_
