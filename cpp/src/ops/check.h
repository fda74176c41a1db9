// Helpers of the argument checks. A check that succeeds allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "segki/ops.h"
#include "segki/tensor.h"

namespace segki::ops {

// A size that several arguments share: free until the first argument gives it a value.
struct Dim {
  const char* symbol;
  std::int64_t value = 0;

  bool bound() const { return value != 0; }
};

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  // Throws "<op>: argument '<name>' <given>, accepted <accepted>".
  [[noreturn]] void refuse(const std::string& name, const std::string& given,
                           const std::string& accepted) const;

  // The view is there, has these sizes (a free one is bound to what is found), a dense last
  // dimension and an aligned address.
  void shape(const char* name, const TensorView& view, std::initializer_list<Dim*> dims) const;
  void dtype(const char* name, const TensorView& view, DType accepted) const;
  void shape(const char* name, const TensorView& view, std::initializer_list<Dim*> dims,
             DType accepted) const {
    shape(name, view, dims);
    dtype(name, view, accepted);
  }
  // As shape() with a dtype, where the view is present.
  void optional(const char* name, const TensorView& view, std::initializer_list<Dim*> dims,
                DType accepted) const {
    if (view.present()) {
      shape(name, view, dims, accepted);
    }
  }
  // f32, bf16 or f16.
  DType model_dtype(const char* name, const TensorView& view) const;
  // Row-major without gaps.
  void dense(const char* name, const TensorView& view) const;
  // No element of an output lies on another element of it.
  void writable(const char* name, const TensorView& view) const;
  // The two do not start at the same address.
  void distinct(const char* name, const TensorView& view, const char* other_name,
                const TensorView& other) const;
  void absent(const char* name, const TensorView& view, const char* when) const;
  // Between 1 and kMaxRows.
  void rows(const char* name, const Dim& rows) const;

  void number(const char* name, std::int64_t value, std::int64_t smallest,
              std::int64_t largest) const;
  void finite(const char* name, double value) const;
  void not_negative(const char* name, double value) const;
  void norm_spec(const char* name, const NormSpec& norm) const;

 private:
  const char* op_;
};

// Bytes that the elements of a view take; 0 for an absent one.
std::size_t bytes_of(const TensorView& view);

}  // namespace segki::ops
