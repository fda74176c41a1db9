// Decode attention on each instruction set.
#include "rows_checks.h"

namespace segki::test {
namespace {

class Attention : public OnInstructionSet {};

TEST_P(Attention, Cases) { check_all(attention_cases()); }

SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(Attention);

}  // namespace
}  // namespace segki::test
