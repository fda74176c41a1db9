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

template <typename T>
void run(const ProjectionArgs& args, const Exec& exec) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t k = args.x.shape[1];
  float* packed = static_cast<float*>(exec.scratch);
  float* sums = packed + packed_bytes(rows, k) / sizeof(float);

  std::int64_t blocks = 0;
  for (int i = 0; i < args.count; ++i) {
    blocks += (args.out[i].shape[1] + kSplitBlock - 1) / kSplitBlock;
  }
  const Range mine = part_range(blocks, 1, exec.part, exec.parts);
  if (mine.begin == mine.end) return;
  if (args.transposed != 0) {
    pack_rows_transposed<T>(args.x, packed);
  } else {
    pack_rows<T>(args.x, packed);
  }

  std::int64_t before = 0;  // blocks of earlier weights
  for (int i = 0; i < args.count; ++i) {
    const std::int64_t columns = args.out[i].shape[1];
    const std::int64_t count = (columns + kSplitBlock - 1) / kSplitBlock;
    const Range range = {
        std::min(columns, std::max(mine.begin - before, std::int64_t{0}) * kSplitBlock),
        std::min(columns, std::max(mine.end - before, std::int64_t{0}) * kSplitBlock)};
    before += count;
    if (range.begin >= range.end) continue;
    const ProjectionEpilogue<T> epilogue = {args.bias[i].as<const T>(), args.out[i].as<T>(),
                                            args.out[i].stride[0],      args.residual.as<const T>(),
                                            args.residual.stride[0],    args.residual_scale,
                                            args.branch_scale,          args.activation};
    const T* weight = args.weight[i].as<const T>();
    if (args.transposed != 0) {
      matmul_transposed(weight, columns, range, k, rows, packed, sums, epilogue);
    } else {
      matmul<1, T>({weight}, range, k, rows, packed, epilogue);
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
  return matmul_scratch_bytes(args.x.shape[0], args.x.shape[1], args.transposed != 0);
}

}  // namespace segki::cpu
#endif
