// The choice of experts on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/route_experts.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/norm-inl.h"

#ifndef SEGKI_CPU_ROUTE_EXPERTS_SHARED_
#define SEGKI_CPU_ROUTE_EXPERTS_SHARED_
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace segki::cpu {

struct Scored {
  float value;
  std::int32_t index;
};

// torch.topk's order: NaN is the largest, and values alone decide.
inline bool larger(float a, float b) { return (std::isnan(a) && !std::isnan(b)) || a > b; }
inline bool comes_first(const Scored& a, const Scored& b) { return larger(a.value, b.value); }

// The k largest of n to the front, with torch.topk's answer for ties: it sorts (value, index) pairs
// with these algorithms of the C++ library and this choice between them.
inline void top_k(Scored* items, std::int64_t n, std::int64_t k, bool sorted) {
  if (k * 64 <= n) {
    std::partial_sort(items, items + k, items + n, comes_first);
    return;
  }
  std::nth_element(items, items + k - 1, items + n, comes_first);
  if (sorted) std::sort(items, items + k - 1, comes_first);
}

// Scratch of one part: scores of all experts, pairs to sort, a mark for each group.
inline std::size_t route_experts_scratch(const RouterArgs& args) {
  const auto experts = static_cast<std::size_t>(args.logits.shape[1]);
  const auto groups = static_cast<std::size_t>(args.groups);
  return experts * (sizeof(float) + sizeof(Scored)) + groups * (sizeof(Scored) + sizeof(float));
}

}  // namespace segki::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

struct Row {
  const RouterArgs& args;
  std::int64_t experts;
  float* scores;   // [experts]
  Scored* items;   // [experts]
  Scored* groups;  // [groups]
  float* best;     // [groups], 1 where a group may be chosen from

  float score_rounded(float value) const {
    return args.round_scores != 0 ? round_one(value, args.dtype) : value;
  }

  // softmax of n values in place.
  void softmax(float* values, std::int64_t n) const {
    float largest = -std::numeric_limits<float>::infinity();
    for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, values[i]);
    float sum = 0.0F;
    for (std::int64_t i = 0; i < n; ++i) {
      values[i] = std::exp(values[i] - largest);
      sum += values[i];
    }
    for (std::int64_t i = 0; i < n; ++i) values[i] = score_rounded(values[i] / sum);
  }

  float value_of_group(std::int64_t group, std::int64_t size) const {
    const Scored* of = items + group * size;
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (std::int64_t i = 0; i < size; ++i) {
      if (larger(of[i].value, first)) {
        second = std::exchange(first, of[i].value);
      } else if (larger(of[i].value, second)) {
        second = of[i].value;
      }
    }
    return args.group_by_max != 0 || size < 2 ? first : first + second;
  }

  void mask_groups() const {
    const std::int64_t size = experts / args.groups;
    for (std::int32_t g = 0; g < args.groups; ++g) {
      groups[g] = {value_of_group(g, size), g};
      best[g] = 0.0F;
    }
    top_k(groups, args.groups, args.group_top_k, false);
    for (std::int32_t g = 0; g < args.group_top_k; ++g) best[groups[g].index] = 1.0F;
    const float masked = args.mask_with_zero != 0 ? 0.0F : -std::numeric_limits<float>::infinity();
    for (std::int64_t e = 0; e < experts; ++e) {
      if (best[e / size] == 0.0F) items[e].value = masked;
    }
  }

  void route(std::int64_t r) const {
    const float* logits = args.logits.as<const float>() + r * args.logits.stride[0];
    const std::int64_t k = args.experts.shape[1];
    std::copy_n(logits, experts, scores);
    if (args.score == RouterScore::kSoftmax) {
      softmax(scores, experts);
    } else if (args.score == RouterScore::kSigmoid) {
      for (std::int64_t e = 0; e < experts; ++e) {
        scores[e] = score_rounded(1.0F / (1.0F + std::exp(-scores[e])));
      }
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      const float value = args.choose_by_logit != 0 ? logits[e] : scores[e];
      items[e] = {args.bias.present() ? value + number_at(args.bias, e) : value,
                  static_cast<std::int32_t>(e)};
    }
    if (args.groups > 1) mask_groups();
    top_k(items, experts, k, args.sorted != 0);

    std::int32_t* chosen = args.experts.as<std::int32_t>() + r * args.experts.stride[0];
    float* weights = args.weights.as<float>() + r * args.weights.stride[0];
    for (std::int64_t j = 0; j < k; ++j) {
      chosen[j] = items[j].index;
      weights[j] = scores[items[j].index];
    }
    if (args.score == RouterScore::kSoftmaxChosen) softmax(weights, k);
    if (args.normalise != 0) {
      float sum = 0.0F;
      for (std::int64_t j = 0; j < k; ++j) sum += weights[j];
      const float divisor = std::max(score_rounded(sum) + args.sum_eps, args.sum_min);
      for (std::int64_t j = 0; j < k; ++j) weights[j] = score_rounded(weights[j] / divisor);
    }
    for (std::int64_t j = 0; j < k; ++j) {
      if (args.scale != 1.0F) weights[j] *= args.scale;
      if (args.round_weights != 0) weights[j] = round_one(weights[j], args.dtype);
    }
  }
};

}  // namespace

std::int32_t route_experts(const RouterArgs* args, const Exec* exec) {
  const std::int64_t experts = args->logits.shape[1];
  float* scores = static_cast<float*>(exec->scratch);
  auto* items = reinterpret_cast<Scored*>(scores + experts);
  Scored* groups = items + experts;
  const Row row = {*args, experts, scores,
                   items, groups,  reinterpret_cast<float*>(groups + args->groups)};
  const Range rows = part_range(args->logits.shape[0], 1, exec->part, exec->parts);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) row.route(r);
  return 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<RouterArgs> route_experts_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, route_experts);
}

std::size_t route_experts_scratch_bytes(const RouterArgs& args) {
  return route_experts_scratch(args);
}

}  // namespace segki::cpu
#endif
