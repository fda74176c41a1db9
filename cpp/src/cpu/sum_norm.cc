// Residual sum and normalisation on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/sum_norm.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
HWY_INLINE VF scaled_term(const T* term, float scale, std::int64_t left) {
  const VF value = load_row(term, left);
  return scale == 1.0F ? value : rounded<T>(hn::Mul(value, set(scale)));
}

template <typename T>
void run(const SumNormArgs& args, const Exec& exec) {
  const std::int64_t size = args.sum.shape[1];
  const Range rows = part_range(args.sum.shape[0], 1, exec.part, exec.parts);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* terms[3] = {};
    for (int t = 0; t < args.count; ++t) {
      terms[t] = args.terms[t].as<const T>() + r * args.terms[t].stride[0];
    }
    T* sum = args.sum.as<T>() + r * args.sum.stride[0];
    for (std::int64_t i = 0; i < size; i += kLanes) {
      const std::int64_t left = size - i;
      VF total = scaled_term(terms[0] + i, args.scales[0], left);
      for (int t = 1; t < args.count; ++t) {
        total = rounded<T>(hn::Add(total, scaled_term(terms[t] + i, args.scales[t], left)));
      }
      store_row(total, sum + i, left);
    }
    if (args.norm.kind == NormKind::kNone) continue;
    norm_row<T>(args.norm, sum, args.weight.as<const T>(), args.bias.as<const T>(),
                args.out.as<T>() + r * args.out.stride[0], size);
  }
}

}  // namespace

std::int32_t sum_norm(const SumNormArgs* args, const Exec* exec) {
  return with_type(args->sum.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<SumNormArgs> sum_norm_kernel(InstructionSet set) { return SEGKI_CPU_VARIANT(set, sum_norm); }

std::size_t sum_norm_scratch_bytes(const SumNormArgs&) { return 0; }

}  // namespace segki::cpu
#endif  // HWY_ONCE
