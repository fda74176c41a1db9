// Token and position embedding on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/embedding.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
const T* table_row(const TensorView& table, std::int64_t row) {
  return table.as<const T>() +
         std::clamp(row, std::int64_t{0}, table.shape[0] - 1) * table.stride[0];
}

template <typename T>
void run(const EmbeddingArgs& args, const Exec& exec) {
  const std::int64_t size = args.out.shape[1];
  const Range rows = part_range(args.out.shape[0], 1, exec.part, exec.parts);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* x =
        table_row<T>(args.table, args.tokens.as<std::int64_t>()[r * args.tokens.stride[0]]);
    const T* position = nullptr;
    if (args.position_table.present()) {
      const std::int64_t p = args.positions.as<std::int32_t>()[r * args.positions.stride[0]];
      position = table_row<T>(args.position_table, p + args.position_offset);
    }
    T* out = args.out.as<T>() + r * args.out.stride[0];
    if (args.scale == 1.0F && position == nullptr) {
      std::copy(x, x + size, out);
      continue;
    }
    for (std::int64_t i = 0; i < size; i += kLanes) {
      const std::int64_t left = size - i;
      VF y = rounded<T>(hn::Mul(load_row(x + i, left), set(args.scale)));
      if (position != nullptr) y = hn::Add(y, load_row(position + i, left));
      store_row(y, out + i, left);
    }
  }
}

}  // namespace

std::int32_t embedding(const EmbeddingArgs* args, const Exec* exec) {
  return with_type(args->table.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<EmbeddingArgs> embedding_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, embedding);
}

std::size_t embedding_scratch_bytes(const EmbeddingArgs&) { return 0; }

}  // namespace segki::cpu
#endif  // HWY_ONCE
