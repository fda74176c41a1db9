#include "cpu/kernels.h"

namespace segki::cpu {

Kernel<GatedDeltaPrefillArgs> gated_delta_prefill_kernel(InstructionSet) { return nullptr; }

std::size_t gated_delta_prefill_scratch_bytes(const GatedDeltaPrefillArgs&) { return 0; }

}  // namespace segki::cpu
