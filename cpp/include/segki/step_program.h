// The step as a flat list of ops over fixed addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "segki/backend.h"
#include "segki/export.h"
#include "segki/hybrid_cache.h"
#include "segki/ops.h"

namespace segki {

// Runs its ops in order, each reading what the earlier ones wrote. On the host with a concurrent
// ParallelHook the whole program is one region with a barrier between ops. Never blocks on a
// device, and never allocates but in the first run after the default pool has got another size. The
// memory behind the views belongs to the caller and must outlive the program.
class SEGKI_EXPORT StepProgram {
 public:
  StepProgram(StepProgram&&) noexcept;
  StepProgram& operator=(StepProgram&&) noexcept;
  ~StepProgram();

  // Not thread-safe: the runs of one program, and of programs whose views share memory that one of
  // them writes, must come one after another. Other programs may run at the same time. Throws
  // Error(kBackend) naming the op when a kernel reports a failure, Error(kOutOfMemory) when there
  // is no scratch for a default pool that has grown.
  void run(void* stream = nullptr);

  std::size_t size() const;                   // number of ops
  std::size_t scratch_bytes() const;          // allocated for all parts
  std::vector<std::string> op_names() const;  // in order
  // Runs once with a clock around each op: seconds an op, in order. For reports, not for the loop.
  std::vector<double> profile();

 private:
  friend class StepProgramBuilder;
  struct Impl;
  explicit StepProgram(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Checks each op as it is added, so that a finished program has nothing left to check.
class SEGKI_EXPORT StepProgramBuilder {
 public:
  // `parallel` is used at run time; its `parts` is read when the program is finished. A null `run`
  // is the default pool with the size that it has at each run. `allocator` is used for scratch as
  // long as the program lives.
  explicit StepProgramBuilder(Backend backend, ParallelHook parallel = {},
                              Allocator allocator = {});
  ~StepProgramBuilder();

  // Throws Error(kInvalidArgument) from the op's check, Error(kUnsupported) when the backend has no
  // kernel.
  StepProgramBuilder& add(const EmbeddingArgs& args);
  StepProgramBuilder& add(const NormArgs& args);
  StepProgramBuilder& add(const SumNormArgs& args);
  StepProgramBuilder& add(const ProjectionArgs& args);
  StepProgramBuilder& add(const GatedProjectionArgs& args);
  StepProgramBuilder& add(const RopeKvWriteArgs& args);
  StepProgramBuilder& add(const AttentionArgs& args);
  StepProgramBuilder& add(const LmHeadArgs& args);
  StepProgramBuilder& add(const ArgmaxArgs& args);
  StepProgramBuilder& add(const SelectTokenArgs& args);
  StepProgramBuilder& add(const GatedDeltaArgs& args);
  StepProgramBuilder& add(const RouterArgs& args);
  StepProgramBuilder& add(const ExpertGatedProjectionArgs& args);
  StepProgramBuilder& add(const ExpertProjectionArgs& args);

  // The builder is empty afterwards. Throws Error(kState) when no op was added.
  StepProgram finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace segki
