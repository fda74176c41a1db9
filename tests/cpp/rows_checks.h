// What every op that works on rows must keep, for one backend table: the reference's values, writes
// only where the op writes, and bits that depend neither on the batch nor on the parts.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "op_cases_rows.h"
#include "segki/backend.h"

namespace segki::test {

// Of this run; SEGKI_TEST_SEED repeats one.
inline std::uint64_t fresh_seed() {
  const char* given = std::getenv("SEGKI_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
}

inline const char* text_of(DType dtype) {
  return dtype == DType::kF32 ? "f32" : dtype == DType::kBF16 ? "bf16" : "f16";
}

// As a power of two: no result is further away from the reference than two steps of its dtype.
inline double tolerance(DType dtype) {
  if (dtype == DType::kBF16) return 0x1p-6;
  return dtype == DType::kF16 ? 0x1p-9 : 4e-6;
}

// Each element in the tolerance of its own dtype: a state may be fp32 beside bf16 activations.
template <typename Args>
void check_values(const std::vector<reference::Expected>& expected) {
  std::size_t wrong = 0, different = 0, results = 0, doubtful = 0;
  for (const reference::Expected& e : expected) {
    const double got = reference::get(e.view, e.offset);
    // Copies (magnitude 0) and fp32 are no roundings to a half-width dtype.
    const bool counts = e.view.dtype != DType::kF32 && e.magnitude > 0.0;
    if (counts) ++(e.doubtful ? doubtful : results);
    if (counts && !e.doubtful && got != e.value) ++different;
    const double allowed = std::max(tolerance(e.view.dtype) * e.magnitude, e.error);
    if (std::abs(got - e.value) <= allowed) continue;
    if (++wrong <= 3) {
      ADD_FAILURE() << OpTraits<Args>::kName << " at " << e.offset << ": got " << got << ", want "
                    << e.value;
    }
  }
  EXPECT_EQ(wrong, 0u);
  // A rounding point left out or added moves far more results to a neighbour than fp32 does.
  EXPECT_LE(different, 2 + results / 100) << results;
  EXPECT_LE(doubtful, 8 + results / 3) << "too few results are left to count";
}

// Zeroes the elements that an op writes.
inline void erase(const std::vector<reference::Expected>& expected) {
  for (const reference::Expected& e : expected) reference::set(e.view, e.offset, 0.0);
}

template <typename Case>
void check_case(const Case& c, DType dtype, const BackendTable& table, Rng& rng) {
  const auto problem = make_problem(c, dtype, rng);
  using Args = std::decay_t<decltype(problem->args)>;
  SCOPED_TRACE(problem->name + " " + text_of(dtype) + " " + table.instruction_set);
  const std::vector<reference::Expected> expected = reference::expected(problem->args);
  const std::vector<std::byte> before = problem->bytes();
  ASSERT_EQ(run_kernel(table, problem->args), 0);
  check_values<Args>(expected);
  const std::vector<std::byte> after = problem->bytes();

  for (const std::int32_t parts : {2, 3, 7}) {
    problem->restore(before);
    ASSERT_EQ(run_kernel(table, problem->args, parts), 0);
    EXPECT_TRUE(problem->bytes() == after) << parts << " parts";
  }
  problem->restore(before);
  for (std::int64_t r = problem->rows; r-- > 0;) {
    ASSERT_EQ(run_kernel(table, problem->one_row(r)), 0);
  }
  EXPECT_TRUE(problem->bytes() == after) << "row by row";

  // With the written elements put back, nothing has changed.
  problem->restore(after);
  erase(expected);
  const std::vector<std::byte> rest = problem->bytes();
  problem->restore(before);
  erase(expected);
  EXPECT_TRUE(problem->bytes() == rest) << "wrote outside of its output";
}

class OnInstructionSet : public ::testing::TestWithParam<std::tuple<const char*, DType>> {
 protected:
  void SetUp() override {
    const std::string set = std::get<0>(GetParam());
    const std::vector<std::string> sets = cpu_instruction_sets();
    if (std::find(sets.begin(), sets.end(), set) == sets.end()) {
      GTEST_SKIP() << set << " is not here";
    }
    table_ = &cpu_backend(set).table();
    seed_ = fresh_seed();
    rng_.seed(seed_);
  }
  void TearDown() override {
    if (HasFailure()) GTEST_LOG_(INFO) << "SEGKI_TEST_SEED=" << seed_;
  }

  DType dtype() const { return std::get<1>(GetParam()); }

  template <typename Cases>
  void check_all(const Cases& cases) {
    for (const auto& c : cases) check_case(c, dtype(), *table_, rng_);
  }

  const BackendTable* table_ = nullptr;
  std::uint64_t seed_ = 0;
  Rng rng_;
};

inline std::string parameter_name(
    const ::testing::TestParamInfo<std::tuple<const char*, DType>>& info) {
  return std::string(std::get<0>(info.param)) + "_" + text_of(std::get<1>(info.param));
}

#define SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(Suite)                                 \
  INSTANTIATE_TEST_SUITE_P(                                                          \
      , Suite,                                                                       \
      ::testing::Combine(::testing::Values("avx512", "avx2", "generic"),             \
                         ::testing::Values(DType::kF32, DType::kBF16, DType::kF16)), \
      parameter_name)

}  // namespace segki::test
