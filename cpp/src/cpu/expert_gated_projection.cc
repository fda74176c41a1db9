#include "cpu/kernels.h"

namespace segki::cpu {

Kernel<ExpertGatedProjectionArgs> expert_gated_projection_kernel(InstructionSet) { return nullptr; }

std::size_t expert_gated_projection_scratch_bytes(const ExpertGatedProjectionArgs&) { return 0; }

}  // namespace segki::cpu
