// Double-precision references of the ops that multiply with a weight, with the rounding points that
// ops.h names.
//
// A reference value is an interval: all results that a correct kernel may give. It starts as the
// exact product plus or minus the error of an fp32 sum and goes through each rounding and each
// function; where no rounding boundary is near, both ends round to the same value and the kernel
// must hit it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "op_cases.h"

namespace segki::testing {

struct Interval {
  double low;
  double high;

  bool contains(double value) const { return low <= value && value <= high; }
};

inline Interval hull(Interval a, Interval b) {
  return {std::min(a.low, b.low), std::max(a.high, b.high)};
}
inline Interval widen(Interval v, double by) { return {v.low - by, v.high + by}; }

// One correctly rounded fp32 operation, then rounding to dtype.
inline Interval rounded(DType dtype, Interval v) {
  constexpr double kHalfUlp = 0x1p-24;
  const double slack = kHalfUlp * std::max(std::fabs(v.low), std::fabs(v.high));
  if (dtype == DType::kF32) return widen(v, slack);
  return {round_to(dtype, v.low - slack), round_to(dtype, v.high + slack)};
}

inline Interval add(Interval a, Interval b) { return {a.low + b.low, a.high + b.high}; }
inline Interval multiply(Interval a, Interval b) {
  const double p[] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
  return {*std::min_element(p, p + 4), *std::max_element(p, p + 4)};
}
inline Interval multiply(Interval a, double b) { return multiply(a, Interval{b, b}); }

inline double activation_value(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
    case Activation::kGeluTanh: {
      const double inner = std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
      return 0.5 * x * (1.0 + std::tanh(inner));
    }
    case Activation::kGeluErf:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kRelu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return NAN;
}

// round(activation(y)). In fp32 the functions are good to 1e-6 of their value and, as 1 + tanh and
// 1
// + erf cancel for negative arguments, to 2^-22 of their argument.
inline Interval activated(DType dtype, Activation activation, Interval y) {
  if (activation == Activation::kNone) return y;
  const double low = activation_value(activation, y.low);
  const double high = activation_value(activation, y.high);
  Interval v = hull({low, low}, {high, high});
  if (activation == Activation::kRelu) return v;
  if (activation == Activation::kRelu2) return rounded(dtype, v);
  const double largest = std::max(std::fabs(y.low), std::fabs(y.high));
  // A minimum inside the interval lies below both ends by less than its width times its slope.
  v = widen(v, 0.2 * (y.high - y.low) + 0x1p-22 * largest +
                   1e-6 * std::max(std::fabs(low), std::fabs(high)));
  return rounded(dtype, v);
}

// round(x W^T + bias) of one output. The error of an fp32 sum of k products in any order grows like
// sqrt(k) for the random terms of a test; the bound leaves it a factor of several sqrt(k).
inline Interval linear(const MatmulProblem& p, std::size_t which, std::int64_t row,
                       std::int64_t column) {
  double sum = 0.0;
  double magnitude = 0.0;
  for (std::int64_t i = 0; i < p.c.k; ++i) {
    const double w =
        p.c.transposed ? p.weight[which].get(i, column) : p.weight[which].get(column, i);
    const double product = p.x.get(row, i) * w;
    sum += product;
    magnitude += std::fabs(product);
  }
  if (p.c.bias) {
    const double b = p.bias[which].get(0, column);
    sum += b;
    magnitude += std::fabs(b);
  }
  const double error = 0x1p-24 * (std::sqrt(static_cast<double>(p.c.k)) + 4.0) * magnitude;
  return rounded(p.c.dtype, {sum - error, sum + error});
}

inline Interval reference_projection(const MatmulProblem& p, std::size_t which, std::int64_t row,
                                     std::int64_t column) {
  const DType dtype = p.c.dtype;
  const Interval y = activated(dtype, p.c.activation, linear(p, which, row, column));
  if (!p.c.residual) return y;
  const double skip = p.residual.get(row, column);
  const Interval scaled_skip = p.c.residual_scale == 1.0F
                                   ? Interval{skip, skip}
                                   : rounded(dtype, multiply({skip, skip}, p.c.residual_scale));
  const Interval branch =
      p.c.branch_scale == 1.0F ? y : rounded(dtype, multiply(y, p.c.branch_scale));
  return rounded(dtype, add(scaled_skip, branch));
}

inline Interval reference_gated_projection(const MatmulProblem& p, std::int64_t row,
                                           std::int64_t column) {
  const DType inner = p.c.fp32_activation ? DType::kF32 : p.c.dtype;
  const Interval gate = activated(inner, p.c.activation, linear(p, 0, row, column));
  return rounded(p.c.dtype, multiply(gate, linear(p, 1, row, column)));
}

inline Interval reference_lm_head(const MatmulProblem& p, std::int64_t row, std::int64_t column) {
  const DType dtype = p.c.dtype;
  Interval y = linear(p, 0, row, column);
  if (p.c.scale != 1.0F) y = rounded(dtype, multiply(y, p.c.scale));
  if (p.c.divisor != 1.0F) y = rounded(dtype, multiply(y, 1.0 / p.c.divisor));
  if (p.c.softcap != 0.0F) {
    const DType inner = p.c.fp32_softcap ? DType::kF32 : dtype;
    y = rounded(inner, multiply(y, 1.0 / p.c.softcap));
    const double low = std::tanh(y.low);
    const double high = std::tanh(y.high);
    y = rounded(inner, {low - 1e-6 * std::fabs(low), high + 1e-6 * std::fabs(high)});
    y = rounded(inner, multiply(y, p.c.softcap));
  }
  return y;
}

}  // namespace segki::testing
