#include "cpu/kernels.h"

namespace segki::cpu {

Kernel<RouterArgs> route_experts_kernel(InstructionSet) { return nullptr; }

std::size_t route_experts_scratch_bytes(const RouterArgs&) { return 0; }

}  // namespace segki::cpu
