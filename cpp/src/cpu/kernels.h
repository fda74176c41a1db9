// The CPU backend's kernels: for each op, its variant for an instruction set and its need of
// scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "segki/error.h"
#include "segki/ops.h"

namespace segki::cpu {

enum class InstructionSet : std::int32_t { kGeneric = 0, kAvx2 = 1, kAvx512 = 2 };

// Null when this build has no code for the instruction set.
Kernel<EmbeddingArgs> embedding_kernel(InstructionSet set);
Kernel<NormArgs> norm_kernel(InstructionSet set);
Kernel<SumNormArgs> sum_norm_kernel(InstructionSet set);
Kernel<ProjectionArgs> projection_kernel(InstructionSet set);
Kernel<GatedProjectionArgs> gated_projection_kernel(InstructionSet set);
Kernel<RopeKvWriteArgs> rope_kv_write_kernel(InstructionSet set);
Kernel<AttentionArgs> attention_kernel(InstructionSet set);
Kernel<LmHeadArgs> lm_head_kernel(InstructionSet set);
Kernel<ArgmaxArgs> argmax_kernel(InstructionSet set);
Kernel<SelectTokenArgs> select_token_kernel(InstructionSet set);
Kernel<GatedDeltaArgs> gated_delta_kernel(InstructionSet set);
Kernel<GatedDeltaPrefillArgs> gated_delta_prefill_kernel(InstructionSet set);
Kernel<RouterArgs> route_experts_kernel(InstructionSet set);
Kernel<ExpertGatedProjectionArgs> expert_gated_projection_kernel(InstructionSet set);
Kernel<ExpertProjectionArgs> expert_projection_kernel(InstructionSet set);

// Bytes that each part of the op needs in `Exec::scratch`, the same for all instruction sets.
std::size_t embedding_scratch_bytes(const EmbeddingArgs& args);
std::size_t norm_scratch_bytes(const NormArgs& args);
std::size_t sum_norm_scratch_bytes(const SumNormArgs& args);
std::size_t projection_scratch_bytes(const ProjectionArgs& args);
std::size_t gated_projection_scratch_bytes(const GatedProjectionArgs& args);
std::size_t rope_kv_write_scratch_bytes(const RopeKvWriteArgs& args);
std::size_t attention_scratch_bytes(const AttentionArgs& args);
std::size_t lm_head_scratch_bytes(const LmHeadArgs& args);
std::size_t argmax_scratch_bytes(const ArgmaxArgs& args);
std::size_t select_token_scratch_bytes(const SelectTokenArgs& args);
std::size_t gated_delta_scratch_bytes(const GatedDeltaArgs& args);
std::size_t gated_delta_prefill_scratch_bytes(const GatedDeltaPrefillArgs& args);
std::size_t route_experts_scratch_bytes(const RouterArgs& args);
std::size_t expert_gated_projection_scratch_bytes(const ExpertGatedProjectionArgs& args);
std::size_t expert_projection_scratch_bytes(const ExpertProjectionArgs& args);

// Part `part` of [0, total) cut into `parts` contiguous ranges of whole blocks, as even as blocks
// allow; a range may be empty.
struct Range {
  std::int64_t begin;
  std::int64_t end;
};

inline Range part_range(std::int64_t total, std::int64_t block, std::int32_t part,
                        std::int32_t parts) {
  const std::int64_t blocks = (total + block - 1) / block;
  const std::int64_t begin = blocks * part / parts * block;
  const std::int64_t end = blocks * (part + 1) / parts * block;
  return {begin < total ? begin : total, end < total ? end : total};
}

}  // namespace segki::cpu
