// Cases of the one-token step of a GatedDeltaNet block, and its reference in double precision with
// the rounding points of ops.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "op_cases_rows.h"
#include "reference.h"

namespace segki::test {

namespace reference {

// An element of a view.
struct Place {
  TensorView view;
  std::int64_t offset;

  double value() const { return get(view, offset); }
};

// The new input of a channel of the convolution.
inline Place channel_input(const GatedDeltaArgs& a, std::int64_t r, std::int64_t channel) {
  const std::int64_t key_dim = a.q.shape[2], keys = a.q.shape[1] * key_dim;
  if (channel < 2 * keys) {
    const TensorView& view = channel < keys ? a.q : a.k;
    const std::int64_t i = channel % keys;
    return {view, offset(view, r, i / key_dim, i % key_dim)};
  }
  const std::int64_t i = channel - 2 * keys, value_dim = a.v.shape[3], group = a.v.shape[2];
  return {a.v, offset(a.v, r, i / (group * value_dim), i / value_dim % group, i % value_dim)};
}

inline double activated(Activation activation, double x) {
  return segki::testing::activation_value(activation, x);
}

// A value and the size of the numbers that it came from.
struct Sized {
  double value = 0.0;
  double magnitude = 0.0;

  void add(double term) {
    value += term;
    magnitude += std::abs(term);
  }
};

// The convolution of a channel before its first rounding.
inline Sized convolved(const GatedDeltaArgs& a, std::int64_t r, std::int64_t channel) {
  const std::int64_t width = a.conv_weight.shape[1];
  Sized sum;
  for (std::int64_t j = 0; j < width; ++j) {
    const double x = j + 1 < width ? at(a.conv_state, slot_of(a.slots, r), channel, j + 1)
                                   : channel_input(a, r, channel).value();
    sum.add(at(a.conv_weight, channel, j) * x);
  }
  if (a.conv_bias.present()) sum.add(at(a.conv_bias, channel));
  return sum;
}

inline double softplus(double x) { return x > 40.0 ? x : std::log1p(std::exp(x)); }

inline bool doubtful_channel(const GatedDeltaArgs& a, std::int64_t r, std::int64_t channel) {
  const DType dtype = a.q.dtype;
  const Sized sum = convolved(a, r, channel);
  if (doubtful(dtype, sum.value, sum.magnitude)) return true;
  const double x = rounded(dtype, sum.value);
  const double y = activated(a.conv_activation, x);
  switch (a.conv_activation) {
    case Activation::kNone:
    case Activation::kRelu:
      return false;
    case Activation::kGeluTanh:
    case Activation::kGeluErf:
      return doubtful(dtype, y, std::abs(x));
    default:
      return doubtful(dtype, y, std::abs(y));
  }
}
inline bool doubtful_beta(const GatedDeltaArgs& a, double b) {
  const DType dtype = a.q.dtype;
  const double beta = sigmoid(b);
  const double scaled = rounded(dtype, beta) * static_cast<double>(a.beta_scale);
  return doubtful(dtype, beta, beta) || (a.beta_scale != 1.0F && doubtful(dtype, scaled, scaled));
}

// `size` is that of the numbers y came from: fp32 keeps their error, rounding to dtype hides it.
struct Channels {
  Row y;
  Row size;
};

inline Channels channels_of(const GatedDeltaArgs& a, std::int64_t r) {
  const DType dtype = a.q.dtype;
  Channels all;
  for (std::int64_t c = 0; c < a.conv_weight.shape[0]; ++c) {
    const Sized sum = convolved(a, r, c);
    const double x = rounded(dtype, sum.value);
    all.y.push_back(rounded(dtype, activated(a.conv_activation, x)));
    const double slope = a.conv_activation == Activation::kRelu2 ? 2.0 * std::abs(x) : 1.2;
    all.size.push_back(dtype == DType::kF32 ? std::abs(all.y.back()) + slope * sum.magnitude
                                            : std::abs(all.y.back()));
  }
  return all;
}

// A head's channels over their L2 norm, times `scale`.
inline Channels l2_normalised(const Channels& all, std::int64_t begin, std::int64_t count,
                              double eps, double scale) {
  const auto first = static_cast<std::size_t>(begin);
  double square = eps;
  for (std::size_t i = first; i < first + static_cast<std::size_t>(count); ++i) {
    square += all.y[i] * all.y[i];
  }
  Channels head;
  for (std::size_t i = first; i < first + static_cast<std::size_t>(count); ++i) {
    head.y.push_back(all.y[i] / std::sqrt(square) * scale);
    head.size.push_back(all.size[i] / std::sqrt(square) * scale);
  }
  return head;
}

// Value head `head` of row r: what it writes to its state and to out.
inline void expect_head(std::vector<Expected>& all, const GatedDeltaArgs& a, std::int64_t r,
                        std::int64_t head, const Channels& channels) {
  const DType dtype = a.q.dtype;
  const std::int64_t key_dim = a.q.shape[2], keys = a.q.shape[1] * key_dim;
  const std::int64_t group = a.v.shape[2], value_dim = a.v.shape[3];
  const std::int64_t h = head / group, g = head % group, slot = slot_of(a.slots, r);
  const double eps = static_cast<double>(a.l2_eps);
  const Channels q =
      l2_normalised(channels, h * key_dim, key_dim, eps, static_cast<double>(a.query_scale));
  const Channels k = l2_normalised(channels, keys + h * key_dim, key_dim, eps, 1.0);
  double beta = rounded(dtype, sigmoid(at(a.b, r, h, g)));
  beta = rounded(dtype, beta * static_cast<double>(a.beta_scale));
  const double log_decay =
      -std::exp(at(a.a_log, head)) * softplus(at(a.a, r, h, g) + at(a.dt_bias, head));
  const double decay = std::exp(log_decay);
  const double decay_size = decay * (1.0 - 0.1 * log_decay);

  Row o, out_size, step;  // step: how far fp32's error may move o's rounding
  double flips = 0.0;     // what doubtful roundings of o may add to sum(o^2)
  for (std::int64_t c = 0; c < value_dim; ++c) {
    const auto channel = static_cast<std::size_t>(2 * keys + head * value_dim + c);
    double seen = 0.0, seen_size = 0.0;
    for (std::int64_t i = 0; i < key_dim; ++i) {
      const double s = at(a.state, slot, head, i, c);
      seen += decay * s * k.y[static_cast<std::size_t>(i)];
      seen_size += decay_size * std::abs(s) * k.size[static_cast<std::size_t>(i)];
    }
    const double delta = beta * (channels.y[channel] - seen);
    const double delta_size = beta * (channels.size[channel] + seen_size);
    double sum = 0.0, sum_size = 0.0;
    for (std::int64_t i = 0; i < key_dim; ++i) {
      const auto at_i = static_cast<std::size_t>(i);
      const std::int64_t place = offset(a.state, slot, head, i, c);
      const double s = get(a.state, place);
      const double now = decay * s + k.y[at_i] * delta;
      const double now_size = decay_size * std::abs(s) + k.size[at_i] * delta_size;
      all.push_back({a.state, place, now, now_size + 1e-30});  // fp32 underflows
      sum += now * q.y[at_i];
      sum_size += now_size * q.size[at_i];
    }
    o.push_back(rounded(dtype, sum));
    const double slack = dtype == DType::kF32 ? 0.0 : 0x1p-22 * sum_size;
    step.push_back(rounded(dtype, sum + slack) - rounded(dtype, sum - slack));
    flips += 2.0 * std::abs(o.back()) * step.back();
    out_size.push_back(sum_size);
  }

  double square = 0.0;
  for (const double x : o) square += x * x / static_cast<double>(value_dim);
  const double scale = 1.0 / std::sqrt(square + static_cast<double>(a.norm.eps));
  // Relative error of n, in units of what doubtful() takes for fp32's.
  const double scale_error = 1.0 + 0x1p20 * flips * scale * scale / static_cast<double>(value_dim);
  const bool before = a.norm.round_before_weight != 0;
  for (std::int64_t c = 0; c < value_dim; ++c) {
    double s = at(a.norm_weight, c) + static_cast<double>(a.norm.weight_offset);
    if (before) s = rounded(dtype, s);
    const double n = o[static_cast<std::size_t>(c)] * scale;
    const double m = before ? rounded(dtype, s * rounded(dtype, n)) : s * n;
    const double gate = activated(a.gate_activation, at(a.z, r, h, g, c));
    const double value = rounded(dtype, m * gate);
    // fp32 errs by the size of what was summed and, where 1 + tanh or 1 + erf cancel, by that of z;
    // rounding errs by the value.
    const bool cancels =
        a.gate_activation == Activation::kGeluTanh || a.gate_activation == Activation::kGeluErf;
    const double gate_size =
        std::max(std::abs(gate), cancels ? 0.1 * std::abs(at(a.z, r, h, g, c)) : 0.0);
    const double summed = std::abs(s) * gate_size * out_size[static_cast<std::size_t>(c)] * scale;
    const double n_error = std::abs(n) * scale_error;
    const bool in_doubt =
        step[static_cast<std::size_t>(c)] > 0.0 || (before && doubtful(dtype, n, n_error)) ||
        doubtful(dtype, m * gate, std::abs(m) * (before ? gate_size : gate_size * scale_error));
    // The last steps of f16 are those of its smallest normal number: of n's and of the result's.
    const double factor = std::abs(s) * gate_size;
    const double floor = dtype == DType::kF16 ? 0x1p-14 * (1.0 + factor) : 1e-30;
    const double size =
        std::max({2.0 * std::abs(value), dtype == DType::kF32 ? summed : 1e-3 * summed, floor});
    // A step of an o that nearly cancelled is many of the result's.
    const double moved = step[static_cast<std::size_t>(c)] * scale * factor;
    const double error = dtype == DType::kF32 ? 0.0 : moved + 0x1p-9 * size;
    all.push_back({a.out, offset(a.out, r, head * value_dim + c), value, size, in_doubt,
                   step[static_cast<std::size_t>(c)] > 0.0 ? error : 0.0});
  }
}

inline std::vector<Expected> expected(const GatedDeltaArgs& a) {
  std::vector<Expected> all;
  const std::int64_t width = a.conv_weight.shape[1];
  for (std::int64_t r = 0; r < a.q.shape[0]; ++r) {
    if (a.frozen.present() && row_value(a.frozen, r) != 0) {
      expect_row(all, a.out, r, Row(static_cast<std::size_t>(a.out.shape[1]), 0.0));
      continue;
    }
    for (std::int64_t c = 0; c < a.conv_weight.shape[0]; ++c) {
      const std::int64_t slot = slot_of(a.slots, r);
      for (std::int64_t j = 0; j < width; ++j) {
        const double input =
            j + 1 < width ? at(a.conv_state, slot, c, j + 1) : channel_input(a, r, c).value();
        all.push_back({a.conv_state, offset(a.conv_state, slot, c, j), input, 0.0});
      }
    }
    const Channels channels = channels_of(a, r);
    for (std::int64_t head = 0; head < a.state.shape[1]; ++head) {
      expect_head(all, a, r, head, channels);
    }
  }
  return all;
}

}  // namespace reference

struct GatedDeltaCase {
  std::int64_t rows, key_heads, group, key_dim, value_dim, width;
  bool before = true;  // round_before_weight
  float offset = 0.0F;
  bool bias = false, slots = false, frozen = false;
  bool f32_numbers = false;  // a_log and dt_bias
  float beta_scale = 1.0F;
  Activation conv_activation = Activation::kSilu;
  Activation gate_activation = Activation::kSilu;
};

// Enough results a case that one head whose output nearly cancels, and so rounds as fp32 has it,
// does not decide the share of differing roundings.
inline std::vector<GatedDeltaCase> gated_delta_cases() {
  std::vector<GatedDeltaCase> cases = {
      {1, 2, 2, 128, 128, 4},
      {8, 2, 1, 64, 64, 4, true, 0.0F, false, true},
      {5, 3, 2, 20, 36, 4, true, 0.0F, true, true, true, true},
      {16, 1, 3, 7, 17, 2, false, 0.0F, false, false, true},
      {2, 2, 2, 33, 130, 8, false, 1.0F, true, false, false, true},
      {64, 1, 2, 16, 8, 3, true, 1.0F},
      {6, 2, 2, 24, 40, 5, true, 0.0F, false, true, false, false, 2.0F},
      {12, 2, 1, 9, 49, 7, false, 0.0F, true, false, false, false, 1.7F},
      {2, 1, 1, 1, 1, 4},
      {1, 1, 4, 48, 257, 6, true, 0.0F, false, false, false, true},
      {16, 1, 1, 256, 32, 4},
  };
  for (const Activation activation : segki::testing::activations()) {
    cases.push_back({.rows = 16,
                     .key_heads = 1,
                     .group = 2,
                     .key_dim = 20,
                     .value_dim = 24,
                     .width = 4,
                     .conv_activation = activation,
                     .gate_activation = activation});
  }
  return cases;
}

// Redraws inputs next to a boundary of the roundings in front of the recurrence, where the bits of
// fp32 decide: such an element moves a whole head.
inline void settle(GatedDeltaArgs& a, Rng& rng) {
  for (std::int64_t r = 0; r < a.q.shape[0]; ++r) {
    for (std::int64_t c = 0; c < a.conv_weight.shape[0]; ++c) {
      const reference::Place input = reference::channel_input(a, r, c);
      while (reference::doubtful_channel(a, r, c)) {
        reference::set(input.view, input.offset, normal(rng));
        for (std::int64_t j = 1; j < a.conv_weight.shape[1]; ++j) {
          const std::int64_t slot = reference::slot_of(a.slots, r);
          reference::set(a.conv_state, reference::offset(a.conv_state, slot, c, j), normal(rng));
        }
      }
    }
  }
  reference::for_each(a.b, [&](std::int64_t at) {
    while (reference::doubtful_beta(a, reference::get(a.b, at))) {
      reference::set(a.b, at, 2.0 * normal(rng));
    }
  });
}

inline std::unique_ptr<Problem<GatedDeltaArgs>> make_problem(const GatedDeltaCase& c, DType dtype,
                                                             Rng& rng) {
  auto p = std::make_unique<Problem<GatedDeltaArgs>>();
  p->name = "gated_delta rows " + std::to_string(c.rows) + " heads " + std::to_string(c.key_heads) +
            "x" + std::to_string(c.group) + " state " + std::to_string(c.key_dim) + "x" +
            std::to_string(c.value_dim) + " width " + std::to_string(c.width) + " activations " +
            std::to_string(static_cast<int>(c.conv_activation)) + " " +
            std::to_string(static_cast<int>(c.gate_activation));
  p->rows = c.rows;
  GatedDeltaArgs& a = p->args;
  const auto random = [&] { return normal(rng); };
  const std::int64_t heads = c.key_heads * c.group;
  const std::int64_t channels = 2 * c.key_heads * c.key_dim + heads * c.value_dim;
  // Heads of one projection lie apart, as when several roles share it.
  const auto keys = [&](std::int64_t gap) {
    const std::int64_t stride = c.key_dim + gap;
    return p
        ->tensor(dtype, Shape{c.rows, c.key_heads, c.key_dim},
                 Shape{c.key_heads * stride + 3, stride, 1})
        .fill(random)
        .view();
  };
  const auto values = [&](std::int64_t gap, double size) {
    const std::int64_t stride = c.group * c.value_dim + gap;
    return p
        ->tensor(dtype, Shape{c.rows, c.key_heads, c.group, c.value_dim},
                 Shape{c.key_heads * stride + 1, stride, c.value_dim, 1})
        .fill([&, size] { return size * normal(rng); })
        .view();
  };
  const auto numbers = [&](double size) {
    const std::int64_t stride = 2 * c.group + 1;
    return p
        ->tensor(dtype, Shape{c.rows, c.key_heads, c.group},
                 Shape{c.key_heads * stride + 2, stride, 1})
        .fill([&, size] { return size * normal(rng); })
        .view();
  };
  a.q = keys(5);
  a.k = keys(0);
  a.v = values(3, 1.0);
  // Far into the tail of a gelu fp32 has few digits.
  a.z = values(0, c.gate_activation == Activation::kSilu ? 3.0 : 1.0);
  // Decays from none to all: softplus on either side of its switch, and far away from it.
  a.a = numbers(4.0);
  reference::for_each(a.a, [&](std::int64_t at) {
    const double rare[] = {-120.0, -30.0, 19.5, 20.5, 90.0};
    if (uniform(rng, 0, 9) == 0) reference::set(a.a, at, rare[uniform(rng, 0, 4)]);
  });
  a.b = numbers(2.0);
  a.conv_weight = p->tensor(dtype, Shape{channels, c.width}).fill(random).view();
  if (c.bias) a.conv_bias = p->tensor(dtype, Shape{channels}).fill(random).view();
  const DType number = c.f32_numbers ? DType::kF32 : dtype;
  a.a_log = p->tensor(number, Shape{heads}).fill([&] { return normal(rng) - 1.0; }).view();
  a.dt_bias = p->tensor(number, Shape{heads}).fill(random).view();
  a.norm_weight =
      p->tensor(dtype, Shape{c.value_dim}).fill([&] { return 1.0 + 0.5 * normal(rng); }).view();
  const std::int64_t slots = c.rows + (c.slots ? 2 : 0);
  if (c.slots) {
    std::int64_t slot = c.rows + 1;
    a.slots = p->tensor(DType::kI32, Shape{c.rows})
                  .fill([&] { return static_cast<double>(slot--); })
                  .view();
  }
  if (c.frozen) {
    std::int64_t r = 0;
    a.frozen =
        p->tensor(DType::kI32, Shape{c.rows}).fill([&] { return r++ % 3 == 1 ? 1.0 : 0.0; }).view();
  }
  // Slots that no row names stay NaN, and so does the oldest input of each window: it is not used.
  a.conv_state = p->tensor(dtype, Shape{slots, channels, c.width}).view();
  a.state = p->tensor(DType::kF32, Shape{slots, heads, c.key_dim, c.value_dim}).view();
  for (std::int64_t r = 0; r < c.rows; ++r) {
    const std::int64_t slot = reference::slot_of(a.slots, r);
    for (std::int64_t i = 0; i < channels; ++i) {
      for (std::int64_t j = 1; j < c.width; ++j) {
        reference::set(a.conv_state, reference::offset(a.conv_state, slot, i, j), normal(rng));
      }
    }
    const std::int64_t begin = reference::offset(a.state, slot);
    for (std::int64_t i = 0; i < a.state.stride[0]; ++i) {
      reference::set(a.state, begin + i, normal(rng));
    }
  }
  a.out = p->tensor(dtype, Shape{c.rows, heads * c.value_dim}, 3).view();
  a.norm = {.kind = NormKind::kRms,
            .eps = 1e-6F,
            .weight_offset = c.offset,
            .round_before_weight = c.before ? 1 : 0};
  a.query_scale = 1.0F / std::sqrt(static_cast<float>(c.key_dim));
  a.beta_scale = c.beta_scale;
  a.conv_activation = c.conv_activation;
  a.gate_activation = c.gate_activation;
  settle(a, rng);
  p->row_views = {&GatedDeltaArgs::q,     &GatedDeltaArgs::k,      &GatedDeltaArgs::v,
                  &GatedDeltaArgs::z,     &GatedDeltaArgs::a,      &GatedDeltaArgs::b,
                  &GatedDeltaArgs::slots, &GatedDeltaArgs::frozen, &GatedDeltaArgs::out};
  if (!c.slots) {
    p->row_views.push_back(&GatedDeltaArgs::conv_state);
    p->row_views.push_back(&GatedDeltaArgs::state);
  }
  return p;
}

}  // namespace segki::test
