// What the op tests and the benchmarks share: guarded buffers of fresh random numbers, a way to run
// a backend's kernel in any number of parts, and the cases of the ops that multiply with a weight.
// The cases of the other ops are in op_cases_rows.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "segki/segki.h"

namespace segki::testing {

// --- Random numbers. SEGKI_TEST_SEED repeats a run.

inline std::uint64_t fresh_seed() {
  const char* given = std::getenv("SEGKI_TEST_SEED");
  if (given != nullptr) return std::strtoull(given, nullptr, 10);
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

// --- Elements of any float dtype.

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The value of `dtype` nearest to `value`, ties to even.
inline double round_to(DType dtype, double value) {
  if (!std::isfinite(value) || value == 0.0) return value;
  const int significand = dtype == DType::kF32 ? 24 : dtype == DType::kBF16 ? 8 : 11;
  const int lowest = dtype == DType::kF16 ? -24 : dtype == DType::kBF16 ? -133 : -149;
  const double largest = dtype == DType::kF16    ? 65504.0
                         : dtype == DType::kBF16 ? 0x1.FEp127
                                                 : 0x1.FFFFFEp127;
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(value) - significand + 1, lowest));
  const double rounded = std::nearbyint(value / spacing) * spacing;
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, value) : rounded;
}

inline double load_element(DType dtype, const void* address) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, address, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, address, sizeof(bits));
  if (dtype == DType::kBF16) return bits_to_float(std::uint32_t{bits} << 16);
  const int exponent = (bits >> 10) & 31;
  const double fraction = bits & 1023;
  const double magnitude = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(fraction + 1024.0, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// `value` must be finite and a value of `dtype` (see round_to).
inline void store_element(DType dtype, double value, void* address) {
  if (dtype == DType::kF32) {
    const float as_float = static_cast<float>(value);
    std::memcpy(address, &as_float, sizeof(as_float));
    return;
  }
  std::uint16_t bits;
  if (dtype == DType::kBF16) {
    bits = static_cast<std::uint16_t>(float_to_bits(static_cast<float>(value)) >> 16);
  } else {
    const double magnitude = std::fabs(value);
    const int exponent = magnitude == 0.0 ? -14 : std::max(std::ilogb(magnitude), -14);
    const int fraction = static_cast<int>(std::ldexp(magnitude, 10 - exponent));
    bits = static_cast<std::uint16_t>(fraction < 1024 ? fraction
                                                      : ((exponent + 15) << 10) + fraction - 1024);
    if (std::signbit(value)) bits |= 0x8000;
  }
  std::memcpy(address, &bits, sizeof(bits));
}

// --- A matrix [rows, columns] with any row stride, at an address that is a multiple of the element
// size and of nothing more, between guards. Filled with NaN patterns until something is written.

class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t padding = 0)
      : dtype_(dtype), rows_(rows), columns_(columns), stride_(columns + padding) {
    bytes_.assign(kGuard * 2 + element() + static_cast<std::size_t>(rows * stride_) * element(),
                  kPoison);
  }

  // Normal numbers, rounded to the dtype.
  void fill(std::mt19937_64& random, double deviation, double mean = 0.0) {
    std::normal_distribution<double> normal(mean, deviation);
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < columns_; ++c) set(r, c, round_to(dtype_, normal(random)));
    }
  }

  double get(std::int64_t row, std::int64_t column) const {
    return load_element(dtype_, address(row, column));
  }
  void set(std::int64_t row, std::int64_t column, double value) {
    store_element(dtype_, value, const_cast<unsigned char*>(address(row, column)));
  }

  bool present() const { return !bytes_.empty(); }
  DType dtype() const { return dtype_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  std::size_t element() const { return size_of(dtype_); }

  // [rows, columns], the first `rows` rows alone where given; absent for a default-made buffer.
  TensorView view(std::int64_t rows = -1) {
    if (!present()) return {};
    TensorView v = dense_view(const_cast<unsigned char*>(address(0, 0)), dtype_,
                              rows < 0 ? rows_ : rows, columns_);
    v.stride[0] = stride_;
    return v;
  }
  // [columns], of a buffer with one row.
  TensorView vector_view() {
    return present() ? dense_view(const_cast<unsigned char*>(address(0, 0)), dtype_, columns_)
                     : TensorView{};
  }

  // Whether everything but the elements of the first `rows` rows still holds the poison.
  bool intact(std::int64_t rows = -1) const {
    const std::int64_t live = rows < 0 ? rows_ : rows;
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const std::int64_t offset =
          static_cast<std::int64_t>(i) - static_cast<std::int64_t>(kGuard + element());
      const std::int64_t index = offset / static_cast<std::int64_t>(element());
      const bool inside = offset >= 0 && index / stride_ < live && index % stride_ < columns_;
      if (!inside && bytes_[i] != kPoison) return false;
    }
    return true;
  }

  // The bits of one row.
  std::string row_bytes(std::int64_t row) const {
    return {reinterpret_cast<const char*>(address(row, 0)),
            static_cast<std::size_t>(columns_) * element()};
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr unsigned char kPoison = 0xFF;  // NaN in every float dtype

  const unsigned char* address(std::int64_t row, std::int64_t column) const {
    return bytes_.data() + kGuard + element() +
           static_cast<std::size_t>(row * stride_ + column) * element();
  }

  DType dtype_ = DType::kF32;
  std::int64_t rows_ = 0;
  std::int64_t columns_ = 0;
  std::int64_t stride_ = 0;
  std::vector<unsigned char> bytes_;
};

// --- Running a kernel.

// Runs the backend's kernel for `args` in `parts` parts, one after another, last part first.
// Scratch is poisoned. Returns the first code that is not 0; -1 when the kernel wrote past its
// scratch.
template <typename Args>
std::int32_t run_kernel(const Backend& backend, const Args& args, std::int32_t parts = 1) {
  const BackendTable& table = backend.table();
  const std::size_t bytes =
      table.scratch_bytes == nullptr ? 0 : table.scratch_bytes(OpTraits<Args>::kId, &args);
  constexpr std::size_t kAlignment = 64;
  constexpr std::size_t kGuard = 256;
  std::vector<unsigned char> memory(bytes + kAlignment + kGuard);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % kAlignment;
  unsigned char* scratch = memory.data() + (kAlignment - misaligned) % kAlignment;
  for (std::int32_t part = parts - 1; part >= 0; --part) {
    std::memset(scratch, 0xFF, bytes + kGuard);
    const Exec exec = {nullptr, part, parts, scratch};
    const std::int32_t code = (table.*OpTraits<Args>::kSlot)(&args, &exec);
    if (code != 0) return code;
    for (std::size_t i = bytes; i < bytes + kGuard; ++i) {
      if (scratch[i] != 0xFF) return -1;
    }
  }
  return 0;
}

// --- Cases.

// All ops that multiply with a weight: a projection of `columns.size()` weights, the gated
// projection (columns[0]) or the LM head (columns[0]).
struct MatmulCase {
  std::int64_t rows = 1;
  std::int64_t k = 1;
  std::vector<std::int64_t> columns;
  DType dtype = DType::kF32;
  bool bias = false;
  bool transposed = false;
  Activation activation = Activation::kNone;
  bool residual = false;
  bool in_place = false;  // out is the residual
  float residual_scale = 1.0F;
  float branch_scale = 1.0F;
  float scale = 1.0F;
  float divisor = 1.0F;
  float softcap = 0.0F;
  bool fp32_activation = false;
  bool fp32_softcap = false;

  std::string name() const {
    std::string text = std::string(name_of(dtype)) + " rows=" + std::to_string(rows) +
                       " k=" + std::to_string(k) + " n=";
    for (std::int64_t n : columns) text += std::to_string(n) + ",";
    if (bias) text += " bias";
    if (transposed) text += " transposed";
    if (activation != Activation::kNone) {
      text += " activation=" + std::to_string(static_cast<int>(activation));
    }
    if (residual) text += in_place ? " residual in place" : " residual";
    if (residual_scale != 1.0F) text += " residual_scale=" + std::to_string(residual_scale);
    if (branch_scale != 1.0F) text += " branch_scale=" + std::to_string(branch_scale);
    if (scale != 1.0F) text += " scale=" + std::to_string(scale);
    if (divisor != 1.0F) text += " divisor=" + std::to_string(divisor);
    if (softcap != 0.0F) text += " softcap=" + std::to_string(softcap);
    if (fp32_activation || fp32_softcap) text += " fp32";
    return text;
  }
};

inline const std::vector<DType>& float_dtypes() {
  static const std::vector<DType> all = {DType::kF32, DType::kBF16, DType::kF16};
  return all;
}

inline const std::vector<Activation>& activations() {
  static const std::vector<Activation> all = {Activation::kNone,     Activation::kSilu,
                                              Activation::kGeluTanh, Activation::kGeluErf,
                                              Activation::kRelu,     Activation::kRelu2};
  return all;
}

inline std::vector<MatmulCase> projection_cases(DType dtype) {
  std::vector<MatmulCase> cases = {
      {.rows = 1, .k = 1, .columns = {1}},
      {.rows = 2, .k = 7, .columns = {3}, .bias = true},
      {.rows = 3, .k = 31, .columns = {17, 5}},
      {.rows = 5, .k = 33, .columns = {16, 65, 1}, .bias = true},
      {.rows = 8, .k = 100, .columns = {130, 34, 34, 2}},
      {.rows = 1, .k = 576, .columns = {576, 192, 192}},
      {.rows = 17, .k = 64, .columns = {70}, .residual = true},
      {.rows = 8, .k = 96, .columns = {61}, .residual = true, .in_place = true},
      {.rows = 64, .k = 129, .columns = {37}, .bias = true},
      {.rows = 1, .k = 1536, .columns = {131}, .residual = true},
      {.rows = 4,
       .k = 50,
       .columns = {33},
       .bias = true,
       .residual = true,
       .residual_scale = 1.7F,
       .branch_scale = 0.22F},
      {.rows = 6,
       .k = 50,
       .columns = {33},
       .activation = Activation::kGeluErf,
       .residual = true,
       .branch_scale = 0.22F},
      {.rows = 1, .k = 1, .columns = {1}, .transposed = true},
      {.rows = 2, .k = 15, .columns = {33}, .bias = true, .transposed = true},
      {.rows = 7, .k = 100, .columns = {150, 3}, .transposed = true},
      {.rows = 1, .k = 65, .columns = {1100}, .bias = true, .transposed = true},
      {.rows = 64, .k = 20, .columns = {1100}, .transposed = true},
      {.rows = 3,
       .k = 40,
       .columns = {64},
       .transposed = true,
       .activation = Activation::kGeluTanh},
  };
  for (Activation activation : activations()) {
    cases.push_back({.rows = 5, .k = 70, .columns = {75}, .bias = true, .activation = activation});
  }
  for (MatmulCase& c : cases) c.dtype = dtype;
  return cases;
}

inline std::vector<MatmulCase> gated_projection_cases(DType dtype) {
  std::vector<MatmulCase> cases = {
      {.rows = 1, .k = 1, .columns = {1}},     {.rows = 17, .k = 33, .columns = {70}, .bias = true},
      {.rows = 64, .k = 64, .columns = {19}},  {.rows = 1, .k = 576, .columns = {200}},
      {.rows = 8, .k = 1000, .columns = {66}},
  };
  for (MatmulCase& c : cases) c.activation = Activation::kSilu;
  for (Activation activation : activations()) {
    for (bool fp32 : {false, true}) {
      cases.push_back({.rows = 3,
                       .k = 75,
                       .columns = {83},
                       .bias = true,
                       .activation = activation,
                       .fp32_activation = fp32});
    }
  }
  for (MatmulCase& c : cases) c.dtype = dtype;
  return cases;
}

inline std::vector<MatmulCase> lm_head_cases(DType dtype) {
  std::vector<MatmulCase> cases = {
      {.rows = 1, .k = 1, .columns = {1}},
      {.rows = 1, .k = 576, .columns = {501}},
      {.rows = 8, .k = 100, .columns = {333}, .bias = true},
      {.rows = 64, .k = 48, .columns = {77}, .softcap = 3.0F},
      {.rows = 3, .k = 65, .columns = {200}, .scale = 0.0625F},
      {.rows = 2, .k = 65, .columns = {200}, .divisor = 13.0F},
      {.rows = 5,
       .k = 65,
       .columns = {90},
       .bias = true,
       .scale = 1.3F,
       .divisor = 7.0F,
       .softcap = 2.5F},
      {.rows = 9, .k = 65, .columns = {1200}, .bias = true, .transposed = true, .softcap = 2.5F},
      {.rows = 7, .k = 80, .columns = {70}, .divisor = 3.0F, .softcap = 1.5F, .fp32_softcap = true},
  };
  for (MatmulCase& c : cases) c.dtype = dtype;
  return cases;
}

// Inputs and outputs of a case. Outputs are of order 1, so that activations and softcaps bend.
struct MatmulProblem {
  MatmulProblem(MatmulCase of, std::uint64_t seed) : c(std::move(of)) {
    std::mt19937_64 random(seed);
    x = Buffer(c.dtype, c.rows, c.k, 3);
    x.fill(random, 1.0);
    for (std::int64_t n : c.columns) add(random, n, c.dtype);
  }

  // For `rows` first rows of the case (all when negative).
  ProjectionArgs projection(std::int64_t rows = -1) {
    ProjectionArgs args;
    args.x = x.view(rows);
    args.count = static_cast<std::int32_t>(weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) {
      args.weight[i] = weight[i].view();
      args.bias[i] = bias[i].vector_view();
      args.out[i] = out[i].view(rows);
    }
    if (c.residual) args.residual = c.in_place ? out[0].view(rows) : residual.view(rows);
    args.residual_scale = c.residual_scale;
    args.branch_scale = c.branch_scale;
    args.transposed = c.transposed ? 1 : 0;
    args.activation = c.activation;
    return args;
  }

  // Weight 0 is the gate; the case must have been made with gated().
  GatedProjectionArgs gated_projection(std::int64_t rows = -1) {
    GatedProjectionArgs args;
    args.x = x.view(rows);
    args.gate = weight[0].view();
    args.up = weight[1].view();
    args.gate_bias = bias[0].vector_view();
    args.up_bias = bias[1].vector_view();
    args.out = out[0].view(rows);
    args.activation = c.activation;
    args.fp32_activation = c.fp32_activation ? 1 : 0;
    return args;
  }

  LmHeadArgs lm_head(std::int64_t rows = -1) {
    LmHeadArgs args;
    args.x = x.view(rows);
    args.weight = weight[0].view();
    args.bias = bias[0].vector_view();
    args.logits = out[0].view(rows);
    args.scale = c.scale;
    args.divisor = c.divisor;
    args.softcap = c.softcap;
    args.fp32_softcap = c.fp32_softcap ? 1 : 0;
    args.transposed = c.transposed ? 1 : 0;
    return args;
  }

  // Fresh outputs; in place, they hold the residual.
  void poison_outputs() {
    for (Buffer& b : out) b = Buffer(b.dtype(), b.rows(), b.columns(), 5);
    if (!c.in_place) return;
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (std::int64_t n = 0; n < c.columns[0]; ++n) out[0].set(r, n, residual.get(r, n));
    }
  }

  static MatmulProblem gated(MatmulCase of, std::uint64_t seed) {
    of.columns.push_back(of.columns[0]);
    return MatmulProblem(std::move(of), seed);
  }
  static MatmulProblem head(MatmulCase of, std::uint64_t seed) {
    MatmulProblem problem(std::move(of), seed);
    problem.out[0] = Buffer(DType::kF32, problem.c.rows, problem.c.columns[0], 5);
    return problem;
  }

  MatmulCase c;
  Buffer x;
  std::vector<Buffer> weight;
  std::vector<Buffer> bias;
  std::vector<Buffer> out;
  Buffer residual;

 private:
  void add(std::mt19937_64& random, std::int64_t n, DType dtype) {
    Buffer w = c.transposed ? Buffer(dtype, c.k, n) : Buffer(dtype, n, c.k);
    w.fill(random, 2.0 / std::sqrt(static_cast<double>(c.k)));
    weight.push_back(std::move(w));
    Buffer b = c.bias ? Buffer(dtype, 1, n) : Buffer();
    if (c.bias) b.fill(random, 1.0);
    bias.push_back(std::move(b));
    out.emplace_back(dtype, c.rows, n, 5);
    if (c.residual && !residual.present()) {
      residual = Buffer(dtype, c.rows, n, 2);
      residual.fill(random, 1.0);
      poison_outputs();
    }
  }
};

}  // namespace segki::testing
