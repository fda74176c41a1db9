// Embedding, norm, sum_norm and rope_kv_write on each instruction set.
#include "rows_checks.h"

namespace segki::test {
namespace {

class Rows : public OnInstructionSet {};

TEST_P(Rows, Embedding) { check_all(embedding_cases()); }
TEST_P(Rows, Norm) { check_all(norm_cases()); }
TEST_P(Rows, SumNorm) { check_all(sum_norm_cases()); }
TEST_P(Rows, RopeKvWrite) { check_all(rope_cases()); }

SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(Rows);

}  // namespace
}  // namespace segki::test
