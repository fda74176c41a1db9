// projection, gated_projection and lm_head on every instruction set, against the double-precision
// reference, and bit for bit against themselves in other batches and splits.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "op_cases.h"
#include "reference.h"

namespace segki::testing {
namespace {

constexpr std::int32_t kSplits[] = {1, 2, 3, 7};
constexpr std::int64_t kBatches[] = {1, 2, 3, 5, 8, 17, 64};

// One of the three ops, as the tests need it.
struct ProjectionOp {
  static std::vector<MatmulCase> cases(DType dtype) { return projection_cases(dtype); }
  static MatmulProblem problem(const MatmulCase& c, std::uint64_t seed) { return {c, seed}; }
  static std::size_t outputs(const MatmulProblem& p) { return p.out.size(); }
  static std::int32_t run(const Backend& b, MatmulProblem& p, std::int64_t rows,
                          std::int32_t parts) {
    return run_kernel(b, p.projection(rows), parts);
  }
  static Interval reference(const MatmulProblem& p, std::size_t which, std::int64_t row,
                            std::int64_t column) {
    return reference_projection(p, which, row, column);
  }
};

struct GatedProjectionOp {
  static std::vector<MatmulCase> cases(DType dtype) { return gated_projection_cases(dtype); }
  static MatmulProblem problem(const MatmulCase& c, std::uint64_t seed) {
    return MatmulProblem::gated(c, seed);
  }
  static std::size_t outputs(const MatmulProblem&) { return 1; }
  static std::int32_t run(const Backend& b, MatmulProblem& p, std::int64_t rows,
                          std::int32_t parts) {
    return run_kernel(b, p.gated_projection(rows), parts);
  }
  static Interval reference(const MatmulProblem& p, std::size_t, std::int64_t row,
                            std::int64_t column) {
    return reference_gated_projection(p, row, column);
  }
};

struct LmHeadOp {
  static std::vector<MatmulCase> cases(DType dtype) { return lm_head_cases(dtype); }
  static MatmulProblem problem(const MatmulCase& c, std::uint64_t seed) {
    return MatmulProblem::head(c, seed);
  }
  static std::size_t outputs(const MatmulProblem&) { return 1; }
  static std::int32_t run(const Backend& b, MatmulProblem& p, std::int64_t rows,
                          std::int32_t parts) {
    return run_kernel(b, p.lm_head(rows), parts);
  }
  static Interval reference(const MatmulProblem& p, std::size_t, std::int64_t row,
                            std::int64_t column) {
    return reference_lm_head(p, row, column);
  }
};

template <typename Op>
class Matmul : public ::testing::Test {};

using Ops = ::testing::Types<ProjectionOp, GatedProjectionOp, LmHeadOp>;
class OpNames {
 public:
  template <typename Op>
  static std::string GetName(int) {
    if (std::is_same_v<Op, ProjectionOp>) return "projection";
    return std::is_same_v<Op, GatedProjectionOp> ? "gated_projection" : "lm_head";
  }
};
TYPED_TEST_SUITE(Matmul, Ops, OpNames);

// Number of outputs outside the reference's interval; the first is reported.
template <typename Op>
void expect_reference(const MatmulProblem& p) {
  for (std::size_t which = 0; which < Op::outputs(p); ++which) {
    for (std::int64_t r = 0; r < p.c.rows; ++r) {
      for (std::int64_t n = 0; n < p.c.columns[which]; ++n) {
        const Interval expected = Op::reference(p, which, r, n);
        const double got = p.out[which].get(r, n);
        ASSERT_TRUE(expected.contains(got))
            << "output " << which << " row " << r << " column " << n << ": got " << got
            << ", accepted [" << expected.low << ", " << expected.high << "]";
      }
    }
  }
}

TYPED_TEST(Matmul, AgreesWithTheReference) {
  const std::uint64_t seed = fresh_seed();
  for (const std::string& set : cpu_instruction_sets()) {
    const Backend backend = cpu_backend(set);
    for (DType dtype : float_dtypes()) {
      for (const MatmulCase& c : TypeParam::cases(dtype)) {
        SCOPED_TRACE(set + " " + c.name() + " SEGKI_TEST_SEED=" + std::to_string(seed));
        MatmulProblem p = TypeParam::problem(c, seed);
        ASSERT_EQ(TypeParam::run(backend, p, -1, 2), 0);
        expect_reference<TypeParam>(p);
        for (const Buffer& out : p.out) EXPECT_TRUE(out.intact());
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(Matmul, SplittingChangesNoBit) {
  const std::uint64_t seed = fresh_seed();
  for (const std::string& set : cpu_instruction_sets()) {
    const Backend backend = cpu_backend(set);
    for (DType dtype : float_dtypes()) {
      for (const MatmulCase& c : TypeParam::cases(dtype)) {
        SCOPED_TRACE(set + " " + c.name() + " SEGKI_TEST_SEED=" + std::to_string(seed));
        MatmulProblem p = TypeParam::problem(c, seed);
        ASSERT_EQ(TypeParam::run(backend, p, -1, 1), 0);
        const std::vector<Buffer> whole = p.out;
        for (std::int32_t parts : kSplits) {
          p.poison_outputs();
          ASSERT_EQ(TypeParam::run(backend, p, -1, parts), 0);
          for (std::size_t i = 0; i < TypeParam::outputs(p); ++i) {
            EXPECT_TRUE(p.out[i].intact());
            for (std::int64_t r = 0; r < c.rows; ++r) {
              ASSERT_EQ(p.out[i].row_bytes(r), whole[i].row_bytes(r))
                  << parts << " parts, output " << i << ", row " << r;
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(Matmul, OtherRowsChangeNoBit) {
  const std::uint64_t seed = fresh_seed();
  for (const std::string& set : cpu_instruction_sets()) {
    const Backend backend = cpu_backend(set);
    for (DType dtype : float_dtypes()) {
      for (bool transposed : {false, true}) {
        if (transposed && std::is_same_v<TypeParam, GatedProjectionOp>) continue;
        for (std::int64_t k : {45, 320}) {
          MatmulCase c = {.rows = 64,
                          .k = k,
                          .columns = {83},
                          .dtype = dtype,
                          .bias = true,
                          .transposed = transposed,
                          .activation = Activation::kSilu};
          SCOPED_TRACE(set + " " + c.name() + " SEGKI_TEST_SEED=" + std::to_string(seed));
          MatmulProblem p = TypeParam::problem(c, seed);
          ASSERT_EQ(TypeParam::run(backend, p, -1, 1), 0);
          const Buffer all = p.out[0];
          for (std::int64_t rows : kBatches) {
            p.poison_outputs();
            ASSERT_EQ(TypeParam::run(backend, p, rows, 1), 0);
            EXPECT_TRUE(p.out[0].intact(rows));
            for (std::int64_t r = 0; r < rows; ++r) {
              ASSERT_EQ(p.out[0].row_bytes(r), all.row_bytes(r)) << "row " << r << " of " << rows;
            }
          }
          // The same row in another place of the batch.
          for (std::int64_t i = 0; i < k; ++i) p.x.set(0, i, p.x.get(63, i));
          p.poison_outputs();
          ASSERT_EQ(TypeParam::run(backend, p, 1, 1), 0);
          ASSERT_EQ(p.out[0].row_bytes(0), all.row_bytes(63));
        }
      }
    }
  }
}

TYPED_TEST(Matmul, NanInOneRowStaysInIt) {
  const std::uint64_t seed = fresh_seed();
  for (const std::string& set : cpu_instruction_sets()) {
    for (DType dtype : float_dtypes()) {
      MatmulCase c = {.rows = 5, .k = 37, .columns = {21}, .dtype = dtype};
      SCOPED_TRACE(set + " " + c.name() + " SEGKI_TEST_SEED=" + std::to_string(seed));
      MatmulProblem p = TypeParam::problem(c, seed);
      const TensorView x = p.x.view();
      std::memset(
          x.as<unsigned char>() + x.stride[0] * 3 * static_cast<std::int64_t>(size_of(dtype)), 0xFF,
          size_of(dtype));
      ASSERT_EQ(TypeParam::run(cpu_backend(set), p, -1, 1), 0);
      for (std::int64_t r = 0; r < c.rows; ++r) {
        for (std::int64_t n = 0; n < c.columns[0]; ++n) {
          ASSERT_EQ(std::isnan(p.out[0].get(r, n)), r == 3) << "row " << r << " column " << n;
        }
      }
    }
  }
}

// Products of two numbers are exact in fp32, so that one rounding is left, whose answer is known:
// ties, subnormal results and overflow included.
TEST(Projection, RoundsToNearestEven) {
  const std::uint64_t seed = fresh_seed();
  for (const std::string& set : cpu_instruction_sets()) {
    const Backend backend = cpu_backend(set);
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(set + " " + name_of(dtype) + " SEGKI_TEST_SEED=" + std::to_string(seed));
      constexpr std::int64_t kColumns = 1000;
      MatmulProblem p({.rows = 64, .k = 1, .columns = {kColumns}, .dtype = dtype}, seed);
      const double scales[] = {1.0, 0x1p-7, 0x1p9, dtype == DType::kBF16 ? 0x1p64 : 0x1p4};
      for (std::int64_t r = 0; r < p.c.rows; ++r) {
        p.x.set(r, 0, round_to(dtype, p.x.get(r, 0) * scales[r % 4]));
      }
      for (std::int64_t n = 0; n < kColumns; ++n) {
        p.weight[0].set(n, 0, round_to(dtype, p.weight[0].get(n, 0) * scales[n / 2 % 4]));
      }
      int ties = 0;
      ASSERT_EQ(run_kernel(backend, p.projection()), 0);
      for (std::int64_t r = 0; r < p.c.rows; ++r) {
        for (std::int64_t n = 0; n < kColumns; ++n) {
          const double product = p.x.get(r, 0) * p.weight[0].get(n, 0);
          const double expected = round_to(dtype, product);
          ASSERT_EQ(p.out[0].get(r, n), expected) << "product " << product;
          const double opposite = product + (product - expected);  // as far on the other side
          if (std::isfinite(opposite) && opposite != expected &&
              opposite == round_to(dtype, opposite))
            ++ties;
        }
      }
      EXPECT_GT(ties, 0);  // else the test shows too little
    }
  }
}

TEST(CpuBackend, InstructionSets) {
  const std::vector<std::string> sets = cpu_instruction_sets();
  ASSERT_FALSE(sets.empty());
  EXPECT_EQ(sets.back(), "generic");
  for (const std::string& set : sets) {
    const BackendTable& table = cpu_backend(set).table();
    EXPECT_EQ(table.instruction_set, set);
    EXPECT_STREQ(table.name, "cpu");
    EXPECT_NE(table.is_host, 0);
  }
  try {
    cpu_backend("avx1024");
    FAIL() << "an unknown instruction set was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("avx1024"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(sets.front()), std::string::npos);
  }
}

}  // namespace
}  // namespace segki::testing
