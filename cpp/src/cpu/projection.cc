// Grouped projection with its epilogues on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/projection.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

// Bias, activation, residual and the store of one weight's outputs.
template <typename T>
struct ProjectionEpilogue {
  const T* bias;
  T* out;
  std::int64_t out_stride;
  const T* residual;
  std::int64_t residual_stride;
  float residual_scale;
  float branch_scale;
  Activation activation;

  HWY_INLINE void operator()(std::int64_t row, std::int64_t column, std::int64_t count,
                             const float* const (&sums)[1]) const {
    T* to = out + row * out_stride + column;
    const T* from = residual == nullptr ? nullptr : residual + row * residual_stride + column;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const std::int64_t n = std::min(kLanes, count - i);
      VF y = biased(sums[0] + i, bias == nullptr ? nullptr : bias + column + i, n);
      y = activate<T>(activation, y);
      if (from != nullptr) {
        const VF branch = rounded<T>(hn::Mul(y, set(branch_scale)));
        const VF skip = rounded<T>(hn::Mul(load_live(from + i, n), set(residual_scale)));
        y = hn::Add(skip, branch);
      }
      store_live(y, to + i, n);
    }
  }
};

// Sums as they are, with the bias, for outputs in f32 beside half-precision inputs.
template <typename W>
struct PlainEpilogue {
  const W* bias;
  float* out;
  std::int64_t out_stride;

  HWY_INLINE void operator()(std::int64_t row, std::int64_t column, std::int64_t count,
                             const float* const (&sums)[1]) const {
    float* to = out + row * out_stride + column;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const std::int64_t n = std::min(kLanes, count - i);
      VF y = n == kLanes ? load(sums[0] + i) : load_n(sums[0] + i, n);
      if (bias != nullptr) y = hn::Add(y, load_live(bias + column + i, n));
      store_live(y, to + i, n);
    }
  }
};

// Rows of x, for a weight of type W, packed as its kernel reads them; `wide` is room for x in fp32,
// used where W is not x's type.
template <typename T, typename W>
void pack(const ProjectionArgs& args, float* wide, float* packed) {
  const std::int64_t rows = args.x.shape[0], k = args.x.shape[1];
  const auto of_x = [&args](std::int64_t r) { return args.x.as<const T>() + r * args.x.stride[0]; };
  const auto of_wide = [wide, k](std::int64_t r) { return wide + r * k; };
  if constexpr (!std::is_same_v<T, W>) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < k; i += kLanes) {
        const std::int64_t n = std::min(kLanes, k - i);
        store_live(load_live(of_x(r) + i, n), wide + r * k + i, n);
      }
    }
    if (args.transposed != 0) return pack_rows_transposed<W>(rows, k, of_wide, packed);
    return pack_rows<W>(rows, k, of_wide, packed);
  } else {
    if (args.transposed != 0) return pack_rows_transposed<T>(rows, k, of_x, packed);
    return pack_rows<T>(rows, k, of_x, packed);
  }
}

// Weight i times packed rows; `epilogue` stores.
template <typename W, typename Epilogue>
void multiply(const ProjectionArgs& args, int i, Range range, const float* packed, float* sums,
              const Epilogue& epilogue) {
  const std::int64_t rows = args.x.shape[0], k = args.x.shape[1];
  const W* weight = args.weight[i].as<const W>();
  if (args.transposed != 0) {
    matmul_transposed(weight, args.out[i].shape[1], range, k, rows, packed, sums, epilogue);
  } else {
    matmul<1, W>({weight}, range, k, rows, packed, epilogue);
  }
}

template <typename W>
void multiply_plain(const ProjectionArgs& args, int i, Range range, const float* packed,
                    float* sums) {
  multiply<W>(
      args, i, range, packed, sums,
      PlainEpilogue<W>{args.bias[i].as<const W>(), args.out[i].as<float>(), args.out[i].stride[0]});
}

template <typename T>
void run(const ProjectionArgs& args, const Exec& exec) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t k = args.x.shape[1];
  float* packed = static_cast<float*>(exec.scratch);
  float* sums = packed + packed_bytes(rows, k) / sizeof(float);
  float* wide = packed + matmul_scratch_bytes(rows, k, args.transposed != 0) / sizeof(float);

  std::int64_t blocks = 0;
  for (int i = 0; i < args.count; ++i) {
    blocks += (args.out[i].shape[1] + kSplitBlock - 1) / kSplitBlock;
  }
  const Range mine = part_range(blocks, 1, exec.part, exec.parts);
  if (mine.begin == mine.end) return;

  enum class Packed { kNothing, kForOwnType, kForFloat } state = Packed::kNothing;
  std::int64_t before = 0;  // blocks of earlier weights
  for (int i = 0; i < args.count; ++i) {
    const std::int64_t columns = args.out[i].shape[1];
    const std::int64_t count = (columns + kSplitBlock - 1) / kSplitBlock;
    const Range range = {
        std::min(columns, std::max(mine.begin - before, std::int64_t{0}) * kSplitBlock),
        std::min(columns, std::max(mine.end - before, std::int64_t{0}) * kSplitBlock)};
    before += count;
    if (range.begin >= range.end) continue;
    const bool mixed = args.weight[i].dtype != args.x.dtype;
    if (mixed && state != Packed::kForFloat) {
      pack<T, float>(args, wide, packed);
      state = Packed::kForFloat;
    } else if (!mixed && state != Packed::kForOwnType) {
      pack<T, T>(args, wide, packed);
      state = Packed::kForOwnType;
    }
    if (mixed) {
      multiply_plain<float>(args, i, range, packed, sums);
    } else if (args.out[i].dtype != args.x.dtype) {
      multiply_plain<T>(args, i, range, packed, sums);
    } else {
      multiply<T>(args, i, range, packed, sums,
                  ProjectionEpilogue<T>{args.bias[i].as<const T>(), args.out[i].as<T>(),
                                        args.out[i].stride[0], args.residual.as<const T>(),
                                        args.residual.stride[0], args.residual_scale,
                                        args.branch_scale, args.activation});
    }
  }
}

}  // namespace

std::int32_t projection(const ProjectionArgs* args, const Exec* exec) {
  switch (args->x.dtype) {
    case DType::kF32:
      run<float>(*args, *exec);
      return 0;
    case DType::kBF16:
      run<Bf16>(*args, *exec);
      return 0;
    case DType::kF16:
      run<F16>(*args, *exec);
      return 0;
    default:
      return static_cast<std::int32_t>(ErrorCode::kInvalidArgument);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<ProjectionArgs> projection_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, projection);
}

std::size_t projection_scratch_bytes(const ProjectionArgs& args) {
  const std::int64_t rows = args.x.shape[0], k = args.x.shape[1];
  bool mixed = false;
  for (int i = 0; i < args.count; ++i) mixed = mixed || args.weight[i].dtype != args.x.dtype;
  return matmul_scratch_bytes(rows, k, args.transposed != 0) +
         (mixed ? static_cast<std::size_t>(rows * k) * sizeof(float) : 0);
}

}  // namespace segki::cpu
#endif
