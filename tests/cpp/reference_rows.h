// The ops that work on rows, in double precision with the rounding points of ops.h, one element at
// a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "segki/ops.h"

namespace segki::test::reference {

// To nearest even with `bits` bits of precision and no exponent below `lowest`.
inline double rounded_to(double value, int bits, int lowest, double largest) {
  if (!std::isfinite(value) || value == 0.0) return value;
  const int exponent = std::max(std::ilogb(value), lowest);
  const double step = std::ldexp(1.0, exponent - bits + 1);
  const double result = std::nearbyint(value / step) * step;
  if (std::abs(result) <= largest) return result;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

// The value in a model's dtype; fp32 stays as it is.
inline double rounded(DType dtype, double value) {
  if (dtype == DType::kBF16) return rounded_to(value, 8, -126, 3.3895313892515355e38);
  if (dtype == DType::kF16) return rounded_to(value, 11, -14, 65504.0);
  return value;
}

// round(value * factor) as every framework has it: the product is an fp32 number first. A factor
// like 7.7F times a multiple of 5 is half way between two half-precision values then, and not
// before.
inline double scaled(DType dtype, double value, double factor) {
  return rounded(dtype, static_cast<double>(static_cast<float>(value * factor)));
}

inline std::int64_t offset(const TensorView& view, std::int64_t i, std::int64_t j = 0,
                           std::int64_t k = 0, std::int64_t l = 0) {
  const std::int64_t index[kMaxRank] = {i, j, k, l};
  std::int64_t at = 0;
  for (int d = 0; d < view.rank; ++d) at += index[d] * view.stride[d];
  return at;
}

// visit(offset) for each element, the last dimension fastest.
template <typename Visit>
void for_each(const TensorView& view, const Visit& visit) {
  std::int64_t size[kMaxRank] = {1, 1, 1, 1};
  std::copy(view.shape, view.shape + view.rank, size);
  for (std::int64_t i = 0; i < size[0]; ++i) {
    for (std::int64_t j = 0; j < size[1]; ++j) {
      for (std::int64_t k = 0; k < size[2]; ++k) {
        for (std::int64_t l = 0; l < size[3]; ++l) visit(offset(view, i, j, k, l));
      }
    }
  }
}

inline double get(const TensorView& view, std::int64_t at) {
  switch (view.dtype) {
    case DType::kF32:
      return static_cast<double>(view.as<float>()[at]);
    case DType::kBF16: {
      const std::uint32_t bits = std::uint32_t{view.as<std::uint16_t>()[at]} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return static_cast<double>(value);
    }
    case DType::kF16: {
      const int bits = view.as<std::uint16_t>()[at];
      const int exponent = bits >> 10 & 31;
      const double fraction = bits & 1023;
      double value =
          std::ldexp(exponent == 0 ? fraction : fraction + 1024, std::max(exponent, 1) - 25);
      if (exponent == 31) {
        value = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
      }
      return (bits & 0x8000) != 0 ? -value : value;
    }
    case DType::kI32:
      return static_cast<double>(view.as<std::int32_t>()[at]);
    case DType::kI64:
      return static_cast<double>(view.as<std::int64_t>()[at]);
    case DType::kU8:
      return static_cast<double>(view.as<std::uint8_t>()[at]);
  }
  return 0.0;
}

inline void set(const TensorView& view, std::int64_t at, double value) {
  switch (view.dtype) {
    case DType::kF32:
      view.as<float>()[at] = static_cast<float>(value);
      return;
    case DType::kBF16: {
      const float narrow = static_cast<float>(rounded(DType::kBF16, value));
      std::uint32_t bits;
      std::memcpy(&bits, &narrow, sizeof(bits));
      view.as<std::uint16_t>()[at] = static_cast<std::uint16_t>(bits >> 16);
      return;
    }
    case DType::kF16: {
      const double narrow = std::abs(rounded(DType::kF16, value));
      const int exponent = narrow < 0x1p-14 ? -15 : std::ilogb(narrow);
      const int fraction = static_cast<int>(
          exponent == -15 ? narrow * 0x1p24 : (std::ldexp(narrow, -exponent) - 1.0) * 1024.0);
      const int sign = std::signbit(value) ? 0x8000 : 0;
      view.as<std::uint16_t>()[at] =
          static_cast<std::uint16_t>(sign | (exponent + 15) << 10 | fraction);
      return;
    }
    case DType::kI32:
      view.as<std::int32_t>()[at] = static_cast<std::int32_t>(value);
      return;
    case DType::kI64:
      view.as<std::int64_t>()[at] = static_cast<std::int64_t>(value);
      return;
    case DType::kU8:
      view.as<std::uint8_t>()[at] = static_cast<std::uint8_t>(value);
      return;
  }
}

inline double at(const TensorView& view, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0,
                 std::int64_t l = 0) {
  return get(view, offset(view, i, j, k, l));
}

inline std::int64_t row_value(const TensorView& view, std::int64_t r) {
  return static_cast<std::int64_t>(at(view, r));
}

inline std::int64_t slot_of(const TensorView& slots, std::int64_t r) {
  return slots.present() ? row_value(slots, r) : r;
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Whether fp32 may round a value of this size to another neighbour than double precision does.
inline bool doubtful(DType dtype, double value, double size) {
  const double slack = 0x1p-20 * size;
  return dtype != DType::kF32 && rounded(dtype, value - slack) != rounded(dtype, value + slack);
}

// An element that an op writes: where, what, and the size of the numbers that it came from.
// `doubtful`: fp32's error decides one of its roundings, and so which neighbour it is.
// `error`: how far away a correct kernel may be, where roundings before the last one decide more
// than the tolerance of `magnitude` allows for.
struct Expected {
  TensorView view;
  std::int64_t offset;
  double value;
  double magnitude;
  bool doubtful = false;
  double error = 0.0;
};

using Row = std::vector<double>;

// `weight` and `bias` may be empty.
inline Row norm_row(DType dtype, const NormSpec& spec, const Row& x, const Row& weight,
                    const Row& bias) {
  if (spec.kind == NormKind::kNone) return x;
  const bool before = spec.round_before_weight != 0;
  const double count = static_cast<double>(x.size());
  double mean = 0.0;
  if (spec.kind == NormKind::kLayer) {
    for (const double v : x) mean += v / count;
  }
  double square = 0.0;
  for (const double v : x) square += (v - mean) * (v - mean) / count;
  const double scale = 1.0 / std::sqrt(square + static_cast<double>(spec.eps));
  Row out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    double y = (x[i] - mean) * scale;
    if (before) y = rounded(dtype, y);
    if (!weight.empty()) {
      double s = weight[i] + static_cast<double>(spec.weight_offset);
      if (before) s = rounded(dtype, s);
      y *= s;
    }
    if (!bias.empty()) y = (before ? rounded(dtype, y) : y) + bias[i];
    out[i] = rounded(dtype, y);
  }
  return out;
}

inline Row row_of(const TensorView& view, std::int64_t r) {
  Row row;
  for (std::int64_t i = 0; i < view.shape[1]; ++i) row.push_back(at(view, r, i));
  return row;
}

inline Row vector_of(const TensorView& view) {
  Row row;
  if (view.present()) for_each(view, [&](std::int64_t o) { row.push_back(get(view, o)); });
  return row;
}

inline void expect_row(std::vector<Expected>& all, const TensorView& view, std::int64_t r,
                       const Row& row, double floor = 0.0) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    all.push_back({view, offset(view, r, static_cast<std::int64_t>(i)), row[i],
                   std::max(std::abs(row[i]), floor)});
  }
}

inline std::vector<Expected> expected(const NormArgs& a) {
  std::vector<Expected> all;
  for (std::int64_t r = 0; r < a.x.shape[0]; ++r) {
    expect_row(all, a.out, r,
               norm_row(a.x.dtype, a.norm, row_of(a.x, r), vector_of(a.weight), vector_of(a.bias)),
               a.norm.kind == NormKind::kLayer ? 1.0 : 0.0);
  }
  return all;
}

inline std::vector<Expected> expected(const SumNormArgs& a) {
  std::vector<Expected> all;
  const DType dtype = a.sum.dtype;
  for (std::int64_t r = 0; r < a.sum.shape[0]; ++r) {
    Row sum;
    for (int t = 0; t < a.count; ++t) {
      Row term = row_of(a.terms[t], r);
      for (std::size_t i = 0; i < term.size(); ++i) {
        if (a.scales[t] != 1.0F) {
          term[i] = scaled(dtype, term[i], static_cast<double>(a.scales[t]));
        }
        if (t > 0) term[i] = rounded(dtype, sum[i] + term[i]);
      }
      sum = term;
    }
    expect_row(all, a.sum, r, sum, 1.0);
    if (a.norm.kind == NormKind::kNone) continue;
    expect_row(all, a.out, r, norm_row(dtype, a.norm, sum, vector_of(a.weight), vector_of(a.bias)),
               1.0);
  }
  return all;
}

inline std::vector<Expected> expected(const EmbeddingArgs& a) {
  std::vector<Expected> all;
  const DType dtype = a.out.dtype;
  for (std::int64_t r = 0; r < a.out.shape[0]; ++r) {
    const std::int64_t token =
        std::clamp(row_value(a.tokens, r), std::int64_t{0}, a.table.shape[0] - 1);
    Row x = row_of(a.table, token);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = scaled(dtype, x[i], static_cast<double>(a.scale));
      if (a.position_table.present()) {
        x[i] = rounded(dtype,
                       x[i] + at(a.position_table, row_value(a.positions, r) + a.position_offset,
                                 static_cast<std::int64_t>(i)));
      }
    }
    expect_row(all, a.out, r, x, a.position_table.present() ? 1.0 : 0.0);
  }
  return all;
}

// Rotates one head.
inline void rope_head(const RopeKvWriteArgs& a, std::int64_t position, double* x) {
  if (a.rope == RopeKind::kNone) return;
  const DType dtype = a.q.dtype;
  const std::int64_t half = a.cos.shape[1];
  const auto product = [&](double u, double v) {
    return a.round_products != 0 ? rounded(dtype, u * v) : u * v;
  };
  for (std::int64_t j = 0; j < half; ++j) {
    double& first = a.rope == RopeKind::kNeox ? x[j] : x[2 * j];
    double& second = a.rope == RopeKind::kNeox ? x[j + half] : x[2 * j + 1];
    const double c = at(a.cos, position, j), s = at(a.sin, position, j);
    const double turned = rounded(dtype, product(first, c) - product(second, s));
    second = rounded(dtype, product(second, c) + product(first, s));
    first = turned;
  }
}

// All heads of one row's q (or k), dense.
inline Row rope_row(const RopeKvWriteArgs& a, std::int64_t r, Row x, const NormSpec& spec,
                    const TensorView& weight, const TensorView& bias, bool with_scale) {
  const DType dtype = a.q.dtype;
  const std::size_t dim = static_cast<std::size_t>(a.q.shape[3]);
  const std::int64_t position = row_value(a.positions, r);
  const auto normalise = [&] {
    const std::size_t size = a.norm_full_width != 0 ? x.size() : dim;
    for (std::size_t begin = 0; begin < x.size(); begin += size) {
      const auto part = [&](const Row& all) {
        if (all.empty()) return Row();
        const auto from = all.begin() + static_cast<std::ptrdiff_t>(all.size() == size ? 0 : begin);
        return Row(from, from + static_cast<std::ptrdiff_t>(size));
      };
      const Row y = norm_row(dtype, spec, part(x), part(vector_of(weight)), part(vector_of(bias)));
      std::copy(y.begin(), y.end(), x.begin() + static_cast<std::ptrdiff_t>(begin));
    }
  };
  if (a.norm_after_rope == 0) normalise();
  for (std::size_t begin = 0; begin < x.size(); begin += dim) rope_head(a, position, &x[begin]);
  if (a.norm_after_rope != 0) normalise();
  if (with_scale) {
    for (double& v : x) v = scaled(dtype, v, at(a.position_scale, position));
  }
  return x;
}

inline std::vector<Expected> expected(const RopeKvWriteArgs& a) {
  std::vector<Expected> all;
  const auto row = [](const TensorView& view, std::int64_t r) {
    TensorView one = view;
    one.data =
        view.as<char>() + r * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
    one.shape[0] = 1;
    return vector_of(one);
  };
  for (std::int64_t r = 0; r < a.q.shape[0]; ++r) {
    const std::int64_t index = row_value(a.lengths, r) % a.k_cache.shape[2];
    const std::int64_t slot = slot_of(a.slots, r);
    const Row q =
        rope_row(a, r, row(a.q, r), a.q_norm, a.q_weight, a.q_bias, a.position_scale.present());
    const Row k = rope_row(a, r, row(a.k, r), a.k_norm, a.k_weight, a.k_bias, false);
    const Row v = row(a.v, r);
    // Sums that cancel, and norms of them, err by the size of a typical element.
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(q.size()); ++i) {
      const double value = q[static_cast<std::size_t>(i)];
      all.push_back({a.q_out, offset(a.q_out, r, i / a.q.shape[3], i % a.q.shape[3]), value,
                     std::max(std::abs(value), 2.0)});
    }
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(k.size()); ++i) {
      const double value = k[static_cast<std::size_t>(i)];
      all.push_back({a.k_cache, offset(a.k_cache, slot, i / a.k.shape[2], index, i % a.k.shape[2]),
                     value, std::max(std::abs(value), 2.0)});
    }
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(v.size()); ++i) {
      all.push_back({a.v_cache, offset(a.v_cache, slot, i / a.v.shape[2], index, i % a.v.shape[2]),
                     v[static_cast<std::size_t>(i)], 0.0});
    }
  }
  return all;
}

inline std::int64_t first_key(const AttentionArgs& a, std::int64_t r) {
  std::int64_t first = a.first.present() ? row_value(a.first, r) : 0;
  if (a.window > 0) first = std::max(first, row_value(a.lengths, r) + 1 - a.window);
  return first;
}

inline std::vector<Expected> expected(const AttentionArgs& a) {
  std::vector<Expected> all;
  const DType dtype = a.q.dtype;
  const std::int64_t group = a.q.shape[1] / a.k_cache.shape[1];
  const std::int64_t v_dim = a.v_cache.shape[3];
  for (std::int64_t r = 0; r < a.q.shape[0]; ++r) {
    const std::int64_t slot = slot_of(a.slots, r);
    const std::int64_t first = first_key(a, r), last = row_value(a.lengths, r);
    for (std::int64_t head = 0; head < a.q.shape[1]; ++head) {
      const std::int64_t h = head / group;
      Row weight;
      double max = -std::numeric_limits<double>::infinity();
      for (std::int64_t t = first; t <= last; ++t) {
        double score = 0.0;
        for (std::int64_t d = 0; d < a.q.shape[2]; ++d) {
          score += at(a.q, r, head, d) * at(a.k_cache, slot, h, t % a.k_cache.shape[2], d);
        }
        score *= static_cast<double>(a.scale);
        const double cap = static_cast<double>(a.softcap);
        if (cap != 0.0) score = cap * std::tanh(score / cap);
        weight.push_back(score);
        max = std::max(max, score);
      }
      double sum = 0.0;
      for (double& w : weight) sum += w = std::exp(w - max);
      for (std::int64_t d = 0; d < v_dim; ++d) {
        double y = 0.0, size = 0.0;
        for (std::int64_t t = first; t <= last; ++t) {
          const double term = weight[static_cast<std::size_t>(t - first)] / sum *
                              at(a.v_cache, slot, h, t % a.v_cache.shape[2], d);
          y += term;
          size += std::abs(term);
        }
        y = rounded(dtype, y);
        if (a.gate.present()) {
          double g = at(a.gate, r, h, head % group, d);
          if (a.gate_bias.present()) g = rounded(dtype, g + at(a.gate_bias, head));
          y = rounded(dtype, y * rounded(dtype, 1.0 / (1.0 + std::exp(-g))));
        }
        all.push_back({a.out, offset(a.out, r, head * v_dim + d), y, size});
      }
    }
  }
  return all;
}

}  // namespace segki::test::reference
