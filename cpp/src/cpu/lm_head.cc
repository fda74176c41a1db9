// LM head on the CPU: logits in fp32, rounded where the model's dtype rounds them.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/lm_head.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/matmul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
struct LogitsEpilogue {
  const T* bias;
  float* logits;
  std::int64_t stride;
  float scale;
  float divisor;
  float softcap;
  bool fp32_softcap;

  HWY_INLINE void operator()(std::int64_t row, std::int64_t column, std::int64_t count,
                             const float* const (&sums)[1]) const {
    float* to = logits + row * stride + column;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const std::int64_t n = std::min(kLanes, count - i);
      VF y = biased(sums[0] + i, bias == nullptr ? nullptr : bias + column + i, n);
      if (scale != 1.0F) y = rounded<T>(hn::Mul(y, set(scale)));
      if (divisor != 1.0F) y = rounded<T>(hn::Div(y, set(divisor)));
      if (softcap != 0.0F) {
        y = fp32_softcap ? capped<float>(y) : capped<T>(y);
      }
      store_live(y, to + i, n);
    }
  }

  template <typename Rounding>
  HWY_INLINE VF capped(VF y) const {
    y = rounded<Rounding>(hn::Div(y, set(softcap)));
    y = rounded<Rounding>(tanh(y));
    return rounded<Rounding>(hn::Mul(y, set(softcap)));
  }
};

template <typename T>
void run(const LmHeadArgs& args, const Exec& exec) {
  const std::int64_t rows = args.x.shape[0];
  const std::int64_t k = args.x.shape[1];
  const std::int64_t columns = args.logits.shape[1];
  const Range range = part_range(columns, kSplitBlock, exec.part, exec.parts);
  if (range.begin == range.end) return;
  float* packed = static_cast<float*>(exec.scratch);
  const LogitsEpilogue<T> epilogue = {args.bias.as<const T>(),
                                      args.logits.as<float>(),
                                      args.logits.stride[0],
                                      args.scale,
                                      args.divisor,
                                      args.softcap,
                                      args.fp32_softcap != 0};
  const T* weight = args.weight.as<const T>();
  if (args.transposed != 0) {
    pack_rows_transposed<T>(args.x, packed);
    float* sums = packed + packed_bytes(rows, k) / sizeof(float);
    matmul_transposed(weight, columns, range, k, rows, packed, sums, epilogue);
  } else {
    pack_rows<T>(args.x, packed);
    matmul<1, T>({weight}, range, k, rows, packed, epilogue);
  }
}

}  // namespace

std::int32_t lm_head(const LmHeadArgs* args, const Exec* exec) {
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

Kernel<LmHeadArgs> lm_head_kernel(InstructionSet set) { return SEGKI_CPU_VARIANT(set, lm_head); }

std::size_t lm_head_scratch_bytes(const LmHeadArgs& args) {
  return matmul_scratch_bytes(args.x.shape[0], args.x.shape[1], args.transposed != 0);
}

}  // namespace segki::cpu
#endif
