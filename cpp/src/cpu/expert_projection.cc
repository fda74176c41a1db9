// Second half of the chosen experts' MLPs and the weighted sum on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/expert_projection.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/experts-inl.h"
#include "cpu/matmul-inl.h"

#ifndef SEGKI_CPU_EXPERT_PROJECTION_SHARED_
#define SEGKI_CPU_EXPERT_PROJECTION_SHARED_
namespace segki::cpu {

// Output features that go through all experts before they are summed up.
constexpr std::int64_t kExpertColumns = 96;

// Where a part keeps what; offsets in bytes.
struct ExpertScratch {
  std::size_t packed;
  std::size_t outputs;
  std::size_t sums;
  std::size_t total;

  explicit ExpertScratch(const ExpertProjectionArgs& args) {
    const std::int64_t pairs = args.x.shape[0] * args.x.shape[1], k = args.x.shape[2];
    const auto line = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    packed = line(ExpertGroups::scratch_bytes(args.weight.shape[0], pairs));
    // A group of n rows takes the tiles of fewer than 2 n rows.
    outputs = packed + 2 * static_cast<std::size_t>(pairs) * packed_row_bytes(k);
    sums = outputs + line(static_cast<std::size_t>(pairs * kExpertColumns) * sizeof(float));
    total = sums + (args.transposed != 0
                        ? static_cast<std::size_t>(kMaxTileRows * kWideColumns) * sizeof(float)
                        : 0);
  }

  static std::size_t packed_row_bytes(std::int64_t k) {
    return static_cast<std::size_t>((k + kMaxChunk - 1) / kMaxChunk * kMaxChunk) * sizeof(float);
  }
};

}  // namespace segki::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

// Floats that a group of `rows` packed rows takes.
HWY_INLINE std::int64_t packed_floats(std::int64_t rows, std::int64_t k) {
  std::int64_t tiles = 0;
  for (std::int64_t row = 0; row < rows; row += tile_rows(row, rows)) tiles += tile_rows(row, rows);
  return tiles * padded_k(k);
}

// y_j of a row at `columns` columns from `column` on; weighted, summed, scaled, with the shared
// expert.
template <typename T>
void combine(const ExpertProjectionArgs& args, const float* outputs, std::int64_t row,
             std::int64_t column, std::int64_t columns) {
  const std::int64_t slots = args.experts.shape[1];
  const auto* experts = args.experts.as<const std::int32_t>() + row * args.experts.stride[0];
  const float* weights = args.weights.as<const float>() + row * args.weights.stride[0];
  const T* shared =
      args.shared.present() ? args.shared.as<const T>() + row * args.shared.stride[0] : nullptr;
  const bool gated = args.shared_gate.present();
  const VF gate = gated ? rounded<T>(sigmoid(set(load_one(args.shared_gate.as<const T>() +
                                                          row * args.shared_gate.stride[0]))))
                        : set(1.0F);
  T* out = args.out.as<T>() + row * args.out.stride[0];
  for (std::int64_t i = 0; i < columns; i += kLanes) {
    const std::int64_t n = std::min(kLanes, columns - i);
    const auto product = [&](std::int64_t j) {
      const VF y = load_live(outputs + (row * slots + j) * kExpertColumns + i, n);
      const VF p = hn::Mul(y, set(weights[j]));
      return args.round_products != 0 ? rounded<T>(p) : p;
    };
    VF sum = zero();
    if (args.round_sums == 0) {
      for (std::int64_t j = 0; j < slots; ++j) sum = hn::Add(sum, product(j));
    } else {
      std::int32_t last = -1;
      for (std::int64_t added = 0; added < slots; ++added) {  // the next larger expert
        std::int64_t next = -1;
        for (std::int64_t j = 0; j < slots; ++j) {
          if (experts[j] > last && (next < 0 || experts[j] < experts[next])) next = j;
        }
        if (next < 0) break;
        last = experts[next];
        sum = rounded<T>(hn::Add(sum, product(next)));
      }
    }
    sum = rounded<T>(sum);
    if (args.routed_scale != 1.0F) sum = rounded<T>(hn::Mul(sum, set(args.routed_scale)));
    if (shared != nullptr) {
      VF t = load_live(shared + column + i, n);
      if (gated) t = rounded<T>(hn::Mul(gate, t));
      sum = rounded<T>(hn::Add(sum, t));
    }
    if (args.out_scale != 1.0F) sum = hn::Mul(sum, set(args.out_scale));
    store_live(sum, out + column + i, n);
  }
}

template <typename T>
void run(const ExpertProjectionArgs& args, const Exec& exec) {
  const std::int64_t rows = args.x.shape[0], k = args.x.shape[2];
  const std::int64_t width = args.out.shape[1];
  const Range mine = part_range(width, kSplitBlock, exec.part, exec.parts);
  if (mine.begin == mine.end) return;
  const ExpertScratch layout(args);
  char* scratch = static_cast<char*>(exec.scratch);
  const ExpertGroups groups(args.experts, args.weight.shape[0], scratch);
  float* packed = reinterpret_cast<float*>(scratch + layout.packed);
  float* outputs = reinterpret_cast<float*>(scratch + layout.outputs);
  float* sums = reinterpret_cast<float*>(scratch + layout.sums);

  float* to = packed;
  for (std::int64_t i = 0; i < groups.distinct(); ++i) {
    const auto row_at = [&](std::int64_t n) {
      return args.x.as<const T>() + groups.pair(i, n) * k;
    };
    if (args.transposed != 0) {
      pack_rows_transposed<T>(groups.size(i), k, row_at, to);
    } else {
      pack_rows<T>(groups.size(i), k, row_at, to);
    }
    to += packed_floats(groups.size(i), k);
  }

  for (std::int64_t column = mine.begin; column < mine.end; column += kExpertColumns) {
    const Range range = {column, std::min(mine.end, column + kExpertColumns)};
    const float* from = packed;
    for (std::int64_t i = 0; i < groups.distinct(); ++i) {
      const std::int64_t e = groups.expert(i), count = groups.size(i);
      const T* bias = expert_address<T>(args.bias, e);
      const auto store = [&](std::int64_t row, std::int64_t at, std::int64_t columns,
                             const float* const(&of_row)[1]) {
        float* y = outputs + groups.pair(i, row) * kExpertColumns + (at - column);
        for (std::int64_t c = 0; c < columns; c += kLanes) {
          const std::int64_t n = std::min(kLanes, columns - c);
          store_live(biased(of_row[0] + c, bias == nullptr ? nullptr : bias + at + c, n), y + c, n);
        }
      };
      const T* weight = expert_address<T>(args.weight, e);
      if (args.transposed != 0) {
        matmul_transposed(weight, args.weight_stride, range, k, count, from, sums, store);
      } else {
        const bool last = i + 1 == groups.distinct();
        const T* after = expert_address<T>(args.weight, groups.expert(last ? 0 : i + 1)) +
                         (last ? range.end : range.begin) * k;
        matmul<1, T>({weight}, range, k, count, from, store, after);
      }
      from += packed_floats(count, k);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      combine<T>(args, outputs, r, column, range.end - range.begin);
    }
  }
}

}  // namespace

std::int32_t expert_projection(const ExpertProjectionArgs* args, const Exec* exec) {
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

Kernel<ExpertProjectionArgs> expert_projection_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, expert_projection);
}

std::size_t expert_projection_scratch_bytes(const ExpertProjectionArgs& args) {
  return ExpertScratch(args).total;
}

}  // namespace segki::cpu
#endif
