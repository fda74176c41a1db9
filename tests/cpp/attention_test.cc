// Decode attention on each instruction set.
#include <limits>

#include "rows_checks.h"

namespace segki::test {
namespace {

class Attention : public OnInstructionSet {};

TEST_P(Attention, Cases) { check_all(attention_cases()); }

// Rows of a few hundred to a few thousand keys, with room for pieces: the values of the whole, and
// the same bits for any number of parts and for a row alone.
TEST_P(Attention, KeysInPieces) {
  const std::vector<AttentionCase> cases = {
      {1, 3, 3, 64, 64, 1500, 1499, 1499, 0, 0.0F, false, false, false},
      {3, 2, 2, 33, 17, 900, 200, 899, 0, 0.0F, true, false, true},
      {2, 1, 5, 64, 80, 700, 600, 2000, 640, 20.0F, false, true, false},
  };
  for (const AttentionCase& c : cases) {
    for (const std::int64_t splits : {1, 2, 8}) {
      const auto problem = make_problem(c, dtype(), rng_);
      SCOPED_TRACE(problem->name + " splits " + std::to_string(splits));
      AttentionArgs& args = problem->args;
      const std::vector<reference::Expected> expected = reference::expected(args);
      const std::int64_t heads = args.k_cache.shape[1], group = args.q.shape[1] / heads;
      const std::int64_t width = group * (args.v_cache.shape[3] + 2);
      std::vector<float> partial(static_cast<std::size_t>(problem->rows * heads * splits * width),
                                 std::numeric_limits<float>::quiet_NaN());
      std::vector<std::int32_t> arrived(static_cast<std::size_t>(problem->rows * heads), 0);
      args.partial = dense_view(partial.data(), DType::kF32, problem->rows, heads, splits, width);
      args.arrived = dense_view(arrived.data(), DType::kI32, problem->rows, heads);
      EXPECT_NO_THROW(check(args));
      const std::vector<std::byte> before = problem->bytes();
      ASSERT_EQ(run_kernel(*table_, args), 0);
      check_values<AttentionArgs>(expected);
      const std::vector<std::byte> after = problem->bytes();
      for (const std::int32_t parts : {2, 3, 7, 40}) {
        problem->restore(before);
        ASSERT_EQ(run_kernel(*table_, args, parts), 0);
        EXPECT_TRUE(problem->bytes() == after) << parts << " parts";
      }
      problem->restore(before);
      for (std::int64_t r = problem->rows; r-- > 0;) {
        AttentionArgs one = problem->one_row(r);
        one.partial.shape[0] = one.arrived.shape[0] = 1;
        ASSERT_EQ(run_kernel(*table_, one), 0);
      }
      EXPECT_TRUE(problem->bytes() == after) << "row by row";
      for (const std::int32_t count : arrived) EXPECT_EQ(count, 0);
    }
  }
}

SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(Attention);

}  // namespace
}  // namespace segki::test
