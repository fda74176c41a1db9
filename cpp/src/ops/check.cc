#include "ops/check.h"

#include <cmath>

#include "segki/error.h"

namespace segki::ops {
namespace {

std::string text_of(const TensorView& view, const std::int64_t (&values)[kMaxRank]) {
  std::string text = "[";
  for (int d = 0; d < view.rank && d < kMaxRank; ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(values[d]);
  }
  return text + "]";
}

std::string text_of(std::initializer_list<Dim*> dims) {
  std::string text = "[";
  for (const Dim* dim : dims) {
    text += text.size() == 1 ? "" : ", ";
    text += dim->bound() ? std::to_string(dim->value) : std::string(dim->symbol);
  }
  return text + "]";
}

std::string text_of(double value) { return std::to_string(value); }

bool fits(const TensorView& view, std::initializer_list<Dim*> dims) {
  if (view.rank != static_cast<std::int32_t>(dims.size())) {
    return false;
  }
  int d = 0;
  for (const Dim* dim : dims) {
    const std::int64_t size = view.shape[d++];
    if (size < 1 || (dim->bound() && dim->value != size)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void Checker::refuse(const std::string& name, const std::string& given,
                     const std::string& accepted) const {
  throw Error(ErrorCode::kInvalidArgument,
              std::string(op_) + ": argument '" + name + "' " + given + ", accepted " + accepted);
}

void Checker::shape(const char* name, const TensorView& view,
                    std::initializer_list<Dim*> dims) const {
  if (!view.present()) {
    refuse(name, "is absent", text_of(dims));
  }
  if (!fits(view, dims)) {
    refuse(name, "has shape " + text_of(view, view.shape),
           text_of(dims) + (view.rank == static_cast<std::int32_t>(dims.size())
                                ? std::string(" with sizes of at least 1")
                                : std::string()));
  }
  int d = 0;
  for (Dim* dim : dims) {
    dim->value = view.shape[d++];
  }
  const int last = view.rank - 1;
  if (view.shape[last] > 1 && view.stride[last] != 1) {
    refuse(name, "has strides " + text_of(view, view.stride), "a last stride of 1");
  }
  const std::size_t element = size_of(view.dtype);
  if (element > 1 && reinterpret_cast<std::uintptr_t>(view.data) % element != 0) {
    refuse(name, "has an unaligned address", "a multiple of " + std::to_string(element));
  }
}

void Checker::dtype(const char* name, const TensorView& view, DType accepted) const {
  if (view.dtype != accepted) {
    refuse(name, std::string("has dtype ") + name_of(view.dtype), name_of(accepted));
  }
}

DType Checker::model_dtype(const char* name, const TensorView& view) const {
  switch (view.dtype) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kF16:
      return view.dtype;
    default:
      refuse(name, std::string("has dtype ") + name_of(view.dtype), "f32, bf16 or f16");
  }
}

void Checker::dense(const char* name, const TensorView& view) const {
  std::int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    if (view.shape[d] > 1 && view.stride[d] != stride) {
      refuse(
          name,
          "has shape " + text_of(view, view.shape) + " and strides " + text_of(view, view.stride),
          "dense row-major memory");
    }
    stride *= view.shape[d];
  }
}

void Checker::writable(const char* name, const TensorView& view) const {
  std::int64_t extent = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    if (view.shape[d] == 1) {
      continue;
    }
    if (view.stride[d] < extent) {
      refuse(name, "has strides " + text_of(view, view.stride),
             "an output whose elements do not overlap");
    }
    extent = view.stride[d] * (view.shape[d] - 1) + extent;
  }
}

void Checker::distinct(const char* name, const TensorView& view, const char* other_name,
                       const TensorView& other) const {
  if (view.present() && view.data == other.data) {
    refuse(name, std::string("starts at the address of '") + other_name + "'", "another buffer");
  }
}

void Checker::absent(const char* name, const TensorView& view, const char* when) const {
  if (view.present()) {
    refuse(name, "is present", std::string("none ") + when);
  }
}

void Checker::rows(const char* name, const Dim& rows) const {
  if (rows.value > kMaxRows) {
    refuse(name, "has " + std::to_string(rows.value) + " rows", "1 to " + std::to_string(kMaxRows));
  }
}

void Checker::number(const char* name, std::int64_t value, std::int64_t smallest,
                     std::int64_t largest) const {
  if (value < smallest || value > largest) {
    refuse(name, "is " + std::to_string(value),
           std::to_string(smallest) + " to " + std::to_string(largest));
  }
}

void Checker::finite(const char* name, double value) const {
  if (!std::isfinite(value)) {
    refuse(name, "is " + text_of(value), "a finite number");
  }
}

void Checker::not_negative(const char* name, double value) const {
  if (!std::isfinite(value) || value < 0.0) {
    refuse(name, "is " + text_of(value), "a finite number of at least 0");
  }
}

void Checker::norm_spec(const char* name, const NormSpec& norm) const {
  const std::string field(name);
  const auto kind = static_cast<std::int32_t>(norm.kind);
  if (kind < 0 || kind > static_cast<std::int32_t>(NormKind::kLayer)) {
    refuse(field + ".kind", "is " + std::to_string(kind), "0 (none), 1 (rms) or 2 (layer)");
  }
  if (!std::isfinite(norm.eps) || norm.eps < 0.0F) {
    refuse(field + ".eps", "is " + text_of(norm.eps), "a finite number of at least 0");
  }
  if (!std::isfinite(norm.weight_offset)) {
    refuse(field + ".weight_offset", "is " + text_of(norm.weight_offset), "a finite number");
  }
}

std::size_t bytes_of(const TensorView& view) {
  if (!view.present()) {
    return 0;
  }
  std::size_t bytes = size_of(view.dtype);
  for (int d = 0; d < view.rank; ++d) {
    bytes *= static_cast<std::size_t>(view.shape[d]);
  }
  return bytes;
}

}  // namespace segki::ops
