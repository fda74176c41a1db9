// First half of the chosen experts' gated MLPs on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/expert_gated_projection.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/experts-inl.h"
#include "cpu/matmul-inl.h"

#ifndef SEGKI_CPU_EXPERT_GATED_SHARED_
#define SEGKI_CPU_EXPERT_GATED_SHARED_
namespace segki::cpu {

// [K, N] weights: columns whose gate waits for its up.
constexpr std::int64_t kGateColumns = 256;

inline std::size_t round_up_to_line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace segki::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

// Bias, activation, product and store for the rows of one expert.
template <typename T>
struct ExpertGateEpilogue {
  const ExpertGroups& groups;
  std::int64_t group;
  const T* gate_bias;
  const T* up_bias;
  T* out;
  std::int64_t width;
  Activation activation;
  bool fp32_activation;

  HWY_INLINE void operator()(std::int64_t row, std::int64_t column, std::int64_t count,
                             const float* const (&sums)[2]) const {
    T* to = out + groups.pair(group, row) * width + column;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const std::int64_t n = std::min(kLanes, count - i);
      const VF gate =
          biased(sums[0] + i, gate_bias == nullptr ? nullptr : gate_bias + column + i, n);
      const VF up = biased(sums[1] + i, up_bias == nullptr ? nullptr : up_bias + column + i, n);
      const VF activated =
          fp32_activation ? activate<float>(activation, gate) : activate<T>(activation, gate);
      store_live(hn::Mul(activated, up), to + i, n);
    }
  }
};

// Both products of a range of columns with weights [K, N]: the gate's sums wait in `gates`.
template <typename T>
void gated_transposed(const T* gate, const T* up, std::int64_t stride, Range range, std::int64_t k,
                      std::int64_t rows, const float* packed, float* sums, float* gates,
                      const ExpertGateEpilogue<T>& epilogue) {
  for (std::int64_t n = range.begin; n < range.end; n += kGateColumns) {
    const Range some = {n, std::min(range.end, n + kGateColumns)};
    matmul_transposed(gate, stride, some, k, rows, packed, sums,
                      [=](std::int64_t row, std::int64_t column, std::int64_t count,
                          const float* const(&of_row)[1]) {
                        std::copy_n(of_row[0], count, gates + row * kGateColumns + column - n);
                      });
    matmul_transposed(
        up, stride, some, k, rows, packed, sums,
        [&](std::int64_t row, std::int64_t column, std::int64_t count,
            const float* const(&of_row)[1]) {
          const float* const both[2] = {gates + row * kGateColumns + column - n, of_row[0]};
          epilogue(row, column, count, both);
        });
  }
}

template <typename T>
void run(const ExpertGatedProjectionArgs& args, const Exec& exec) {
  const std::int64_t rows = args.x.shape[0], k = args.x.shape[1];
  const std::int64_t slots = args.experts.shape[1], experts = args.gate.shape[0];
  const std::int64_t width = args.out.shape[2];
  const ExpertGroups groups(args.experts, experts, exec.scratch);
  float* packed = reinterpret_cast<float*>(
      static_cast<char*>(exec.scratch) +
      round_up_to_line(ExpertGroups::scratch_bytes(experts, rows * slots)));
  float* sums = packed + packed_bytes(rows, k) / sizeof(float);
  float* gates = sums + kMaxTileRows * kWideColumns;

  // Units: blocks of columns of the chosen experts, one expert after the other.
  const std::int64_t blocks = (width + kSplitBlock - 1) / kSplitBlock;
  const Range mine = part_range(groups.distinct() * blocks, 1, exec.part, exec.parts);
  for (std::int64_t unit = mine.begin; unit < mine.end;) {
    const std::int64_t i = unit / blocks;
    const std::int64_t end = std::min(mine.end, (i + 1) * blocks);
    const Range range = {(unit - i * blocks) * kSplitBlock,
                         std::min(width, (end - i * blocks) * kSplitBlock)};
    unit = end;
    const std::int64_t e = groups.expert(i), count = groups.size(i);
    const auto row_at = [&](std::int64_t n) {
      return args.x.as<const T>() + groups.pair(i, n) / slots * args.x.stride[0];
    };
    const ExpertGateEpilogue<T> epilogue = {groups,
                                            i,
                                            expert_address<T>(args.gate_bias, e),
                                            expert_address<T>(args.up_bias, e),
                                            args.out.as<T>(),
                                            width,
                                            args.activation,
                                            args.fp32_activation != 0};
    const T* gate = expert_address<T>(args.gate, e);
    const T* up = expert_address<T>(args.up, e);
    if (args.transposed != 0) {
      pack_rows_transposed<T>(count, k, row_at, packed);
      gated_transposed(gate, up, args.weight_stride, range, k, count, packed, sums, gates,
                       epilogue);
    } else {
      pack_rows<T>(count, k, row_at, packed);
      const T* after =
          unit < mine.end ? expert_address<T>(args.gate, groups.expert(i + 1)) : nullptr;
      matmul<2, T>({gate, up}, range, k, count, packed, epilogue, after);
    }
  }
}

}  // namespace

std::int32_t expert_gated_projection(const ExpertGatedProjectionArgs* args, const Exec* exec) {
  switch (args->x.dtype) {
    case DType::kF32:
      run<float>(*args, *exec);
      return 0;
    case DType::kBF16:
      run<Bf16>(*args, *exec);
      return 0;
    case DType::kF16:
      run<F16>(*args, *exec);
      return 0;
    default:
      return static_cast<std::int32_t>(ErrorCode::kInvalidArgument);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<ExpertGatedProjectionArgs> expert_gated_projection_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, expert_gated_projection);
}

std::size_t expert_gated_projection_scratch_bytes(const ExpertGatedProjectionArgs& args) {
  const std::int64_t rows = args.x.shape[0];
  const std::size_t gates =
      args.transposed != 0 ? static_cast<std::size_t>(rows * kGateColumns) * sizeof(float) : 0;
  return round_up_to_line(
             ExpertGroups::scratch_bytes(args.gate.shape[0], rows * args.experts.shape[1])) +
         matmul_scratch_bytes(rows, args.x.shape[1], args.transposed != 0) + gates;
}

}  // namespace segki::cpu
#endif
