// First half of a gated MLP on the CPU: both weights in one pass, their product in registers.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gated_projection.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
struct GatedEpilogue {
  const T* gate_bias;
  const T* up_bias;
  T* out;
  std::int64_t out_stride;
  Activation activation;
  bool fp32_activation;

  HWY_INLINE void operator()(std::int64_t row, std::int64_t column, std::int64_t count,
                             const float* const (&sums)[2]) const {
    T* to = out + row * out_stride + column;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const std::int64_t n = std::min(kLanes, count - i);
      const VF gate =
          biased(sums[0] + i, gate_bias == nullptr ? nullptr : gate_bias + column + i, n);
      const VF up = biased(sums[1] + i, up_bias == nullptr ? nullptr : up_bias + column + i, n);
      const VF activated =
          fp32_activation ? activate<float>(activation, gate) : activate<T>(activation, gate);
      store_live(hn::Mul(activated, up), to + i, n);
    }
  }
};

template <typename T>
void run(const GatedProjectionArgs& args, const Exec& exec) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t k = args.x.shape[1];
  const Range range = part_range(args.out.shape[1], kSplitBlock, exec.part, exec.parts);
  if (range.begin == range.end) return;
  float* packed = static_cast<float*>(exec.scratch);
  pack_rows<T>(args.x, packed);
  const GatedEpilogue<T> epilogue = {args.gate_bias.as<const T>(),
                                     args.up_bias.as<const T>(),
                                     args.out.as<T>(),
                                     args.out.stride[0],
                                     args.activation,
                                     args.fp32_activation != 0};
  matmul<2, T>({args.gate.as<const T>(), args.up.as<const T>()}, range, k, rows, packed, epilogue);
}

}  // namespace

std::int32_t gated_projection(const GatedProjectionArgs* args, const Exec* exec) {
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

Kernel<GatedProjectionArgs> gated_projection_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, gated_projection);
}

std::size_t gated_projection_scratch_bytes(const GatedProjectionArgs& args) {
  return matmul_scratch_bytes(args.x.shape[0], args.x.shape[1], false);
}

}  // namespace segki::cpu
#endif
