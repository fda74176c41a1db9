// Which rows go to which expert: the pairs (row, slot) of a step, grouped by expert. Pairs are
// numbered row * k + slot; within a group they are in that order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "segki/tensor.h"

namespace segki::cpu {

class ExpertGroups {
 public:
  static std::size_t scratch_bytes(std::int64_t experts, std::int64_t pairs) {
    return static_cast<std::size_t>(experts + 1 + experts + pairs) * sizeof(std::int32_t);
  }

  // `chosen` is i32 [rows, k]; `scratch` is scratch_bytes() of memory.
  ExpertGroups(const TensorView& chosen, std::int64_t experts, void* scratch)
      : experts_(experts),
        begins_(static_cast<std::int32_t*>(scratch)),
        distinct_(begins_ + experts + 1),
        pairs_(distinct_ + experts) {
    const std::int64_t rows = chosen.shape[0], k = chosen.shape[1];
    for (std::int64_t e = 0; e <= experts; ++e) begins_[e] = 0;
    const auto expert_of = [&chosen](std::int64_t r, std::int64_t j) {
      return chosen.as<const std::int32_t>()[r * chosen.stride[0] + j];
    };
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t j = 0; j < k; ++j) ++begins_[expert_of(r, j) + 1];
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      if (begins_[e + 1] > 0) distinct_[count_++] = static_cast<std::int32_t>(e);
      begins_[e + 1] += begins_[e];
    }
    // Filled from the ends: afterwards begins_[e + 1] has become the group's begin.
    for (std::int64_t r = rows; r-- > 0;) {
      for (std::int64_t j = k; j-- > 0;) {
        pairs_[--begins_[expert_of(r, j) + 1]] = static_cast<std::int32_t>(r * k + j);
      }
    }
    total_ = static_cast<std::int32_t>(rows * k);
  }

  // Experts that some row chose, ascending.
  std::int64_t distinct() const { return count_; }
  std::int64_t expert(std::int64_t i) const { return distinct_[i]; }
  // Of the i-th of them.
  std::int64_t size(std::int64_t i) const { return end(i) - begin(i); }
  std::int64_t pair(std::int64_t i, std::int64_t n) const { return pairs_[begin(i) + n]; }

 private:
  std::int32_t begin(std::int64_t i) const { return begins_[distinct_[i] + 1]; }
  std::int32_t end(std::int64_t i) const { return i + 1 < count_ ? begin(i + 1) : total_; }

  std::int64_t experts_;
  std::int64_t count_ = 0;
  std::int32_t total_ = 0;
  std::int32_t* begins_;
  std::int32_t* distinct_;
  std::int32_t* pairs_;
};

// Address of expert e's matrix (or bias) in a table of addresses; null when the table is absent.
template <typename T>
inline const T* expert_address(const TensorView& table, std::int64_t e) {
  if (!table.present()) return nullptr;
  return reinterpret_cast<const T*>(  // NOLINT
      static_cast<std::uintptr_t>(table.as<const std::int64_t>()[e * table.stride[0]]));
}

}  // namespace segki::cpu
