// Tensor views: an address, a dtype, a shape and strides. A view owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "segki/export.h"

namespace segki {

enum class DType : std::int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI32 = 3, kI64 = 4, kU8 = 5 };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

SEGKI_EXPORT const char* name_of(DType dtype);

constexpr int kMaxRank = 4;

// Plain data: crosses the backend boundary as it is. Strides are in elements. A default-constructed
// view is absent
// (`present()` is false), which is how an optional argument is left out.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int32_t rank = 0;
  std::int64_t shape[kMaxRank] = {0, 0, 0, 0};
  std::int64_t stride[kMaxRank] = {0, 0, 0, 0};

  bool present() const { return data != nullptr; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A dense row-major view. `rank` is the number of sizes given.
template <typename... Sizes>
TensorView dense_view(void* data, DType dtype, Sizes... sizes) {
  static_assert(sizeof...(Sizes) >= 1 && sizeof...(Sizes) <= kMaxRank);
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<std::int32_t>(sizeof...(Sizes));
  const std::int64_t all[] = {static_cast<std::int64_t>(sizes)...};
  std::int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    view.shape[d] = all[d];
    view.stride[d] = stride;
    stride *= all[d];
  }
  return view;
}

}  // namespace segki
