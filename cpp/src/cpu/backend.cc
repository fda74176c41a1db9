// The CPU backend's table, one for each instruction set, and the choice between them.
#include "segki/backend.h"

#include <array>

#include "cpu/kernels.h"
#include "segki/error.h"

namespace segki {
namespace cpu {
namespace {

struct Variant {
  InstructionSet set;
  const char* name;
};

// Best first.
constexpr std::array<Variant, 3> kVariants = {{
    {InstructionSet::kAvx512, "avx512"},
    {InstructionSet::kAvx2, "avx2"},
    {InstructionSet::kGeneric, "generic"},
}};

bool machine_runs(InstructionSet set) {
#if defined(__x86_64__) || defined(__i386__)
  switch (set) {
    case InstructionSet::kAvx512:
      return machine_runs(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
             __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("pclmul") &&
             __builtin_cpu_supports("aes");
    case InstructionSet::kGeneric:
      return true;
  }
#endif
  return set == InstructionSet::kGeneric;
}

bool usable(InstructionSet set) { return projection_kernel(set) != nullptr && machine_runs(set); }

std::size_t scratch_bytes(OpId op, const void* args) {
  switch (op) {
    case OpId::kEmbedding:
      return embedding_scratch_bytes(*static_cast<const EmbeddingArgs*>(args));
    case OpId::kNorm:
      return norm_scratch_bytes(*static_cast<const NormArgs*>(args));
    case OpId::kSumNorm:
      return sum_norm_scratch_bytes(*static_cast<const SumNormArgs*>(args));
    case OpId::kProjection:
      return projection_scratch_bytes(*static_cast<const ProjectionArgs*>(args));
    case OpId::kGatedProjection:
      return gated_projection_scratch_bytes(*static_cast<const GatedProjectionArgs*>(args));
    case OpId::kRopeKvWrite:
      return rope_kv_write_scratch_bytes(*static_cast<const RopeKvWriteArgs*>(args));
    case OpId::kAttention:
      return attention_scratch_bytes(*static_cast<const AttentionArgs*>(args));
    case OpId::kLmHead:
      return lm_head_scratch_bytes(*static_cast<const LmHeadArgs*>(args));
    case OpId::kArgmax:
      return argmax_scratch_bytes(*static_cast<const ArgmaxArgs*>(args));
    case OpId::kSelectToken:
      return select_token_scratch_bytes(*static_cast<const SelectTokenArgs*>(args));
    case OpId::kGatedDelta:
      return gated_delta_scratch_bytes(*static_cast<const GatedDeltaArgs*>(args));
    case OpId::kGatedDeltaPrefill:
      return gated_delta_prefill_scratch_bytes(*static_cast<const GatedDeltaPrefillArgs*>(args));
    case OpId::kRouter:
      return route_experts_scratch_bytes(*static_cast<const RouterArgs*>(args));
    case OpId::kExpertGatedProjection:
      return expert_gated_projection_scratch_bytes(
          *static_cast<const ExpertGatedProjectionArgs*>(args));
    case OpId::kExpertProjection:
      return expert_projection_scratch_bytes(*static_cast<const ExpertProjectionArgs*>(args));
  }
  return 0;
}

BackendTable make_table(const Variant& variant) {
  BackendTable table = {};
  table.api_version = kBackendApiVersion;
  table.struct_size = sizeof(BackendTable);
  table.name = "cpu";
  table.instruction_set = variant.name;
  table.is_host = 1;
  table.scratch_bytes = &scratch_bytes;
  table.embedding = embedding_kernel(variant.set);
  table.norm = norm_kernel(variant.set);
  table.sum_norm = sum_norm_kernel(variant.set);
  table.projection = projection_kernel(variant.set);
  table.gated_projection = gated_projection_kernel(variant.set);
  table.rope_kv_write = rope_kv_write_kernel(variant.set);
  table.attention = attention_kernel(variant.set);
  table.lm_head = lm_head_kernel(variant.set);
  table.argmax = argmax_kernel(variant.set);
  table.select_token = select_token_kernel(variant.set);
  table.gated_delta = gated_delta_kernel(variant.set);
  table.gated_delta_prefill = gated_delta_prefill_kernel(variant.set);
  table.route_experts = route_experts_kernel(variant.set);
  table.expert_gated_projection = expert_gated_projection_kernel(variant.set);
  table.expert_projection = expert_projection_kernel(variant.set);
  return table;
}

// One table for each of kVariants.
const std::array<BackendTable, kVariants.size()>& tables() {
  static const std::array<BackendTable, kVariants.size()> all = {
      make_table(kVariants[0]), make_table(kVariants[1]), make_table(kVariants[2])};
  return all;
}

}  // namespace
}  // namespace cpu

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const cpu::Variant& variant : cpu::kVariants) {
    if (cpu::usable(variant.set)) names.emplace_back(variant.name);
  }
  return names;
}

Backend cpu_backend(const std::string& instruction_set) {
  std::string accepted;
  for (std::size_t i = 0; i < cpu::kVariants.size(); ++i) {
    const cpu::Variant& variant = cpu::kVariants[i];
    if (!cpu::usable(variant.set)) continue;
    if (instruction_set == variant.name) return Backend(&cpu::tables()[i]);
    accepted += (accepted.empty() ? "" : ", ") + std::string(variant.name);
  }
  throw Error(ErrorCode::kInvalidArgument, "instruction_set: got \"" + instruction_set +
                                               "\"; this build and machine run " + accepted);
}

}  // namespace segki
