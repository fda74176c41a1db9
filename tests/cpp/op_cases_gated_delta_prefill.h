// Cases of the prefill of a GatedDeltaNet block, and its reference: the recurrence token by token
// in double precision with the rounding points of ops.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "op_cases_gated_delta.h"

namespace segki::test {

namespace reference {

// The step's arguments with one row a token, for what both share.
inline GatedDeltaArgs as_rows(const GatedDeltaPrefillArgs& a) {
  GatedDeltaArgs rows;
  rows.q = a.q;
  rows.k = a.k;
  rows.v = a.v;
  rows.b = a.b;
  rows.beta_scale = a.beta_scale;
  return rows;
}

// The input of a channel at a token, which may lie before the sequence.
inline double input_at(const GatedDeltaPrefillArgs& a, std::int64_t s, std::int64_t token,
                       std::int64_t channel) {
  const std::int64_t before = row_value(a.begins, s) - token;
  if (before <= 0) return channel_input(as_rows(a), token, channel).value();
  const std::int64_t width = a.conv_weight.shape[1];
  if (a.continued == 0 || !a.conv_state.present() || before > width) return 0.0;
  return at(a.conv_state, s, channel, width - before);
}

// The convolution of a channel before its first rounding.
inline Sized convolved(const GatedDeltaPrefillArgs& a, std::int64_t s, std::int64_t token,
                       std::int64_t channel) {
  const std::int64_t width = a.conv_weight.shape[1];
  Sized sum;
  for (std::int64_t j = 0; j < width; ++j) {
    sum.add(at(a.conv_weight, channel, j) * input_at(a, s, token - width + 1 + j, channel));
  }
  if (a.conv_bias.present()) sum.add(at(a.conv_bias, channel));
  return sum;
}

// As doubtful(), where the step to the other neighbour is large enough to be seen further on: the
// fp32 state is compared to a few millionths of its columns.
inline bool matters(DType dtype, double value, double size) {
  const double step = std::abs(value) * (dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10);
  return step > 1e-6 && doubtful(dtype, value, size);
}

inline bool doubtful_channel(const GatedDeltaPrefillArgs& a, std::int64_t s, std::int64_t token,
                             std::int64_t channel) {
  const DType dtype = a.q.dtype;
  if (dtype == DType::kF32) return false;
  const Sized sum = convolved(a, s, token, channel);
  if (matters(dtype, sum.value, sum.magnitude)) return true;
  const double x = rounded(dtype, sum.value);
  const double y = activated(a.conv_activation, x);
  if (a.conv_activation == Activation::kSilu) return matters(dtype, y, std::abs(y));
  return a.conv_activation != Activation::kNone && a.conv_activation != Activation::kRelu &&
         matters(dtype, y, std::abs(x));
}

// All channels of a token after the convolution.
inline Row convolved_token(const GatedDeltaPrefillArgs& a, std::int64_t s, std::int64_t token) {
  Row y;
  for (std::int64_t c = 0; c < a.conv_weight.shape[0]; ++c) {
    const double x = rounded(a.q.dtype, convolved(a, s, token, c).value);
    y.push_back(rounded(a.q.dtype, activated(a.conv_activation, x)));
  }
  return y;
}

// y[begin, begin + count) over its L2 norm, times `scale`.
inline Row normalised(const Row& y, std::size_t begin, std::size_t count, double eps,
                      double scale) {
  double square = eps;
  for (std::size_t i = 0; i < count; ++i) square += y[begin + i] * y[begin + i];
  Row out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = y[begin + i] / std::sqrt(square) * scale;
  return out;
}

// out of one value head at a token; `o` is rounded, `error` the size that fp32's errors in it have.
inline void expect_out(std::vector<Expected>& all, const GatedDeltaPrefillArgs& a,
                       std::int64_t token, std::int64_t head, const Row& o, double error) {
  const DType dtype = a.q.dtype;
  const std::int64_t group = a.v.shape[2], value_dim = a.v.shape[3];
  double square = 0.0;
  for (const double x : o) square += x * x / static_cast<double>(value_dim);
  const double scale = 1.0 / std::sqrt(square + static_cast<double>(a.norm.eps));
  const bool before = a.norm.round_before_weight != 0;
  for (std::int64_t c = 0; c < value_dim; ++c) {
    double s = at(a.norm_weight, c) + static_cast<double>(a.norm.weight_offset);
    if (before) s = rounded(dtype, s);
    const double n = o[static_cast<std::size_t>(c)] * scale;
    const double m = before ? rounded(dtype, s * rounded(dtype, n)) : s * n;
    const double z = at(a.z, token, head / group, head % group, c);
    const double gate = activated(a.gate_activation, z);
    const double value = rounded(dtype, m * gate);
    // Where 1 + tanh or 1 + erf cancel, fp32 errs by the size of z.
    const double gate_size = std::max(std::abs(gate), 0.1 * std::abs(z));
    const double summed = std::abs(s) * gate_size * error * scale;
    // fp32 errs by the size of what was summed; rounding by the value, or by f16's least step: of
    // o, which the norm may make a large one, of n, and of the result.
    const double steps = 1.0 + std::abs(s) * gate_size * (1.0 + scale);
    const double least = dtype == DType::kF16 ? 0x1p-14 * steps : 0.0;
    const double rounding = std::max(2.0 * std::abs(value), least);
    all.push_back({a.out, offset(a.out, token, head * value_dim + c), value,
                   std::max(rounding, dtype == DType::kF32 ? summed : 1e-3 * summed)});
  }
}

// One value head over a sequence; y[i] are all channels of its token i.
inline void expect_sequence(std::vector<Expected>& all, const GatedDeltaPrefillArgs& a,
                            std::int64_t s, std::int64_t head, const std::vector<Row>& y) {
  const DType dtype = a.q.dtype;
  const std::int64_t key_dim = a.q.shape[2], keys = a.q.shape[1] * key_dim;
  const std::int64_t group = a.v.shape[2], value_dim = a.v.shape[3];
  const std::int64_t h = head / group, g = head % group, begin = row_value(a.begins, s);
  const auto rows = static_cast<std::size_t>(key_dim);
  const auto columns = static_cast<std::size_t>(value_dim);
  const double eps = static_cast<double>(a.l2_eps);

  Row state(rows * columns, 0.0);
  const bool given = a.continued != 0 && a.state.present();
  for (std::size_t i = 0; given && i < state.size(); ++i) {
    state[i] = get(a.state, offset(a.state, s, head) + static_cast<std::int64_t>(i));
  }
  double largest = 0.0;  // column of the state so far, and of what was added to it
  for (std::size_t t = 0; t < y.size(); ++t) {
    const std::int64_t token = begin + static_cast<std::int64_t>(t);
    const Row q = normalised(y[t], static_cast<std::size_t>(h * key_dim), rows, eps,
                             static_cast<double>(a.query_scale));
    const Row k = normalised(y[t], static_cast<std::size_t>(keys + h * key_dim), rows, eps, 1.0);
    double beta = rounded(dtype, sigmoid(at(a.b, token, h, g)));
    beta = rounded(dtype, beta * static_cast<double>(a.beta_scale));
    const double decay = std::exp(-std::exp(at(a.a_log, head)) *
                                  softplus(at(a.a, token, h, g) + at(a.dt_bias, head)));
    Row o(columns, 0.0);
    for (std::size_t c = 0; c < columns; ++c) {
      double seen = 0.0, decayed = 0.0;
      for (std::size_t i = 0; i < rows; ++i) {
        double& now = state[i * columns + c];
        now *= decay;
        seen += now * k[i];
        decayed += now * now;
      }
      const double v = y[t][static_cast<std::size_t>(2 * keys + head * value_dim) + c];
      double column = 0.0;
      for (std::size_t i = 0; i < rows; ++i) {
        double& now = state[i * columns + c];
        now += k[i] * beta * (v - seen);
        o[c] += now * q[i];
        column += now * now;
      }
      largest = std::max(largest, std::sqrt(std::max(column, decayed)));
    }
    for (double& x : o) x = rounded(dtype, x);
    expect_out(all, a, token, head, o, largest * std::abs(static_cast<double>(a.query_scale)));
  }
  for (std::size_t i = 0; a.state.present() && i < state.size(); ++i) {
    all.push_back({a.state, offset(a.state, s, head) + static_cast<std::int64_t>(i), state[i],
                   std::max(largest, std::abs(state[i]))});
  }
}

inline std::vector<Expected> expected(const GatedDeltaPrefillArgs& a) {
  std::vector<Expected> all;
  std::vector<bool> inside(static_cast<std::size_t>(a.q.shape[0]), false);
  for (std::int64_t s = 0; s < a.begins.shape[0]; ++s) {
    std::vector<Row> y;
    for (std::int64_t t = row_value(a.begins, s); t < row_value(a.ends, s); ++t) {
      inside[static_cast<std::size_t>(t)] = true;
      y.push_back(convolved_token(a, s, t));
    }
    for (std::int64_t head = 0; head < a.a_log.shape[0]; ++head)
      expect_sequence(all, a, s, head, y);
    if (!a.conv_state.present()) continue;
    const std::int64_t width = a.conv_weight.shape[1];
    for (std::int64_t c = 0; c < a.conv_weight.shape[0]; ++c) {
      for (std::int64_t j = 0; j < width; ++j) {
        all.push_back({a.conv_state, offset(a.conv_state, s, c, j),
                       input_at(a, s, row_value(a.ends, s) - width + j, c), 0.0});
      }
    }
  }
  for (std::size_t t = 0; t < inside.size(); ++t) {
    if (inside[t]) continue;
    expect_row(all, a.out, static_cast<std::int64_t>(t),
               Row(static_cast<std::size_t>(a.out.shape[1]), 0.0));
  }
  return all;
}

}  // namespace reference

struct Span {
  std::int32_t begin, end;
};

struct GatedDeltaPrefillCase {
  std::int64_t tokens;
  std::vector<Span> sequences;
  std::int64_t key_heads, group, key_dim, value_dim, width;
  bool continued = false;
  bool state = true, conv_state = true;  // given
  bool before = true;                    // round_before_weight
  float offset = 0.0F;
  bool bias = false;
  bool f32_numbers = false;  // a_log and dt_bias
  float beta_scale = 1.0F;
  Activation conv_activation = Activation::kSilu;
  Activation gate_activation = Activation::kSilu;
};

inline std::vector<GatedDeltaPrefillCase> gated_delta_prefill_cases() {
  std::vector<GatedDeltaPrefillCase> cases = {
      {150, {{0, 150}}, 1, 2, 128, 128, 4},
      {64, {{0, 64}}, 2, 1, 64, 64, 4, true},
      {65, {{0, 65}}, 2, 2, 16, 32, 4, false, false, false},
      {1, {{0, 1}}, 2, 2, 24, 24, 4},
      {1, {{0, 1}}, 1, 2, 20, 36, 4, true},
      {3, {{1, 3}}, 1, 1, 1, 1, 4, true},
      // A left-padded batch of three rows, and packed sequences, some shorter than the window.
      {120, {{7, 40}, {40, 80}, {115, 120}}, 2, 2, 20, 36, 4, false, true, true, true, 0.0F, true},
      {201, {{70, 71}, {0, 70}, {71, 73}, {80, 200}}, 3, 1, 33, 17, 8, true},
      {90, {{0, 67}, {67, 67}, {67, 90}}, 1, 3, 7, 50, 2, true, true, true, false, 0.0F, true},
      {40, {{5, 30}}, 1, 2, 12, 65, 5, true, false, true, true, 1.0F},
      {70, {{0, 69}}, 2, 1, 9, 49, 7, true, true, false, false, 1.0F, true, true, 2.0F},
      {68, {{0, 68}}, 1, 1, 40, 130, 3, false, true, true, true, 0.0F, false, true, 1.7F},
  };
  for (const Activation activation : segki::testing::activations()) {
    GatedDeltaPrefillCase c = {12, {{0, 5}, {5, 12}}, 1, 2, 20, 24, 4, true};
    c.conv_activation = c.gate_activation = activation;
    cases.push_back(c);
  }
  return cases;
}

// As settle() of the step: no input next to a boundary of the roundings before the recurrence.
inline void settle(GatedDeltaPrefillArgs& a, Rng& rng) {
  const GatedDeltaArgs rows = reference::as_rows(a);
  for (std::int64_t s = 0; s < a.begins.shape[0]; ++s) {
    for (std::int64_t t = reference::row_value(a.begins, s); t < reference::row_value(a.ends, s);
         ++t) {
      for (std::int64_t c = 0; c < a.conv_weight.shape[0]; ++c) {
        const reference::Place input = reference::channel_input(rows, t, c);
        // A small newest tap needs a large input to change anything.
        double spread = 1.0;
        while (reference::doubtful_channel(a, s, t, c)) {
          const double x = reference::rounded(a.q.dtype, spread * normal(rng));
          reference::set(input.view, input.offset, x);
          spread *= 1.2;
        }
      }
    }
  }
  reference::for_each(a.b, [&](std::int64_t at) {
    while (reference::doubtful_beta(rows, reference::get(a.b, at))) {
      reference::set(a.b, at, 2.0 * normal(rng));
    }
  });
}

inline std::unique_ptr<Problem<GatedDeltaPrefillArgs>> make_problem(const GatedDeltaPrefillCase& c,
                                                                    DType dtype, Rng& rng) {
  auto p = std::make_unique<Problem<GatedDeltaPrefillArgs>>();
  p->name = "gated_delta_prefill tokens " + std::to_string(c.tokens) + " sequences " +
            std::to_string(c.sequences.size()) + " heads " + std::to_string(c.key_heads) + "x" +
            std::to_string(c.group) + " state " + std::to_string(c.key_dim) + "x" +
            std::to_string(c.value_dim) + " width " + std::to_string(c.width) + " activation " +
            std::to_string(static_cast<int>(c.conv_activation));
  GatedDeltaPrefillArgs& a = p->args;
  const auto random = [&] { return normal(rng); };
  const std::int64_t heads = c.key_heads * c.group;
  const std::int64_t channels = 2 * c.key_heads * c.key_dim + heads * c.value_dim;
  // Heads of one projection lie apart, as when several roles share it.
  const auto keys = [&](std::int64_t gap) {
    const std::int64_t stride = c.key_dim + gap;
    return p
        ->tensor(dtype, Shape{c.tokens, c.key_heads, c.key_dim},
                 Shape{c.key_heads * stride + 3, stride, 1})
        .fill(random)
        .view();
  };
  const auto values = [&](std::int64_t gap, double size) {
    const std::int64_t stride = c.group * c.value_dim + gap;
    return p
        ->tensor(dtype, Shape{c.tokens, c.key_heads, c.group, c.value_dim},
                 Shape{c.key_heads * stride + 1, stride, c.value_dim, 1})
        .fill([&, size] { return size * normal(rng); })
        .view();
  };
  const auto numbers = [&](double size) {
    const std::int64_t stride = 2 * c.group + 1;
    return p
        ->tensor(dtype, Shape{c.tokens, c.key_heads, c.group},
                 Shape{c.key_heads * stride + 2, stride, 1})
        .fill([&, size] { return size * normal(rng); })
        .view();
  };
  a.q = keys(5);
  a.k = keys(0);
  a.v = values(3, 1.0);
  a.z = values(0, 3.0);
  // Further down 1 + tanh and 1 + erf cancel to nothing but fp32's error.
  if (c.gate_activation != Activation::kSilu) {
    reference::for_each(a.z, [&](std::int64_t at) {
      reference::set(a.z, at, std::max(reference::get(a.z, at), -2.5));
    });
  }
  // Decays from none to all, many of them weak: a state must last longer than a chunk.
  a.a = numbers(4.0);
  reference::for_each(a.a, [&](std::int64_t at) {
    const double rare[] = {-120.0, 20.5, 90.0};
    reference::set(a.a, at, reference::rounded(dtype, reference::get(a.a, at) - 5.0));
    if (uniform(rng, 0, 19) == 0) reference::set(a.a, at, rare[uniform(rng, 0, 2)]);
  });
  a.b = numbers(2.0);
  a.conv_weight = p->tensor(dtype, Shape{channels, c.width}).fill(random).view();
  if (c.bias) a.conv_bias = p->tensor(dtype, Shape{channels}).fill(random).view();
  const DType number = c.f32_numbers ? DType::kF32 : dtype;
  a.a_log = p->tensor(number, Shape{heads}).fill([&] { return normal(rng) - 1.0; }).view();
  a.dt_bias = p->tensor(number, Shape{heads}).fill(random).view();
  a.norm_weight =
      p->tensor(dtype, Shape{c.value_dim}).fill([&] { return 1.0 + 0.5 * normal(rng); }).view();
  const auto count = static_cast<std::int64_t>(c.sequences.size());
  a.begins = p->tensor(DType::kI32, Shape{count}).view();
  a.ends = p->tensor(DType::kI32, Shape{count}).view();
  for (std::int64_t s = 0; s < count; ++s) {
    a.begins.as<std::int32_t>()[s] = c.sequences[static_cast<std::size_t>(s)].begin;
    a.ends.as<std::int32_t>()[s] = c.sequences[static_cast<std::size_t>(s)].end;
  }
  // A state that is only written starts as NaN.
  a.continued = c.continued ? 1 : 0;
  if (c.conv_state) {
    Tensor& inputs = p->tensor(dtype, Shape{count, channels, c.width});
    a.conv_state = (c.continued ? inputs.fill(random) : inputs).view();
  }
  if (c.state) {
    Tensor& state = p->tensor(DType::kF32, Shape{count, heads, c.key_dim, c.value_dim});
    a.state = (c.continued ? state.fill(random) : state).view();
  }
  a.out = p->tensor(dtype, Shape{c.tokens, heads * c.value_dim}, 3).view();
  a.norm = {.kind = NormKind::kRms,
            .eps = 1e-6F,
            .weight_offset = c.offset,
            .round_before_weight = c.before ? 1 : 0};
  a.query_scale = 1.0F / std::sqrt(static_cast<float>(c.key_dim));
  a.beta_scale = c.beta_scale;
  a.conv_activation = c.conv_activation;
  a.gate_activation = c.gate_activation;
  settle(a, rng);
  return p;
}

}  // namespace segki::test
