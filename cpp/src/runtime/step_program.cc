#include "segki/step_program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/region.h"
#include "ops/dispatch.h"
#include "runtime/memory.h"
#include "segki/error.h"
#include "segki/parallel.h"

namespace segki {
namespace {

constexpr std::int32_t kMaxParts = 1024;

using AnyKernel = void (*)();

// One op: `call` knows the kernel's real type. Until the program is finished `args` is an offset
// into the arena, which still moves.
struct Op {
  AnyKernel kernel = nullptr;
  std::int32_t (*call)(AnyKernel kernel, const void* args, const Exec* exec) = nullptr;
  union {
    std::size_t offset = 0;
    const void* args;
  };
  OpId id = OpId::kEmbedding;
};

template <typename Args>
std::int32_t call_kernel(AnyKernel kernel, const void* args, const Exec* exec) {
  return reinterpret_cast<Kernel<Args>>(kernel)(static_cast<const Args*>(args), exec);
}

const char* name_of(OpId id) {
  switch (id) {
    case OpId::kEmbedding:
      return OpTraits<EmbeddingArgs>::kName;
    case OpId::kNorm:
      return OpTraits<NormArgs>::kName;
    case OpId::kSumNorm:
      return OpTraits<SumNormArgs>::kName;
    case OpId::kProjection:
      return OpTraits<ProjectionArgs>::kName;
    case OpId::kGatedProjection:
      return OpTraits<GatedProjectionArgs>::kName;
    case OpId::kRopeKvWrite:
      return OpTraits<RopeKvWriteArgs>::kName;
    case OpId::kAttention:
      return OpTraits<AttentionArgs>::kName;
    case OpId::kLmHead:
      return OpTraits<LmHeadArgs>::kName;
    case OpId::kArgmax:
      return OpTraits<ArgmaxArgs>::kName;
    case OpId::kSelectToken:
      return OpTraits<SelectTokenArgs>::kName;
    case OpId::kGatedDelta:
      return OpTraits<GatedDeltaArgs>::kName;
    case OpId::kGatedDeltaPrefill:
      return OpTraits<GatedDeltaPrefillArgs>::kName;
    case OpId::kRouter:
      return OpTraits<RouterArgs>::kName;
    case OpId::kExpertGatedProjection:
      return OpTraits<ExpertGatedProjectionArgs>::kName;
    case OpId::kExpertProjection:
      return OpTraits<ExpertProjectionArgs>::kName;
  }
  return "unknown";
}

// The first failure of a run: (number of the op << 32) | code, 0 while there is none. A code is
// never 0.
class Failure {
 public:
  bool happened() const { return value_.load(std::memory_order_relaxed) != 0; }

  void record(std::size_t op, std::int32_t code) {
    std::uint64_t none = 0;
    value_.compare_exchange_strong(
        none, static_cast<std::uint64_t>(op) << 32 | static_cast<std::uint32_t>(code),
        std::memory_order_relaxed);
  }

  std::size_t op() const { return static_cast<std::size_t>(value_.load() >> 32); }
  std::int32_t code() const {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(value_.load()));
  }

 private:
  std::atomic<std::uint64_t> value_{0};
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

struct StepProgram::Impl {
  explicit Impl(Backend given) : backend(given) {}

  Backend backend;
  ParallelHook parallel;  // a null `run`: the default pool
  Allocator allocator;
  std::int32_t parts = 0;  // that scratch and barrier are for
  std::vector<Op> ops;
  std::vector<std::byte> arena;
  std::size_t scratch_needed = 0;  // bytes a part
  std::size_t part_scratch = 0;    // and from one part's to the next
  Block scratch;
  std::optional<Barrier> barrier;

  // What the parts of one run share.
  struct Region {
    const Impl& program;
    void* stream;
    std::int32_t parts;
    std::size_t first_op;
    std::size_t last_op;
    Barrier* barrier;  // between ops; null when a region is one op or one part
    double* seconds;   // a clock around each op, optional
    Failure& failure;
  };

  void run(void* stream, double* seconds);
  void fit(std::int32_t count);
  void throw_failure(const Failure& failure) const;
  static void run_part(void* argument, std::int32_t part);
};

// After a failure the remaining kernels are left out, but every part still passes every barrier:
// none can tell where the others are.
void StepProgram::Impl::run_part(void* argument, std::int32_t part) {
  const Region& region = *static_cast<const Region*>(argument);
  const Impl& program = region.program;
  Exec exec;
  exec.stream = region.stream;
  exec.part = part;
  exec.parts = region.parts;
  if (program.part_scratch > 0) {
    exec.scratch = program.scratch.data() + program.part_scratch * static_cast<std::size_t>(part);
  }
  double* seconds = part == 0 ? region.seconds : nullptr;
  auto start = seconds != nullptr ? std::chrono::steady_clock::now()
                                  : std::chrono::steady_clock::time_point();
  for (std::size_t i = region.first_op; i < region.last_op; ++i) {
    if (!region.failure.happened()) {
      const Op& op = program.ops[i];
      const std::int32_t code = op.call(op.kernel, op.args, &exec);
      if (code != 0) region.failure.record(i, code);
    }
    const bool last = i + 1 == region.last_op;
    if (region.barrier != nullptr && (!last || region.seconds != nullptr)) region.barrier->wait();
    if (seconds != nullptr) {
      seconds[i] = seconds_since(start);
      start = std::chrono::steady_clock::now();
    }
  }
}

void StepProgram::Impl::run(void* stream, double* seconds) {
  ParallelHook hook = parallel;
  if (backend.table().is_host != 0 && parallel.run == nullptr) {
    hook = default_parallel();  // whose size may have changed
    fit(hook.parts);
  }
  Failure failure;
  if (parts == 1) {
    Region region{*this, stream, 1, 0, ops.size(), nullptr, seconds, failure};
    run_part(&region, 0);
  } else if (hook.concurrent != 0 && !inside_region()) {
    Region region{*this, stream, parts, 0, ops.size(), &*barrier, seconds, failure};
    hook.run(hook.context, parts, run_part, &region);
  } else {
    for (std::size_t i = 0; i < ops.size() && !failure.happened(); ++i) {
      Region region{*this, stream, parts, i, i + 1, nullptr, nullptr, failure};
      const auto start = seconds != nullptr ? std::chrono::steady_clock::now()
                                            : std::chrono::steady_clock::time_point();
      hook.run(hook.context, parts, run_part, &region);
      if (seconds != nullptr) seconds[i] = seconds_since(start);
    }
  }
  if (failure.happened()) throw_failure(failure);
}

// Gives each of `count` parts its scratch, and a barrier to meet at. All stays as it was when there
// is no memory.
void StepProgram::Impl::fit(std::int32_t count) {
  if (count == parts) return;
  const auto wanted = static_cast<std::size_t>(count);
  constexpr std::size_t kMaxBytes = std::numeric_limits<std::ptrdiff_t>::max();
  if (scratch_needed > kMaxBytes / wanted - kMemoryAlignment) {
    throw Error(ErrorCode::kOutOfMemory, "step program: scratch of " +
                                             std::to_string(scratch_needed) +
                                             " bytes a part is more than an address can reach");
  }
  part_scratch = round_up(scratch_needed, kMemoryAlignment);
  if (part_scratch * wanted > scratch.bytes()) {
    scratch = Block(allocator, part_scratch * wanted, "step program");
  }
  if (count > 1) barrier.emplace(count);
  parts = count;
}

void StepProgram::Impl::throw_failure(const Failure& failure) const {
  throw Error(ErrorCode::kBackend, "step program: op " + std::to_string(failure.op()) + " (" +
                                       name_of(ops[failure.op()].id) + ") of backend \"" +
                                       backend.name() + "\" failed with code " +
                                       std::to_string(failure.code()));
}

StepProgram::StepProgram(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StepProgram::StepProgram(StepProgram&&) noexcept = default;
StepProgram& StepProgram::operator=(StepProgram&&) noexcept = default;
StepProgram::~StepProgram() = default;

void StepProgram::run(void* stream) { impl_->run(stream, nullptr); }

std::size_t StepProgram::size() const { return impl_->ops.size(); }

std::size_t StepProgram::scratch_bytes() const { return impl_->scratch.bytes(); }

std::vector<std::string> StepProgram::op_names() const {
  std::vector<std::string> names;
  names.reserve(impl_->ops.size());
  for (const Op& op : impl_->ops) names.emplace_back(name_of(op.id));
  return names;
}

std::vector<double> StepProgram::profile() {
  std::vector<double> seconds(impl_->ops.size(), 0.0);
  impl_->run(nullptr, seconds.data());
  return seconds;
}

struct StepProgramBuilder::Impl {
  Impl(Backend given_backend, ParallelHook given_parallel, Allocator given_allocator)
      : backend(given_backend), parallel(given_parallel), allocator(given_allocator) {}

  Backend backend;
  ParallelHook parallel;
  Allocator allocator;
  std::vector<Op> ops;
  std::vector<std::byte> arena;
  std::size_t part_scratch = 0;

  template <typename Args>
  void add(const Args& args);
};

template <typename Args>
void StepProgramBuilder::Impl::add(const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  static_assert(alignof(Args) <= alignof(std::max_align_t));
  check(args);
  const BackendTable& table = backend.table();
  const Kernel<Args> kernel = ops::kernel_of<Args>(table);
  if (kernel == nullptr) {
    throw Error(ErrorCode::kUnsupported, "step program: backend \"" + backend.name() +
                                             "\" has no kernel for " + OpTraits<Args>::kName);
  }
  const std::size_t scratch =
      table.scratch_bytes != nullptr ? table.scratch_bytes(OpTraits<Args>::kId, &args) : 0;
  Op op;
  op.kernel = reinterpret_cast<AnyKernel>(kernel);
  op.call = call_kernel<Args>;
  op.offset = round_up(arena.size(), alignof(std::max_align_t));
  op.id = OpTraits<Args>::kId;
  arena.resize(op.offset + sizeof(Args));
  std::memcpy(arena.data() + op.offset, &args, sizeof(Args));
  ops.push_back(op);
  part_scratch = std::max(part_scratch, scratch);
}

StepProgramBuilder::StepProgramBuilder(Backend backend, ParallelHook parallel, Allocator allocator)
    : impl_(std::make_unique<Impl>(backend, parallel, allocator)) {}

StepProgramBuilder::~StepProgramBuilder() = default;

StepProgramBuilder& StepProgramBuilder::add(const EmbeddingArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const NormArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const SumNormArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const ProjectionArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const GatedProjectionArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const RopeKvWriteArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const AttentionArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const LmHeadArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const ArgmaxArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const SelectTokenArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const GatedDeltaArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const RouterArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const ExpertGatedProjectionArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgramBuilder& StepProgramBuilder::add(const ExpertProjectionArgs& args) {
  impl_->add(args);
  return *this;
}

StepProgram StepProgramBuilder::finish() {
  Impl& builder = *impl_;
  if (builder.ops.empty()) {
    throw Error(ErrorCode::kState, "step program: no op was added");
  }
  const bool on_host = builder.backend.table().is_host != 0;
  auto program = std::make_unique<StepProgram::Impl>(builder.backend);
  program->parallel = builder.parallel;
  program->allocator = builder.allocator;
  std::int32_t parts = 1;
  if (on_host) {
    parts = builder.parallel.run != nullptr ? builder.parallel.parts : default_parallel().parts;
    if (parts < 1 || parts > kMaxParts) {
      throw Error(ErrorCode::kInvalidArgument, "step program: parallel.parts is " +
                                                   std::to_string(parts) + ", accepted is 1 to " +
                                                   std::to_string(kMaxParts));
    }
  }
  if (builder.part_scratch > 0 && !on_host && builder.allocator.allocate == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "step program: allocator is the C++ heap, accepted for the device backend \"" +
                    builder.backend.name() + "\" is one that gives its memory");
  }
  program->scratch_needed = builder.part_scratch;
  program->fit(parts);
  program->ops = std::exchange(builder.ops, {});
  program->arena = std::exchange(builder.arena, {});
  builder.part_scratch = 0;
  for (Op& op : program->ops) op.args = program->arena.data() + op.offset;
  return StepProgram(std::move(program));
}

}  // namespace segki
