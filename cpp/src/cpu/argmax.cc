// Argmax and log-probability on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/argmax.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/argmax-inl.h"
#include "cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

std::int32_t argmax(const ArgmaxArgs* args, const Exec* exec) {
  const std::int64_t count = args->logits.shape[1];
  const Range rows = part_range(args->logits.shape[0], 1, exec->part, exec->parts);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const float* logits = args->logits.as<float>() + r * args->logits.stride[0];
    RowMax best;
    update_max(logits, 0, count, best);
    const std::int64_t token = best.nan >= 0 ? best.nan : best.index;
    args->tokens.as<std::int64_t>()[r * args->tokens.stride[0]] = token;
    if (args->log_prob.present()) {
      args->log_prob.as<float>()[r * args->log_prob.stride[0]] =
          log_prob_of(logits, count, token, best);
    }
  }
  return 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<ArgmaxArgs> argmax_kernel(InstructionSet set) { return SEGKI_CPU_VARIANT(set, argmax); }

std::size_t argmax_scratch_bytes(const ArgmaxArgs&) { return 0; }

}  // namespace segki::cpu
#endif  // HWY_ONCE
