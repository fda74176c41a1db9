// The one-token step of a GatedDeltaNet block on each instruction set.
#include <cmath>
#include <cstdint>
#include <vector>

#include "op_cases_gated_delta.h"
#include "rows_checks.h"

namespace segki::test {
namespace {

class GatedDelta : public OnInstructionSet {};

TEST_P(GatedDelta, Cases) { check_all(gated_delta_cases()); }

// A gate that is closed (beta of 0) leaves the state's bits as they are where nothing decays, and
// nothing but zeros where all does.
TEST_P(GatedDelta, GatesAtTheirLimits) {
  const auto p = make_problem(
      GatedDeltaCase{
          .rows = 2, .key_heads = 2, .group = 2, .key_dim = 19, .value_dim = 70, .width = 4},
      dtype(), rng_);
  GatedDeltaArgs& a = p->args;
  const std::vector<float> before(a.state.as<float>(), a.state.as<float>() + 2 * a.state.stride[0]);
  for (std::int64_t r = 0; r < 2; ++r) {
    for (std::int64_t h = 0; h < 4; ++h) {
      reference::set(a.b, reference::offset(a.b, r, h / 2, h % 2), -300.0);
      reference::set(a.a, reference::offset(a.a, r, h / 2, h % 2), h == 1 ? 1000.0 : -300.0);
    }
  }
  reference::for_each(a.a_log, [&](std::int64_t at) { reference::set(a.a_log, at, 1.0); });
  ASSERT_EQ(run_kernel(*table_, a), 0);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(before.size()); ++i) {
    const bool gone = i / a.state.stride[1] % 4 == 1;
    ASSERT_EQ(a.state.as<float>()[i], gone ? 0.0F : before[static_cast<std::size_t>(i)]) << i;
  }
}

// softplus in fp32 from where it underflows to where it is its argument. With S all ones, beta 0
// and a_log 0 the state afterwards is the decay, exp(-softplus(a)).
TEST_P(GatedDelta, DecayOverTheWholeRange) {
  const auto p = make_problem(
      GatedDeltaCase{
          .rows = 1, .key_heads = 1, .group = 1, .key_dim = 3, .value_dim = 5, .width = 2},
      dtype(), rng_);
  GatedDeltaArgs& a = p->args;
  reference::set(a.a_log, 0, 0.0);
  reference::set(a.dt_bias, 0, 0.0);
  reference::set(a.b, 0, -300.0);
  const std::vector<std::byte> before = p->bytes();
  for (double x = -110.0; x < 110.0; x += 0.37) {
    p->restore(before);
    reference::set(a.a, 0, x);
    reference::for_each(a.state, [&](std::int64_t at) { reference::set(a.state, at, 1.0); });
    ASSERT_EQ(run_kernel(*table_, a), 0);
    const double log_decay = -reference::softplus(reference::get(a.a, 0));
    const double want = std::exp(log_decay);
    const double slack = want * 0x1p-23 * (2.0 - 2.0 * log_decay) + 0x1p-149;
    ASSERT_NEAR(reference::get(a.state, 0), want, slack) << "a = " << x;
  }
}

// Queries and keys that are all zero normalise to zero, not to NaN.
TEST_P(GatedDelta, ZeroQueriesAndKeys) {
  const auto p = make_problem(
      GatedDeltaCase{
          .rows = 1, .key_heads = 1, .group = 2, .key_dim = 40, .value_dim = 33, .width = 4},
      dtype(), rng_);
  GatedDeltaArgs& a = p->args;
  const std::int64_t keys = 2 * 40;
  for (std::int64_t c = 0; c < keys; ++c) {
    const reference::Place input = reference::channel_input(a, 0, c);
    reference::set(input.view, input.offset, 0.0);
    for (std::int64_t j = 0; j < 4; ++j) {
      reference::set(a.conv_state, reference::offset(a.conv_state, 0, c, j), 0.0);
    }
  }
  ASSERT_EQ(run_kernel(*table_, a), 0);
  reference::for_each(a.out, [&](std::int64_t at) { ASSERT_EQ(reference::get(a.out, at), 0.0); });
  reference::for_each(
      a.state, [&](std::int64_t at) { ASSERT_TRUE(std::isfinite(reference::get(a.state, at))); });
}

SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(GatedDelta);

}  // namespace
}  // namespace segki::test
