#include "cpu/kernels.h"

namespace segki::cpu {

Kernel<ExpertProjectionArgs> expert_projection_kernel(InstructionSet) { return nullptr; }

std::size_t expert_projection_scratch_bytes(const ExpertProjectionArgs&) { return 0; }

}  // namespace segki::cpu
