// A backend as a third party would write it: its own library, the public headers alone, and a
// kernel for one op. Compiled several times, each with one thing wrong.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "segki/backend.h"
#include "segki/ops.h"

namespace {

// f32, kRms, optional weight; rows are shared out among the parts.
std::int32_t norm(const segki::NormArgs* args, const segki::Exec* exec) {
  using segki::DType;
  if (args->x.dtype != DType::kF32 || args->norm.kind != segki::NormKind::kRms) {
    return 2;
  }
  const std::int64_t hidden = args->x.shape[1];
  for (std::int64_t row = exec->part; row < args->x.shape[0]; row += exec->parts) {
    const float* x = args->x.as<const float>() + row * args->x.stride[0];
    float* out = args->out.as<float>() + row * args->out.stride[0];
    float* scratch = static_cast<float*>(exec->scratch);
    std::copy(x, x + hidden, scratch);
    double sum = 0.0;
    for (std::int64_t i = 0; i < hidden; ++i) {
      sum += static_cast<double>(scratch[i]) * scratch[i];
    }
    const double factor =
        1.0 / std::sqrt(sum / static_cast<double>(hidden) + static_cast<double>(args->norm.eps));
    for (std::int64_t i = 0; i < hidden; ++i) {
      const float weight = args->weight.present() ? args->weight.as<const float>()[i] : 1.0F;
      out[i] = static_cast<float>(scratch[i] * factor * (args->norm.weight_offset + weight));
    }
  }
  return 0;
}

[[maybe_unused]] std::size_t scratch_bytes(segki::OpId op, const void* args) {
  if (op != segki::OpId::kNorm) {
    return 0;
  }
  return static_cast<std::size_t>(static_cast<const segki::NormArgs*>(args)->x.shape[1]) *
         sizeof(float);
}

[[maybe_unused]] const segki::BackendTable* table() {
  [[maybe_unused]] static const segki::BackendTable result = [] {
    segki::BackendTable t{};
    t.api_version = segki::kBackendApiVersion;
    t.struct_size = sizeof(t);
    t.name = "stub";
    t.instruction_set = "none";
    t.is_host = 1;
    t.scratch_bytes = &scratch_bytes;
    t.norm = &norm;
#if defined(SEGKI_STUB_OLD)
    // An older backend, whose table ended within sum_norm: that slot is no whole one, and what
    // follows is not part of the table.
    t.name = "stub_old";
    t.struct_size = offsetof(segki::BackendTable, sum_norm) + 4;
    t.sum_norm = reinterpret_cast<segki::Kernel<segki::SumNormArgs>>(&norm);
#elif defined(SEGKI_STUB_OTHER_VERSION)
    t.name = "stub_other_version";
    t.api_version = segki::kBackendApiVersion + 1;
#elif defined(SEGKI_STUB_NAME_TAKEN)
    t.name = "cpu";
#endif
    return t;
  }();
#if defined(SEGKI_STUB_NO_DEVICE)
  return nullptr;
#else
  return &result;
#endif
}

}  // namespace

#if !defined(SEGKI_STUB_NO_ENTRY)
extern "C" SEGKI_EXPORT const segki::BackendTable* segki_backend_table() { return table(); }
#endif
