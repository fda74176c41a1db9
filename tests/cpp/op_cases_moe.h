// Cases of the three ops of a mixture of experts, and their references in double precision with the
// rounding points of ops.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "op_cases_rows.h"
#include "reference.h"

namespace segki::test {

namespace reference {

// --- route_experts

struct Routing {
  std::vector<std::int64_t> experts;
  Row weights;
  bool settled = true;  // fp32 comes to the same choice and the same roundings as double precision
};

class Router {
 public:
  Router(const RouterArgs& args, std::int64_t r) : a_(args), logits_(row_of(args.logits, r)) {}

  Routing route() {
    scores_ = logits_;
    if (a_.score == RouterScore::kSoftmax) scores_ = softmax(logits_);
    if (a_.score == RouterScore::kSigmoid) {
      for (double& s : scores_) s = score_rounded(1.0 / (1.0 + std::exp(-s)));
    }
    Row choice = a_.choose_by_logit != 0 ? logits_ : scores_;
    for (std::size_t e = 0; e < choice.size(); ++e) {
      if (a_.bias.present()) choice[e] += at(a_.bias, static_cast<std::int64_t>(e));
    }
    if (a_.groups > 1) mask(choice);
    result_.experts = largest(choice, a_.experts.shape[1], a_.sorted != 0);
    weigh();
    return std::move(result_);
  }

 private:
  double to_dtype(double value) {
    const double slack = 0x1p-19 * std::abs(value);
    if (rounded(a_.dtype, value - slack) != rounded(a_.dtype, value + slack) &&
        a_.dtype != DType::kF32) {
      result_.settled = false;
    }
    return rounded(a_.dtype, value);
  }
  double score_rounded(double value) { return a_.round_scores != 0 ? to_dtype(value) : value; }

  Row softmax(Row x) {
    const double top = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (double& v : x) sum += v = std::exp(v - top);
    for (double& v : x) v = score_rounded(v / sum);
    return x;
  }

  // As torch.topk: the same algorithms of the C++ library on (value, index) pairs.
  std::vector<std::int64_t> largest(const Row& values, std::int64_t k, bool sorted) {
    using Pair = std::pair<double, std::int64_t>;
    std::vector<Pair> pairs;
    for (const double v : values) pairs.emplace_back(v, static_cast<std::int64_t>(pairs.size()));
    std::vector<double> ascending = values;
    std::sort(ascending.begin(), ascending.end());
    for (std::size_t i = 1; i < ascending.size(); ++i) {
      const double gap = ascending[i] - ascending[i - 1];
      if (gap > 0.0 && gap < 1e-5 * std::abs(ascending[i])) result_.settled = false;
    }
    const auto before = [](const Pair& p, const Pair& q) { return p.first > q.first; };
    const auto size = static_cast<std::int64_t>(pairs.size());
    if (k * 64 <= size) {
      std::partial_sort(pairs.begin(), pairs.begin() + k, pairs.end(), before);
    } else {
      std::nth_element(pairs.begin(), pairs.begin() + k - 1, pairs.end(), before);
      if (sorted) std::sort(pairs.begin(), pairs.begin() + k - 1, before);
    }
    std::vector<std::int64_t> indices;
    for (std::int64_t j = 0; j < k; ++j)
      indices.push_back(pairs[static_cast<std::size_t>(j)].second);
    return indices;
  }

  void mask(Row& choice) {
    const std::size_t groups = static_cast<std::size_t>(a_.groups), size = choice.size() / groups;
    Row values;
    for (std::size_t g = 0; g < groups; ++g) {
      const auto begin = choice.begin() + static_cast<std::ptrdiff_t>(g * size);
      Row of_group(begin, begin + static_cast<std::ptrdiff_t>(size));
      std::sort(of_group.rbegin(), of_group.rend());
      values.push_back(of_group[0] + (a_.group_by_max != 0 || size < 2 ? 0.0 : of_group[1]));
    }
    std::vector<bool> open(groups, false);
    for (const std::int64_t g : largest(values, a_.group_top_k, false)) {
      open[static_cast<std::size_t>(g)] = true;
    }
    for (std::size_t e = 0; e < choice.size(); ++e) {
      if (open[e / size]) continue;
      choice[e] = a_.mask_with_zero != 0 ? 0.0 : -std::numeric_limits<double>::infinity();
    }
  }

  void weigh() {
    Row weights;
    for (const std::int64_t e : result_.experts) {
      weights.push_back(scores_[static_cast<std::size_t>(e)]);
    }
    if (a_.score == RouterScore::kSoftmaxChosen) weights = softmax(weights);
    double sum = 0.0;
    for (const double w : weights) sum += w;
    const double divisor = std::max(score_rounded(sum) + static_cast<double>(a_.sum_eps),
                                    static_cast<double>(a_.sum_min));
    for (double& w : weights) {
      if (a_.normalise != 0) w = score_rounded(w / divisor);
      w *= static_cast<double>(a_.scale);
      if (a_.round_weights != 0) w = to_dtype(w);
    }
    result_.weights = std::move(weights);
  }

  const RouterArgs& a_;
  Row logits_;
  Row scores_;
  Routing result_;
};

inline std::vector<Expected> expected(const RouterArgs& a) {
  std::vector<Expected> all;
  for (std::int64_t r = 0; r < a.logits.shape[0]; ++r) {
    const Routing routing = Router(a, r).route();
    for (std::int64_t j = 0; j < a.experts.shape[1]; ++j) {
      const auto i = static_cast<std::size_t>(j);
      all.push_back(
          {a.experts, offset(a.experts, r, j), static_cast<double>(routing.experts[i]), 0.0});
    }
    expect_row(all, a.weights, r, routing.weights);
  }
  return all;
}

// --- Experts' matrices

// A table of addresses with what the matrices have in common.
struct Matrices {
  DType dtype;
  const TensorView& addresses;
  std::int64_t stride;
  bool transposed;

  double at(std::int64_t e, std::int64_t output, std::int64_t input) const {
    TensorView matrix;
    matrix.data =
        reinterpret_cast<void*>(addresses.as<std::int64_t>()[e * addresses.stride[0]]);  // NOLINT
    matrix.dtype = dtype;
    return get(matrix, transposed ? input * stride + output : output * stride + input);
  }
};

// A result and the size of the numbers that were summed for it.
struct Summed {
  double value;
  double size;
};

// x W_e^T + b_e of one output, not rounded yet; `from` is the offset of a dense row of x.
inline Summed expert_sum(const TensorView& x, std::int64_t from, std::int64_t k,
                         const Matrices& matrices, const TensorView& biases, std::int64_t e,
                         std::int64_t output) {
  double sum = 0.0, size = 0.0;
  const auto add = [&](double term) {
    sum += term;
    size += std::abs(term);
  };
  for (std::int64_t i = 0; i < k; ++i) add(get(x, from + i) * matrices.at(e, output, i));
  if (biases.present()) add(Matrices{matrices.dtype, biases, 1, false}.at(e, 0, output));
  return {sum, size};
}
inline Summed expert_linear(const TensorView& x, std::int64_t from, std::int64_t k,
                            const Matrices& matrices, const TensorView& biases, std::int64_t e,
                            std::int64_t output) {
  const Summed y = expert_sum(x, from, k, matrices, biases, e, output);
  return {rounded(x.dtype, y.value), y.size};
}

// All results of the first half that a correct kernel may give.
inline segki::testing::Interval gated_interval(const ExpertGatedProjectionArgs& a, std::int64_t r,
                                               std::int64_t j, std::int64_t f) {
  const DType dtype = a.x.dtype;
  const auto e = static_cast<std::int64_t>(at(a.experts, r, j));
  const std::int64_t k = a.x.shape[1];
  const auto linear = [&](const TensorView& weights, const TensorView& biases) {
    const Matrices matrices = {dtype, weights, a.weight_stride, a.transposed != 0};
    const Summed y = expert_sum(a.x, offset(a.x, r), k, matrices, biases, e, f);
    const double error = 0x1p-24 * (std::sqrt(static_cast<double>(k)) + 4.0) * y.size;
    return segki::testing::rounded(dtype, {y.value - error, y.value + error});
  };
  const segki::testing::Interval gate = segki::testing::activated(
      a.fp32_activation != 0 ? DType::kF32 : dtype, a.activation, linear(a.gate, a.gate_bias));
  return segki::testing::rounded(dtype, segki::testing::multiply(gate, linear(a.up, a.up_bias)));
}

// A product in fp32. Its rounding shows: 5 * 0.7 is a tie of a half-width dtype in fp32 (and in
// torch), and a little less in double precision, 0.7F being less than 0.7.
inline double fp32_product(double a, double b) {
  return static_cast<double>(static_cast<float>(a * b));
}

// fp32 errs by the size of what was summed; rounding by the value.
inline double error_size(DType dtype, double value, double summed) {
  return dtype == DType::kF32 ? summed : std::max(std::abs(value), 1e-3 * summed);
}

inline std::vector<Expected> expected(const ExpertGatedProjectionArgs& a) {
  std::vector<Expected> all;
  const DType dtype = a.x.dtype;
  const Matrices gates = {dtype, a.gate, a.weight_stride, a.transposed != 0};
  const Matrices ups = {dtype, a.up, a.weight_stride, a.transposed != 0};
  for (std::int64_t r = 0; r < a.x.shape[0]; ++r) {
    for (std::int64_t j = 0; j < a.experts.shape[1]; ++j) {
      const auto e = static_cast<std::int64_t>(at(a.experts, r, j));
      for (std::int64_t f = 0; f < a.out.shape[2]; ++f) {
        const std::int64_t row = offset(a.x, r);
        const Summed g = expert_linear(a.x, row, a.x.shape[1], gates, a.gate_bias, e, f);
        const Summed u = expert_linear(a.x, row, a.x.shape[1], ups, a.up_bias, e, f);
        const double act = rounded(a.fp32_activation != 0 ? DType::kF32 : dtype,
                                   segki::testing::activation_value(a.activation, g.value));
        const double slope = a.activation == Activation::kRelu2 ? 2.0 * std::abs(g.value) : 1.2;
        const double summed = slope * g.size * std::abs(u.value) + std::abs(act) * u.size;
        const double value = rounded(dtype, act * u.value);
        const double size = std::max(std::abs(value), std::abs(g.value * u.value));
        const segki::testing::Interval accepted = gated_interval(a, r, j, f);
        all.push_back({.view = a.out,
                       .offset = offset(a.out, r, j, f),
                       .value = value,
                       .magnitude = error_size(dtype, size, summed),
                       .error = std::max(accepted.high - value, value - accepted.low)});
      }
    }
  }
  return all;
}

inline std::vector<Expected> expected(const ExpertProjectionArgs& a) {
  std::vector<Expected> all;
  const DType dtype = a.x.dtype;
  const Matrices matrices = {dtype, a.weight, a.weight_stride, a.transposed != 0};
  const std::int64_t slots = a.experts.shape[1];
  for (std::int64_t r = 0; r < a.x.shape[0]; ++r) {
    std::vector<std::pair<std::int64_t, std::int64_t>> order;  // (expert, slot)
    for (std::int64_t j = 0; j < slots; ++j) {
      order.emplace_back(static_cast<std::int64_t>(at(a.experts, r, j)), j);
    }
    if (a.round_sums != 0) std::sort(order.begin(), order.end());
    for (std::int64_t h = 0; h < a.out.shape[1]; ++h) {
      double sum = 0.0, summed = 0.0, size = 0.0;
      for (const auto& [e, j] : order) {
        const Summed y =
            expert_linear(a.x, offset(a.x, r, j), a.x.shape[2], matrices, a.bias, e, h);
        const double weight = at(a.weights, r, j);
        const double product = fp32_product(y.value, weight);
        sum += a.round_products != 0 ? rounded(dtype, product) : product;
        if (a.round_sums != 0) sum = rounded(dtype, sum);
        size += std::abs(product);
        summed += y.size * std::abs(weight);
      }
      double value = rounded(dtype, sum);
      const auto scale = [&](float factor) {
        if (factor == 1.0F) return;
        value = rounded(dtype, fp32_product(value, static_cast<double>(factor)));
        size *= std::abs(static_cast<double>(factor));
        summed *= std::abs(static_cast<double>(factor));
      };
      scale(a.routed_scale);
      if (a.shared.present()) {
        double t = at(a.shared, r, h);
        if (a.shared_gate.present()) {
          t = rounded(dtype, rounded(dtype, sigmoid(at(a.shared_gate, r, 0))) * t);
        }
        value = rounded(dtype, value + t);
        size += std::abs(t);
        summed += std::abs(t);
      }
      scale(a.out_scale);
      all.push_back({a.out, offset(a.out, r, h), value, error_size(dtype, size, summed)});
    }
  }
  return all;
}

}  // namespace reference

// --- Cases

enum class RouterBias { kNone, kF32, kDtype };

struct RouterCase {
  std::int64_t rows, experts, k;
  RouterScore score = RouterScore::kSoftmax;
  bool normalise = false;
  RouterBias bias = RouterBias::kNone;
  bool sorted = true;
  bool ties = false;  // logits of a few values
  bool by_logit = false;
  std::int32_t groups = 1, group_top_k = 1;
  bool group_by_max = false, mask_with_zero = false;
  float sum_eps = 0.0F, sum_min = 0.0F, scale = 1.0F;
  bool round_scores = false, round_weights = false;
};

inline std::vector<RouterCase> router_cases() {
  using enum RouterScore;
  return {
      {.rows = 1, .experts = 1, .k = 1},
      {.rows = 3, .experts = 5, .k = 5, .normalise = true},
      {.rows = 1, .experts = 128, .k = 8, .normalise = true, .round_weights = true},
      {.rows = 64, .experts = 60, .k = 4},
      {.rows = 5, .experts = 256, .k = 4, .ties = true},
      {.rows = 5, .experts = 257, .k = 5, .sorted = false, .ties = true},
      {.rows = 8, .experts = 64, .k = 6, .score = kSoftmaxChosen, .round_weights = true},
      {.rows = 7, .experts = 17, .k = 3, .score = kSoftmaxChosen, .ties = true},
      {.rows = 4, .experts = 24, .k = 3, .score = kSoftmaxChosen, .round_scores = true},
      {.rows = 6,
       .experts = 32,
       .k = 4,
       .score = kSigmoid,
       .normalise = true,
       .bias = RouterBias::kF32,
       .sum_eps = 1e-20F,
       .scale = 2.5F},
      {.rows = 9,
       .experts = 64,
       .k = 8,
       .score = kSigmoid,
       .normalise = true,
       .bias = RouterBias::kF32,
       .sorted = false,
       .groups = 8,
       .group_top_k = 4,
       .sum_eps = 1e-20F,
       .scale = 2.5F},
      {.rows = 9,
       .experts = 40,
       .k = 6,
       .bias = RouterBias::kDtype,
       .groups = 8,
       .group_top_k = 2,
       .mask_with_zero = true,
       .scale = 16.0F},
      {.rows = 3, .experts = 24, .k = 2, .ties = true, .groups = 24, .group_top_k = 5},
      {.rows = 6,
       .experts = 30,
       .k = 4,
       .sorted = false,
       .groups = 3,
       .group_top_k = 1,
       .group_by_max = true},
      {.rows = 4,
       .experts = 20,
       .k = 4,
       .score = kSigmoid,
       .normalise = true,
       .bias = RouterBias::kDtype,
       .by_logit = true,
       .round_weights = true},
      {.rows = 5, .experts = 12, .k = 3, .normalise = true, .sum_min = 0.9F},
      {.rows = 5,
       .experts = 16,
       .k = 4,
       .score = kSigmoid,
       .normalise = true,
       .scale = 1.7F,
       .round_scores = true,
       .round_weights = true},
      {.rows = 5, .experts = 16, .k = 4, .normalise = true, .round_scores = true},
  };
}

inline std::unique_ptr<Problem<RouterArgs>> make_problem(const RouterCase& c, DType dtype,
                                                         Rng& rng) {
  auto p = std::make_unique<Problem<RouterArgs>>();
  p->name = "route_experts rows " + std::to_string(c.rows) + " experts " +
            std::to_string(c.experts) + " k " + std::to_string(c.k) + " score " +
            std::to_string(static_cast<int>(c.score)) + " groups " + std::to_string(c.groups);
  p->rows = c.rows;
  RouterArgs& a = p->args;
  a.logits = p->tensor(DType::kF32, Shape{c.rows, c.experts}, 3).view();
  a.experts = p->tensor(DType::kI32, Shape{c.rows, c.k}, 2).view();
  a.weights = p->tensor(DType::kF32, Shape{c.rows, c.k}, 1).view();
  if (c.bias != RouterBias::kNone) {
    const DType of_bias = c.bias == RouterBias::kF32 ? DType::kF32 : dtype;
    a.bias = p->tensor(of_bias, Shape{c.experts}).fill([&] { return 0.3 * normal(rng); }).view();
  }
  a.score = c.score;
  a.dtype = dtype;
  a.choose_by_logit = c.by_logit ? 1 : 0;
  a.groups = c.groups;
  a.group_top_k = c.group_top_k;
  a.group_by_max = c.group_by_max ? 1 : 0;
  a.mask_with_zero = c.mask_with_zero ? 1 : 0;
  a.sorted = c.sorted ? 1 : 0;
  a.normalise = c.normalise ? 1 : 0;
  a.sum_eps = c.sum_eps;
  a.sum_min = c.sum_min;
  a.scale = c.scale;
  a.round_weights = c.round_weights ? 1 : 0;
  a.round_scores = c.round_scores ? 1 : 0;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    do {
      for (std::int64_t e = 0; e < c.experts; ++e) {
        const double logit = 2.0 * normal(rng);
        reference::set(a.logits, reference::offset(a.logits, r, e),
                       c.ties ? std::round(logit) : logit);
      }
    } while (!reference::Router(a, r).route().settled);
  }
  p->row_views = {&RouterArgs::logits, &RouterArgs::experts, &RouterArgs::weights};
  return p;
}

// How the experts' matrices lie in memory.
enum class Layout {
  kEach,       // each by itself, [outputs, inputs]
  kFused,      // one parameter [E, outputs of all matrices, inputs]
  kSideBySide  // one parameter [E, inputs, outputs of all matrices]
};

struct ExpertCase {
  std::int64_t rows, k, experts, inputs, outputs;
  Layout layout = Layout::kEach;
  bool bias = false;
  Activation activation = Activation::kSilu;
  // Second half:
  bool shared = false, shared_gate = false;
  bool round_products = false, round_sums = false;
  float routed_scale = 1.0F, out_scale = 1.0F;
  bool fp32_activation = false;

  std::string name() const {
    return "rows " + std::to_string(rows) + " k " + std::to_string(k) + " of " +
           std::to_string(experts) + " inputs " + std::to_string(inputs) + " outputs " +
           std::to_string(outputs) + " layout " + std::to_string(static_cast<int>(layout)) +
           (bias ? " bias" : "") + " activation " + std::to_string(static_cast<int>(activation)) +
           (shared ? " shared" : "") + (shared_gate ? " gate" : "") +
           (round_products ? " round_products" : "") + (round_sums ? " round_sums" : "") +
           (fp32_activation ? " fp32_activation" : "");
  }
};

inline std::vector<ExpertCase> expert_gated_projection_cases() {
  std::vector<ExpertCase> cases = {
      {1, 1, 1, 1, 1},
      {1, 8, 64, 256, 96, Layout::kFused},
      {3, 2, 3, 33, 17, Layout::kEach, true},
      {8, 4, 8, 100, 50, Layout::kFused, true},
      {64, 3, 5, 40, 35},
      {17, 2, 2, 65, 130, Layout::kFused},
      {5, 3, 7, 45, 61, Layout::kSideBySide},
      {64, 2, 4, 20, 300, Layout::kSideBySide},
      {1, 6, 9, 129, 70, Layout::kSideBySide, true},
  };
  // GELU has a test of its own: for negative arguments it cancels in fp32 more than `expected`
  // allows for.
  for (const Activation activation : {Activation::kNone, Activation::kRelu, Activation::kRelu2}) {
    cases.push_back({.rows = 4,
                     .k = 2,
                     .experts = 3,
                     .inputs = 70,
                     .outputs = 40,
                     .bias = true,
                     .activation = activation});
  }
  for (const Layout layout : {Layout::kFused, Layout::kSideBySide}) {
    cases.push_back({.rows = 6,
                     .k = 2,
                     .experts = 4,
                     .inputs = 70,
                     .outputs = 130,
                     .layout = layout,
                     .fp32_activation = true});
  }
  return cases;
}

inline std::vector<ExpertCase> expert_projection_cases() {
  std::vector<ExpertCase> cases = {
      {1, 1, 1, 1, 1},
      {1, 8, 64, 96, 256, Layout::kFused},
      {3, 2, 3, 33, 17, Layout::kEach, true},
      {64, 3, 5, 40, 97},
      {17, 2, 2, 65, 250, Layout::kFused, true},
      {5, 3, 7, 45, 61, Layout::kSideBySide},
      {64, 2, 4, 20, 130, Layout::kSideBySide, true},
      {1, 6, 9, 129, 300, Layout::kSideBySide},
  };
  ExpertCase c = {.rows = 6, .k = 3, .experts = 6, .inputs = 50, .outputs = 110};
  for (const auto& [products, sums] : {std::pair{true, false}, {false, true}, {true, true}}) {
    c.round_products = products;
    c.round_sums = sums;
    cases.push_back(c);
  }
  c.shared = true;
  c.routed_scale = 2.5F;
  cases.push_back(c);
  c.shared_gate = true;
  c.out_scale = 0.7F;
  cases.push_back(c);
  c.round_products = c.round_sums = false;
  cases.push_back(c);
  c.routed_scale = 1.0F;
  c.shared_gate = false;
  cases.push_back(c);
  return cases;
}

// Experts of each row, all different, and which experts were chosen at all.
template <typename Args>
TensorView choose_experts(Problem<Args>& p, const ExpertCase& c, std::vector<bool>& chosen,
                          Rng& rng) {
  std::vector<double> all(static_cast<std::size_t>(c.experts));
  for (std::size_t e = 0; e < all.size(); ++e) all[e] = static_cast<double>(e);
  chosen.assign(all.size(), false);
  std::int64_t slot = 0;
  return p.tensor(DType::kI32, Shape{c.rows, c.k}, 1)
      .fill([&] {
        if (slot++ % c.k == 0) std::shuffle(all.begin(), all.end(), rng);
        const double e = all[static_cast<std::size_t>((slot - 1) % c.k)];
        chosen[static_cast<std::size_t>(e)] = true;
        return e;
      })
      .view();
}

inline void set_address(const TensorView& table, std::int64_t e, const TensorView& memory,
                        std::int64_t at) {
  table.as<std::int64_t>()[e] =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory.data)) +  // NOLINT
      at * static_cast<std::int64_t>(size_of(memory.dtype));
}

// Fills `tables` with addresses of [outputs, inputs] matrices, and `biases`, where the case has
// them, with those of vectors. An expert that nobody chose has no memory: its address is 0, or,
// inside of a fused parameter, its numbers stay NaN. Returns the matrices' stride.
template <typename Args>
std::int64_t add_experts(Problem<Args>& p, const ExpertCase& c, DType dtype,
                         const std::vector<bool>& chosen, const std::vector<TensorView*>& tables,
                         const std::vector<TensorView*>& biases, Rng& rng) {
  const auto weight = [&] { return 2.0 * normal(rng) / std::sqrt(static_cast<double>(c.inputs)); };
  const auto count = static_cast<std::int64_t>(tables.size());
  const auto table = [&] {
    return p.tensor(DType::kI64, Shape{c.experts}).fill([] { return 0.0; }).view();
  };
  for (TensorView* t : tables) *t = table();
  const std::int64_t all = count * c.outputs;
  TensorView fused;
  if (c.layout == Layout::kFused) {
    fused = p.tensor(dtype, Shape{c.experts, all, c.inputs}).view();
  } else if (c.layout == Layout::kSideBySide) {
    fused = p.tensor(dtype, Shape{c.experts, c.inputs, all}).view();
  }
  for (std::int64_t e = 0; e < c.experts; ++e) {
    const bool used = chosen[static_cast<std::size_t>(e)];
    for (std::int64_t i = 0; used && fused.present() && i < all * c.inputs; ++i) {
      reference::set(fused, e * all * c.inputs + i, weight());
    }
    for (std::int64_t m = 0; m < count; ++m) {
      const TensorView& addresses = *tables[static_cast<std::size_t>(m)];
      if (fused.present()) {
        const std::int64_t within = c.layout == Layout::kFused ? c.inputs : 1;
        set_address(addresses, e, fused, e * all * c.inputs + m * c.outputs * within);
      } else if (used) {
        set_address(addresses, e, p.tensor(dtype, Shape{c.outputs, c.inputs}).fill(weight).view(),
                    0);
      }
    }
  }
  for (TensorView* b : biases) {
    if (!c.bias) continue;
    *b = table();
    for (std::int64_t e = 0; e < c.experts; ++e) {
      if (!chosen[static_cast<std::size_t>(e)]) continue;
      set_address(*b, e, p.tensor(dtype, Shape{c.outputs}).fill([&] { return normal(rng); }).view(),
                  0);
    }
  }
  return c.layout == Layout::kSideBySide ? all : c.inputs;
}

inline std::unique_ptr<Problem<ExpertGatedProjectionArgs>> make_gated_problem(const ExpertCase& c,
                                                                              DType dtype,
                                                                              Rng& rng) {
  auto p = std::make_unique<Problem<ExpertGatedProjectionArgs>>();
  p->name = "expert_gated_projection " + c.name();
  p->rows = c.rows;
  ExpertGatedProjectionArgs& a = p->args;
  a.x = p->tensor(dtype, Shape{c.rows, c.inputs}, 3).fill([&] { return normal(rng); }).view();
  std::vector<bool> chosen;
  a.experts = choose_experts(*p, c, chosen, rng);
  a.weight_stride =
      add_experts(*p, c, dtype, chosen, {&a.gate, &a.up}, {&a.gate_bias, &a.up_bias}, rng);
  a.transposed = c.layout == Layout::kSideBySide ? 1 : 0;
  a.activation = c.activation;
  a.fp32_activation = c.fp32_activation ? 1 : 0;
  a.out = p->tensor(dtype, Shape{c.rows, c.k, c.outputs}).view();
  p->row_views = {&ExpertGatedProjectionArgs::x, &ExpertGatedProjectionArgs::experts,
                  &ExpertGatedProjectionArgs::out};
  return p;
}

inline std::unique_ptr<Problem<ExpertProjectionArgs>> make_down_problem(const ExpertCase& c,
                                                                        DType dtype, Rng& rng) {
  auto p = std::make_unique<Problem<ExpertProjectionArgs>>();
  p->name = "expert_projection " + c.name();
  p->rows = c.rows;
  ExpertProjectionArgs& a = p->args;
  const auto random = [&] { return normal(rng); };
  a.x = p->tensor(dtype, Shape{c.rows, c.k, c.inputs}).fill(random).view();
  std::vector<bool> chosen;
  a.experts = choose_experts(*p, c, chosen, rng);
  // Those of a router that rounds its weights, or of one that does not.
  const bool rounded = c.round_products;
  a.weights = p->tensor(DType::kF32, Shape{c.rows, c.k}, 2)
                  .fill([&] {
                    const double weight = 0.1 + std::abs(normal(rng));
                    return rounded ? reference::rounded(dtype, weight) : weight;
                  })
                  .view();
  a.weight_stride = add_experts(*p, c, dtype, chosen, {&a.weight}, {&a.bias}, rng);
  a.transposed = c.layout == Layout::kSideBySide ? 1 : 0;
  if (c.shared) a.shared = p->tensor(dtype, Shape{c.rows, c.outputs}, 4).fill(random).view();
  if (c.shared_gate) {
    // Not next to a boundary of its sigmoid's rounding, where fp32 decides for a whole row.
    const auto settled = [&] {
      for (;;) {
        const double gate = reference::rounded(dtype, normal(rng));
        const double opened = reference::sigmoid(gate);
        if (!reference::doubtful(dtype, opened, opened)) return gate;
      }
    };
    a.shared_gate = p->tensor(dtype, Shape{c.rows, 1}, 2).fill(settled).view();
  }
  a.round_products = c.round_products ? 1 : 0;
  a.round_sums = c.round_sums ? 1 : 0;
  a.routed_scale = c.routed_scale;
  a.out_scale = c.out_scale;
  a.out = p->tensor(dtype, Shape{c.rows, c.outputs}, 1).view();
  p->row_views = {&ExpertProjectionArgs::x,           &ExpertProjectionArgs::experts,
                  &ExpertProjectionArgs::weights,     &ExpertProjectionArgs::shared,
                  &ExpertProjectionArgs::shared_gate, &ExpertProjectionArgs::out};
  return p;
}

// For check_case, which goes by the type of a case.
struct GatedExpertCase : ExpertCase {};
struct DownExpertCase : ExpertCase {};
inline auto make_problem(const GatedExpertCase& c, DType dtype, Rng& rng) {
  return make_gated_problem(c, dtype, rng);
}
inline auto make_problem(const DownExpertCase& c, DType dtype, Rng& rng) {
  return make_down_problem(c, dtype, rng);
}

}  // namespace segki::test
