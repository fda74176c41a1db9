// Normalisation on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/norm.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
void run(const NormArgs& args, const Exec& exec) {
  const std::int64_t size = args.x.shape[1];
  const Range rows = part_range(args.x.shape[0], 1, exec.part, exec.parts);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    norm_row<T>(args.norm, args.x.as<const T>() + r * args.x.stride[0], args.weight.as<const T>(),
                args.bias.as<const T>(), args.out.as<T>() + r * args.out.stride[0], size);
  }
}

}  // namespace

std::int32_t norm(const NormArgs* args, const Exec* exec) {
  return with_type(args->x.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<NormArgs> norm_kernel(InstructionSet set) { return SEGKI_CPU_VARIANT(set, norm); }

std::size_t norm_scratch_bytes(const NormArgs&) { return 0; }

}  // namespace segki::cpu
#endif  // HWY_ONCE
