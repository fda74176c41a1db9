// The boundary to a backend: a table of kernels for one kind of device, plain C data.
//
// A backend is a library that exports `segki_backend_table` (see BackendEntry). A slot that is null
// means that the backend has no kernel for that op. Slots are only ever added at the end: a table
// with a smaller `struct_size` is an older backend, its missing slots count as null; all before the
// first kernel is in every table. `api_version` changes when an argument struct or the meaning of a
// slot changes; another version is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "segki/export.h"

namespace segki {

constexpr std::uint32_t kBackendApiVersion = 2;

struct EmbeddingArgs;
struct NormArgs;
struct SumNormArgs;
struct ProjectionArgs;
struct GatedProjectionArgs;
struct RopeKvWriteArgs;
struct AttentionArgs;
struct LmHeadArgs;
struct ArgmaxArgs;
struct SelectTokenArgs;
struct GatedDeltaArgs;
struct GatedDeltaPrefillArgs;
struct RouterArgs;
struct ExpertGatedProjectionArgs;
struct ExpertProjectionArgs;

// How a kernel is asked to run. The work of an op is a set of independent parts: a host backend is
// called once for each part in [0, parts), at the same time from several threads, and a part never
// waits for another. A device backend is called with parts == 1 and enqueues on `stream`. Results
// do not depend on `parts`.
struct Exec {
  void* stream = nullptr;
  std::int32_t part = 0;
  std::int32_t parts = 1;
  void* scratch = nullptr;  // this part's own scratch, 64-byte aligned, at least `scratch_bytes(op,
                            // args)` bytes
};

enum class OpId : std::int32_t {
  kEmbedding = 0,
  kNorm = 1,
  kSumNorm = 2,
  kProjection = 3,
  kGatedProjection = 4,
  kRopeKvWrite = 5,
  kAttention = 6,
  kLmHead = 7,
  kArgmax = 8,
  kSelectToken = 9,
  kGatedDelta = 10,
  kGatedDeltaPrefill = 11,
  kRouter = 12,
  kExpertGatedProjection = 13,
  kExpertProjection = 14,
};

// Arguments have been checked when a kernel is called. The result is an ErrorCode as an integer; 0
// is success.
template <typename Args>
using Kernel = std::int32_t (*)(const Args* args, const Exec* exec);

struct BackendTable {
  std::uint32_t api_version;
  std::uint32_t struct_size;
  const char* name;             // "cpu", "cuda", ...
  const char* instruction_set;  // for reports: "avx512", "sm_90", ...
  std::int32_t is_host;  // non-zero: kernels run in the calling thread on host memory, in parts

  // Bytes of scratch that one part of this op needs; the slot may be null (none needed).
  std::size_t (*scratch_bytes)(OpId op, const void* args);

  Kernel<EmbeddingArgs> embedding;
  Kernel<NormArgs> norm;
  Kernel<SumNormArgs> sum_norm;
  Kernel<ProjectionArgs> projection;
  Kernel<GatedProjectionArgs> gated_projection;
  Kernel<RopeKvWriteArgs> rope_kv_write;
  Kernel<AttentionArgs> attention;
  Kernel<LmHeadArgs> lm_head;
  Kernel<ArgmaxArgs> argmax;
  Kernel<SelectTokenArgs> select_token;
  Kernel<GatedDeltaArgs> gated_delta;
  Kernel<GatedDeltaPrefillArgs> gated_delta_prefill;
  Kernel<RouterArgs> route_experts;
  Kernel<ExpertGatedProjectionArgs> expert_gated_projection;
  Kernel<ExpertProjectionArgs> expert_projection;
};

// What a backend library exports under the name `segki_backend_table`: its table, valid for the
// life of the process, or null when the device is not usable here.
using BackendEntry = const BackendTable* (*)();
constexpr const char* kBackendEntryName = "segki_backend_table";

// A handle to a registered backend; cheap to copy, valid for the life of the process.
class SEGKI_EXPORT Backend {
 public:
  explicit Backend(const BackendTable* table) : table_(table) {}
  const BackendTable& table() const { return *table_; }
  std::string name() const { return table_->name; }

 private:
  const BackendTable* table_;
};

// "cpu" is built in; others must have been loaded. Throws Error(kBackend) naming the known ones.
SEGKI_EXPORT Backend backend(const std::string& name);

// Loads a backend library by path and registers it under its table's name (again: the same handle).
// Throws Error(kBackend) with the path and the reason: not found, no entry point, another
// api_version, no usable device, a name already taken by another library.
SEGKI_EXPORT Backend load_backend(const std::string& path);

SEGKI_EXPORT std::vector<std::string> backend_names();

// CPU instruction sets that this build and machine can run, best first ("avx512", "avx2",
// "generic").
SEGKI_EXPORT std::vector<std::string> cpu_instruction_sets();

// The CPU backend forced to one of them (for tests and comparisons). Throws
// Error(kInvalidArgument).
SEGKI_EXPORT Backend cpu_backend(const std::string& instruction_set);

}  // namespace segki
