// Cases of the ops that work on rows (all but the matrix products), with fresh random inputs: for
// tests and benchmarks. A problem owns its tensors; everything that a case does not fill is NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "reference_rows.h"
#include "segki/ops.h"

namespace segki::test {

using Rng = std::mt19937_64;
using Shape = std::vector<std::int64_t>;

inline double normal(Rng& rng) { return std::normal_distribution<double>()(rng); }
inline std::int64_t uniform(Rng& rng, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

// Memory of exactly the elements that the strides reach, between guards.
class Tensor {
 public:
  static constexpr std::size_t kGuard = 64;

  // `gap`: elements between one row (first dimension) and the next.
  Tensor(DType dtype, const Shape& shape, std::int64_t gap = 0)
      : Tensor(dtype, shape, Shape(), gap) {}
  Tensor(DType dtype, const Shape& shape, const Shape& stride, std::int64_t gap = 0) {
    view_.dtype = dtype;
    view_.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t dense = 1;
    std::int64_t last = 0;
    for (std::size_t d = shape.size(); d-- > 0;) {
      view_.shape[d] = shape[d];
      view_.stride[d] = stride.empty() ? dense + (d == 0 && shape.size() > 1 ? gap : 0) : stride[d];
      dense *= shape[d];
      last += (shape[d] - 1) * view_.stride[d];
    }
    const std::size_t bytes = static_cast<std::size_t>(last + 1) * size_of(dtype);
    bytes_.assign(bytes + 2 * kGuard, std::byte{0xFF});
    view_.data = bytes_.data() + kGuard;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  const TensorView& view() const { return view_; }
  std::vector<std::byte>& bytes() { return bytes_; }

  Tensor& fill(const std::function<double()>& value) {
    reference::for_each(view_,
                        [&](std::int64_t offset) { reference::set(view_, offset, value()); });
    return *this;
  }

 private:
  TensorView view_;
  std::vector<std::byte> bytes_;
};

template <typename Args>
struct Problem {
  std::string name;
  std::deque<Tensor> tensors;
  Args args;
  std::int64_t rows = 0;
  std::vector<TensorView Args::*> row_views;  // their first dimension is the row

  template <typename... T>
  Tensor& tensor(T&&... arguments) {
    return tensors.emplace_back(std::forward<T>(arguments)...);
  }

  // The same problem for row r alone.
  Args one_row(std::int64_t r) const {
    Args one = args;
    for (TensorView Args::*member : row_views) take_row(one.*member, r);
    if constexpr (std::is_same_v<Args, SumNormArgs>) {
      for (int t = 0; t < one.count; ++t) take_row(one.terms[t], r);
    }
    return one;
  }

  std::vector<std::byte> bytes() {
    std::vector<std::byte> all;
    for (Tensor& t : tensors) all.insert(all.end(), t.bytes().begin(), t.bytes().end());
    return all;
  }
  void restore(const std::vector<std::byte>& all) {
    std::size_t at = 0;
    for (Tensor& t : tensors) {
      std::memcpy(t.bytes().data(), all.data() + at, t.bytes().size());
      at += t.bytes().size();
    }
  }

 private:
  static void take_row(TensorView& view, std::int64_t r) {
    if (!view.present()) return;
    view.data =
        view.as<char>() + r * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
    view.shape[0] = 1;
  }
};

// Scratch as a backend asks for it, of exactly that size.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes)
      : data_(bytes == 0 ? nullptr : ::operator new (bytes, std::align_val_t{64})) {
    if (data_ != nullptr) std::memset(data_, 0xFF, bytes);
  }
  ~Scratch() {
    if (data_ != nullptr) ::operator delete (data_, std::align_val_t{64});
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  void* data_;
};

// Calls the kernel once for each part, last part first: parts are independent.
template <typename Args>
std::int32_t run_kernel(const BackendTable& table, const Args& args, std::int32_t parts = 1) {
  const Scratch scratch(
      table.scratch_bytes == nullptr ? 0 : table.scratch_bytes(OpTraits<Args>::kId, &args));
  std::int32_t code = 0;
  for (std::int32_t part = parts; part-- > 0;) {
    const Exec exec = {nullptr, part, parts, scratch.data()};
    code = std::max(code, (table.*OpTraits<Args>::kSlot)(&args, &exec));
  }
  return code;
}

struct NormCase {
  std::int64_t rows, size;
  NormKind kind;
  bool before;  // round_before_weight
  bool weight, bias;
  float offset;
  std::int64_t gap;
  bool in_place;
};

inline std::vector<NormCase> norm_cases() {
  using enum NormKind;
  return {
      {1, 576, kRms, true, true, false, 0.0F, 0, false},
      {64, 576, kRms, false, true, false, 1.0F, 5, false},
      {3, 1, kRms, true, true, false, 0.0F, 0, false},
      {5, 17, kRms, false, false, false, 0.0F, 3, false},
      {2, 333, kRms, true, true, false, 1.0F, 0, true},
      {1, 2049, kLayer, false, true, true, 0.0F, 0, false},
      {7, 65, kLayer, false, true, false, 0.0F, 1, true},
      {4, 100, kLayer, false, false, false, 0.0F, 0, false},
      {4, 131, kLayer, true, true, true, 0.0F, 0, false},
      {2, 40, kNone, false, false, false, 0.0F, 2, false},
  };
}

inline void fill_norm(Rng& rng, const NormCase& c, NormSpec& spec) {
  spec.kind = c.kind;
  spec.eps = uniform(rng, 0, 1) != 0 ? 1e-5F : 1e-6F;
  spec.weight_offset = c.offset;
  spec.round_before_weight = c.before ? 1 : 0;
}

inline std::unique_ptr<Problem<NormArgs>> make_problem(const NormCase& c, DType dtype, Rng& rng) {
  auto p = std::make_unique<Problem<NormArgs>>();
  p->name = "norm " + std::to_string(c.rows) + "x" + std::to_string(c.size);
  p->rows = c.rows;
  NormArgs& a = p->args;
  // A mean well off zero, and rows of different size.
  double scale = 1.0;
  a.x = p->tensor(dtype, Shape{c.rows, c.size}, c.gap)
            .fill([&] { return scale * (0.7 + normal(rng)); })
            .view();
  if (c.weight) {
    a.weight = p->tensor(dtype, Shape{c.size}).fill([&] { return 1.0 + 0.5 * normal(rng); }).view();
  }
  if (c.bias) a.bias = p->tensor(dtype, Shape{c.size}).fill([&] { return normal(rng); }).view();
  a.out = c.in_place ? a.x : p->tensor(dtype, Shape{c.rows, c.size}, c.gap + 1).view();
  fill_norm(rng, c, a.norm);
  p->row_views = {&NormArgs::x, &NormArgs::out};
  return p;
}

struct SumNormCase {
  NormCase norm;
  int count;
  float scales[3];
  int sum_is_term;  // -1: its own buffer
};

inline std::vector<SumNormCase> sum_norm_cases() {
  using enum NormKind;
  return {
      {{1, 576, kRms, true, true, false, 0.0F, 0, false}, 2, {1, 1, 1}, 0},
      {{9, 577, kRms, false, true, false, 1.0F, 4, false}, 2, {1, 0.22F, 1}, 1},
      {{64, 33, kLayer, false, true, true, 0.0F, 0, false}, 3, {1, 1, 1}, 0},
      {{2, 300, kNone, false, false, false, 0.0F, 1, false}, 3, {0.5F, 1.5F, 0.3F}, -1},
      {{3, 70, kRms, true, true, false, 0.0F, 0, false}, 1, {0.3F, 1, 1}, -1},
      {{3, 70, kRms, true, true, false, 0.0F, 0, false}, 1, {1, 1, 1}, 0},
  };
}

inline std::unique_ptr<Problem<SumNormArgs>> make_problem(const SumNormCase& c, DType dtype,
                                                          Rng& rng) {
  auto p = std::make_unique<Problem<SumNormArgs>>();
  const NormCase& n = c.norm;
  p->name = "sum_norm " + std::to_string(c.count) + " terms " + std::to_string(n.rows) + "x" +
            std::to_string(n.size);
  p->rows = n.rows;
  SumNormArgs& a = p->args;
  a.count = c.count;
  for (int t = 0; t < c.count; ++t) {
    a.terms[t] =
        p->tensor(dtype, Shape{n.rows, n.size}, n.gap + t).fill([&] { return normal(rng); }).view();
    a.scales[t] = c.scales[t];
  }
  a.sum = c.sum_is_term >= 0 ? a.terms[c.sum_is_term]
                             : p->tensor(dtype, Shape{n.rows, n.size}, n.gap).view();
  if (n.weight) {
    a.weight = p->tensor(dtype, Shape{n.size}).fill([&] { return 1.0 + 0.5 * normal(rng); }).view();
  }
  if (n.bias) a.bias = p->tensor(dtype, Shape{n.size}).fill([&] { return normal(rng); }).view();
  if (n.kind != NormKind::kNone) a.out = p->tensor(dtype, Shape{n.rows, n.size}, n.gap).view();
  fill_norm(rng, n, a.norm);
  p->row_views = {&SumNormArgs::sum, &SumNormArgs::out};
  return p;
}

struct EmbeddingCase {
  std::int64_t rows, size;
  float scale;
  bool positions;
  std::int64_t gap;
};

inline std::vector<EmbeddingCase> embedding_cases() {
  return {{1, 576, 1.0F, false, 0},
          {64, 37, 23.9F, false, 3},
          {5, 130, 1.0F, true, 0},
          {3, 15, 7.7F, true, 1}};
}

inline std::unique_ptr<Problem<EmbeddingArgs>> make_problem(const EmbeddingCase& c, DType dtype,
                                                            Rng& rng) {
  auto p = std::make_unique<Problem<EmbeddingArgs>>();
  p->name = "embedding " + std::to_string(c.rows) + "x" + std::to_string(c.size);
  p->rows = c.rows;
  EmbeddingArgs& a = p->args;
  constexpr std::int64_t kVocabulary = 50, kPositions = 20;
  a.scale = c.scale;
  // Ids outside the vocabulary are clamped.
  a.tokens = p->tensor(DType::kI64, Shape{c.rows})
                 .fill([&] { return static_cast<double>(uniform(rng, -3, kVocabulary + 3)); })
                 .view();
  a.table = p->tensor(dtype, Shape{kVocabulary, c.size}).fill([&] { return normal(rng); }).view();
  if (c.positions) {
    a.position_offset = 2;
    a.positions = p->tensor(DType::kI32, Shape{c.rows})
                      .fill([&] { return static_cast<double>(uniform(rng, 0, kPositions - 3)); })
                      .view();
    a.position_table =
        p->tensor(dtype, Shape{kPositions, c.size}).fill([&] { return normal(rng); }).view();
  }
  a.out = p->tensor(dtype, Shape{c.rows, c.size}, c.gap).view();
  p->row_views = {&EmbeddingArgs::tokens, &EmbeddingArgs::positions, &EmbeddingArgs::out};
  return p;
}

struct RopeCase {
  std::int64_t rows, kv_heads, group, dim, v_dim, rotary;
  RopeKind rope;
  bool round_products;
  NormKind norm;
  bool before, full_width, after_rope;
  int weight_rank;  // of q and k weight: 0 (none), 1, 2
  bool bias;
  bool slots, scale;
  std::int64_t length;  // of the cache
  bool ring;            // lengths may exceed it
};

inline std::vector<RopeCase> rope_cases() {
  constexpr NormKind kNoNorm = NormKind::kNone, kRms = NormKind::kRms, kLayer = NormKind::kLayer;
  constexpr RopeKind kPlain = RopeKind::kNone, kNeox = RopeKind::kNeox;
  constexpr RopeKind kInterleaved = RopeKind::kInterleaved;
  return {
      {1, 3, 3, 64, 64, 64, kNeox, true, kNoNorm, false, false, false, 0, false, false, false, 40,
       false},
      {8, 2, 4, 96, 80, 48, kNeox, false, kRms, true, false, false, 1, false, true, false, 9, true},
      {3, 1, 1, 20, 12, 12, kInterleaved, true, kNoNorm, false, false, false, 0, false, false, true,
       16, false},
      {5, 2, 1, 66, 66, 66, kInterleaved, false, kRms, false, false, true, 1, false, true, false, 8,
       true},
      {2, 4, 2, 33, 31, 22, kNeox, true, kRms, true, true, false, 1, false, false, true, 30, false},
      {3, 2, 3, 24, 24, 24, kNeox, true, kLayer, false, true, true, 1, true, true, false, 30,
       false},
      {4, 3, 2, 40, 40, 40, kNeox, true, kLayer, false, false, false, 2, true, false, false, 30,
       false},
      {64, 1, 2, 16, 16, 0, kPlain, true, kRms, true, false, false, 0, false, false, false, 12,
       true},
      {2, 2, 2, 48, 32, 0, kPlain, true, kNoNorm, false, false, false, 0, false, false, true, 12,
       false},
      {2, 2, 2, 48, 32, 0, kPlain, true, kNoNorm, false, false, false, 0, false, true, false, 12,
       false},
  };
}

inline std::unique_ptr<Problem<RopeKvWriteArgs>> make_problem(const RopeCase& c, DType dtype,
                                                              Rng& rng) {
  auto p = std::make_unique<Problem<RopeKvWriteArgs>>();
  p->name = "rope_kv_write rows " + std::to_string(c.rows) + " heads " +
            std::to_string(c.kv_heads) + "x" + std::to_string(c.group) + "x" +
            std::to_string(c.dim);
  p->rows = c.rows;
  RopeKvWriteArgs& a = p->args;
  const auto random = [&] { return normal(rng); };
  const std::int64_t heads = c.kv_heads * c.group;
  constexpr std::int64_t kPositions = 70;
  // q in two places of one projection for each group, k and v with rows apart.
  const std::int64_t group_stride = c.group * c.dim + 7;
  a.q = p->tensor(dtype, Shape{c.rows, c.kv_heads, c.group, c.dim},
                  Shape{c.kv_heads * group_stride + 3, group_stride, c.dim, 1})
            .fill(random)
            .view();
  a.k = p->tensor(dtype, Shape{c.rows, c.kv_heads, c.dim}, 5).fill(random).view();
  a.v = p->tensor(dtype, Shape{c.rows, c.kv_heads, c.v_dim}, 2).fill(random).view();
  a.q_norm.kind = a.k_norm.kind = c.norm;
  a.q_norm.eps = a.k_norm.eps = 1e-6F;
  a.q_norm.round_before_weight = a.k_norm.round_before_weight = c.before ? 1 : 0;
  a.norm_full_width = c.full_width ? 1 : 0;
  a.norm_after_rope = c.after_rope ? 1 : 0;
  const auto parameter = [&](std::int64_t n) -> const TensorView& {
    Shape shape = {c.dim};
    if (c.full_width) shape = {n * c.dim};
    if (c.weight_rank == 2) shape = {n, c.dim};
    return p->tensor(dtype, shape).fill([&] { return 1.0 + 0.5 * normal(rng); }).view();
  };
  if (c.weight_rank > 0) {
    a.q_weight = parameter(heads);
    a.k_weight = parameter(c.kv_heads);
  }
  if (c.bias) {
    a.q_bias = parameter(heads);
    a.k_bias = parameter(c.kv_heads);
  }
  a.rope = c.rope;
  a.round_products = c.round_products ? 1 : 0;
  if (c.rope != RopeKind::kNone) {
    const auto table = [&] {
      const double value = 2.0 * std::uniform_real_distribution<double>()(rng) - 1.0;
      return c.round_products ? reference::rounded(dtype, value) : value;
    };
    a.cos = p->tensor(DType::kF32, Shape{kPositions, c.rotary / 2}).fill(table).view();
    a.sin = p->tensor(DType::kF32, Shape{kPositions, c.rotary / 2}).fill(table).view();
  }
  if (c.scale) {
    a.position_scale = p->tensor(DType::kF32, Shape{kPositions})
                           .fill([&] { return 1.0 + 0.3 * normal(rng); })
                           .view();
  }
  a.positions = p->tensor(DType::kI32, Shape{c.rows})
                    .fill([&] { return static_cast<double>(uniform(rng, 0, kPositions - 1)); })
                    .view();
  const std::int64_t longest = c.ring ? 3 * c.length : c.length - 1;
  a.lengths = p->tensor(DType::kI32, Shape{c.rows})
                  .fill([&] { return static_cast<double>(uniform(rng, 0, longest)); })
                  .view();
  if (c.slots) {
    std::int64_t slot = c.rows + 1;
    a.slots = p->tensor(DType::kI32, Shape{c.rows})
                  .fill([&] { return static_cast<double>(slot--); })
                  .view();
  }
  a.q_out = p->tensor(dtype, Shape{c.rows, heads, c.dim}).view();
  const std::int64_t slots = c.rows + (c.slots ? 2 : 0);
  a.k_cache = p->tensor(dtype, Shape{slots, c.kv_heads, c.length, c.dim}).view();
  a.v_cache = p->tensor(dtype, Shape{slots, c.kv_heads, c.length, c.v_dim}).view();
  p->row_views = {&RopeKvWriteArgs::q,         &RopeKvWriteArgs::k,       &RopeKvWriteArgs::v,
                  &RopeKvWriteArgs::positions, &RopeKvWriteArgs::lengths, &RopeKvWriteArgs::slots,
                  &RopeKvWriteArgs::q_out};
  if (!c.slots) {
    p->row_views.push_back(&RopeKvWriteArgs::k_cache);
    p->row_views.push_back(&RopeKvWriteArgs::v_cache);
  }
  return p;
}

struct AttentionCase {
  std::int64_t rows, kv_heads, group, dim, v_dim;
  std::int64_t length;     // of the cache
  std::int64_t low, high;  // lengths
  std::int64_t window;
  float softcap;
  bool gate, slots, first;
  bool gate_bias = false;
};

inline std::vector<AttentionCase> attention_cases() {
  return {
      {1, 3, 3, 64, 64, 300, 299, 299, 0, 0.0F, false, false, false},
      {8, 3, 3, 64, 64, 150, 0, 149, 0, 0.0F, false, true, false},
      {5, 1, 1, 128, 128, 70, 0, 69, 0, 0.0F, true, false, true},
      {3, 2, 4, 256, 256, 48, 100, 400, 48, 30.0F, false, true, false},
      {4, 2, 2, 80, 96, 64, 0, 500, 40, 0.0F, true, true, false},
      {2, 1, 7, 33, 17, 130, 60, 129, 0, 5.0F, true, false, true},
      {64, 1, 2, 16, 24, 20, 0, 19, 7, 0.0F, false, false, true},
      {2, 2, 5, 7, 1, 90, 64, 64, 0, 0.0F, false, false, false},
      {3, 1, 6, 40, 72, 200, 63, 63, 0, 0.0F, true, false, false},
      {1, 1, 8, 64, 64, 10, 0, 0, 0, 0.0F, false, false, false},
      {5, 2, 3, 48, 40, 90, 0, 89, 0, 0.0F, true, true, false, true},
      {3, 1, 1, 16, 17, 30, 0, 29, 8, 0.0F, true, false, true, true},
  };
}

inline std::unique_ptr<Problem<AttentionArgs>> make_problem(const AttentionCase& c, DType dtype,
                                                            Rng& rng) {
  auto p = std::make_unique<Problem<AttentionArgs>>();
  p->name = "attention rows " + std::to_string(c.rows) + " heads " + std::to_string(c.kv_heads) +
            "x" + std::to_string(c.group) + "x" + std::to_string(c.dim) + " length " +
            std::to_string(c.length);
  p->rows = c.rows;
  AttentionArgs& a = p->args;
  const auto random = [&] { return normal(rng); };
  const std::int64_t heads = c.kv_heads * c.group;
  a.scale = 1.7F / std::sqrt(static_cast<float>(c.dim));
  a.softcap = c.softcap;
  a.window = static_cast<std::int32_t>(c.window);
  a.q = p->tensor(dtype, Shape{c.rows, heads, c.dim}).fill(random).view();
  a.lengths = p->tensor(DType::kI32, Shape{c.rows})
                  .fill([&] { return static_cast<double>(uniform(rng, c.low, c.high)); })
                  .view();
  if (c.first) {
    std::int64_t r = 0;
    a.first = p->tensor(DType::kI32, Shape{c.rows})
                  .fill([&] {
                    const std::int64_t length = a.lengths.as<std::int32_t>()[r++];
                    return static_cast<double>(uniform(rng, 0, length));
                  })
                  .view();
  }
  if (c.slots) {
    std::int64_t slot = c.rows;
    a.slots = p->tensor(DType::kI32, Shape{c.rows})
                  .fill([&] { return static_cast<double>(slot--); })
                  .view();
  }
  const std::int64_t slots = c.rows + (c.slots ? 2 : 0);
  a.k_cache = p->tensor(dtype, Shape{slots, c.kv_heads, c.length, c.dim}).view();
  a.v_cache = p->tensor(dtype, Shape{slots, c.kv_heads, c.length, c.v_dim}).view();
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t t = reference::first_key(a, r); t <= reference::row_value(a.lengths, r);
         ++t) {
      for (const TensorView* cache : {&a.k_cache, &a.v_cache}) {
        for (std::int64_t h = 0; h < c.kv_heads; ++h) {
          for (std::int64_t d = 0; d < cache->shape[3]; ++d) {
            const std::int64_t slot = reference::slot_of(a.slots, r);
            reference::set(*cache, reference::offset(*cache, slot, h, t % c.length, d),
                           normal(rng));
          }
        }
      }
    }
  }
  if (c.gate) {
    const std::int64_t stride = c.v_dim + 3;
    a.gate = p->tensor(dtype, Shape{c.rows, c.kv_heads, c.group, c.v_dim},
                       Shape{heads * stride + 1, c.group * stride, stride, 1})
                 .fill([&] { return 3.0 * normal(rng); })
                 .view();
  }
  if (c.gate_bias) a.gate_bias = p->tensor(dtype, Shape{heads}).fill(random).view();
  a.out = p->tensor(dtype, Shape{c.rows, heads * c.v_dim}).view();
  p->row_views = {&AttentionArgs::q,     &AttentionArgs::lengths, &AttentionArgs::first,
                  &AttentionArgs::slots, &AttentionArgs::gate,    &AttentionArgs::out};
  if (!c.slots) {
    p->row_views.push_back(&AttentionArgs::k_cache);
    p->row_views.push_back(&AttentionArgs::v_cache);
  }
  return p;
}

}  // namespace segki::test
