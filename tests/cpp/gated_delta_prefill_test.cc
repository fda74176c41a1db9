// GatedDeltaNet over whole prompts on each instruction set: the step's recurrence in double
// precision, and bits that depend neither on the parts nor on the other sequences.
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "op_cases_gated_delta_prefill.h"
#include "rows_checks.h"
#include "segki/error.h"

namespace segki::test {
namespace {

// Tokens [begin, end) alone.
TensorView tokens_of(TensorView view, std::int64_t begin, std::int64_t end) {
  view.data =
      view.as<char>() + begin * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[0] = end - begin;
  return view;
}

// Sequence s as if there were nothing else; `range` holds its begin and end.
GatedDeltaPrefillArgs alone(const GatedDeltaPrefillArgs& all, std::int64_t s, std::int64_t begin,
                            std::int64_t end, std::int32_t* range) {
  GatedDeltaPrefillArgs one = all;
  for (TensorView GatedDeltaPrefillArgs::*member :
       {&GatedDeltaPrefillArgs::q, &GatedDeltaPrefillArgs::k, &GatedDeltaPrefillArgs::v,
        &GatedDeltaPrefillArgs::z, &GatedDeltaPrefillArgs::a, &GatedDeltaPrefillArgs::b,
        &GatedDeltaPrefillArgs::out}) {
    one.*member = tokens_of(all.*member, begin, end);
  }
  range[0] = 0;
  range[1] = static_cast<std::int32_t>(end - begin);
  one.begins = dense_view(range, DType::kI32, 1);
  one.ends = dense_view(range + 1, DType::kI32, 1);
  if (all.state.present()) one.state = tokens_of(all.state, s, s + 1);
  if (all.conv_state.present()) one.conv_state = tokens_of(all.conv_state, s, s + 1);
  return one;
}

class GatedDeltaPrefill : public OnInstructionSet {
 protected:
  // As check_values, but what fp32's order of additions moves to a neighbour is counted over all
  // cases: in the small ones alone, one in a hundred is too few to tell.
  void compare(const std::vector<reference::Expected>& expected) {
    std::size_t wrong = 0;
    for (const reference::Expected& e : expected) {
      const double got = reference::get(e.view, e.offset);
      if (e.view.dtype != DType::kF32 && e.magnitude > 0.0) {
        ++results_;
        if (got != e.value) ++different_;
      }
      if (std::abs(got - e.value) <= tolerance(e.view.dtype) * e.magnitude) continue;
      if (++wrong <= 3) {
        ADD_FAILURE() << "at " << e.offset << ": got " << got << ", want " << e.value;
      }
    }
    EXPECT_EQ(wrong, 0u);
  }

  void TearDown() override {
    EXPECT_LE(different_, results_ / 100) << results_;
    OnInstructionSet::TearDown();
  }

  std::size_t results_ = 0;
  std::size_t different_ = 0;

  void check_prefill(const GatedDeltaPrefillCase& c) {
    const auto p = make_problem(c, dtype(), rng_);
    const GatedDeltaPrefillArgs& args = p->args;
    SCOPED_TRACE(p->name + " " + text_of(dtype()) + " " + table_->instruction_set);
    const std::vector<reference::Expected> expected = reference::expected(args);
    const std::vector<std::byte> before = p->bytes();
    ASSERT_EQ(run_kernel(*table_, args), 0);
    compare(expected);
    const std::vector<std::byte> after = p->bytes();

    for (const std::int32_t parts : {2, 3, 7, 16}) {
      p->restore(before);
      ASSERT_EQ(run_kernel(*table_, args, parts), 0);
      EXPECT_TRUE(p->bytes() == after) << parts << " parts";
    }

    // Every sequence alone, in a call that has no other tokens; gaps are cleared by hand.
    p->restore(before);
    reference::for_each(args.out, [&](std::int64_t at) { reference::set(args.out, at, 0.0); });
    for (std::int64_t s = 0; s < args.begins.shape[0]; ++s) {
      const std::int64_t begin = reference::row_value(args.begins, s);
      const std::int64_t end = reference::row_value(args.ends, s);
      std::int32_t range[2];
      ASSERT_EQ(run_kernel(*table_, alone(args, s, begin, end, range)), 0);
    }
    EXPECT_TRUE(p->bytes() == after) << "sequence by sequence";

    // With the written elements put back, nothing has changed.
    p->restore(after);
    erase(expected);
    const std::vector<std::byte> rest = p->bytes();
    p->restore(before);
    erase(expected);
    EXPECT_TRUE(p->bytes() == rest) << "wrote outside of its output";
  }
};

TEST_P(GatedDeltaPrefill, Cases) {
  for (const GatedDeltaPrefillCase& c : gated_delta_prefill_cases()) check_prefill(c);
}

// A prompt in pieces, each continuing from the states that the one before left.
TEST_P(GatedDeltaPrefill, Continues) {
  const auto p = make_problem({180, {{0, 180}}, 2, 2, 30, 41, 4}, dtype(), rng_);
  GatedDeltaPrefillArgs& args = p->args;
  const std::vector<reference::Expected> expected = reference::expected(args);
  std::int64_t begin = 0;
  for (const std::int64_t end : {1, 3, 66, 130, 180}) {
    std::int32_t range[2];
    ASSERT_EQ(run_kernel(*table_, alone(args, 0, begin, end, range)), 0);
    args.continued = 1;
    begin = end;
  }
  compare(expected);
}

// One token after another gives what the step op gives.
TEST_P(GatedDeltaPrefill, OneTokenIsTheStep) {
  const auto p = make_problem({1, {{0, 1}}, 2, 3, 40, 56, 4, true, true, true, true, 0.0F, true},
                              dtype(), rng_);
  const GatedDeltaPrefillArgs& args = p->args;
  const std::vector<std::byte> before = p->bytes();
  GatedDeltaArgs step = reference::as_rows(args);
  step.z = args.z;
  step.a = args.a;
  step.conv_weight = args.conv_weight;
  step.conv_bias = args.conv_bias;
  step.a_log = args.a_log;
  step.dt_bias = args.dt_bias;
  step.norm_weight = args.norm_weight;
  step.conv_state = args.conv_state;
  step.state = args.state;
  step.out = args.out;
  step.norm = args.norm;
  step.query_scale = args.query_scale;
  ASSERT_EQ(run_kernel(*table_, step), 0);
  std::vector<double> values;
  const auto each = [&](const std::function<void(const TensorView&, std::int64_t)>& visit) {
    for (const TensorView& view : {args.conv_state, args.state, args.out}) {
      reference::for_each(view, [&](std::int64_t at) { visit(view, at); });
    }
  };
  each(
      [&](const TensorView& view, std::int64_t at) { values.push_back(reference::get(view, at)); });
  p->restore(before);
  ASSERT_EQ(run_kernel(*table_, args), 0);
  std::size_t i = 0;
  each([&](const TensorView& view, std::int64_t at) {
    const bool copied = view.data == args.conv_state.data;
    const double size = copied ? 0.0 : 2.0 * std::max(std::abs(values[i]), 1.0);
    EXPECT_NEAR(reference::get(view, at), values[i], tolerance(view.dtype) * size) << at;
    ++i;
  });
}

// Whatever a sequence holds stays in it.
TEST_P(GatedDeltaPrefill, NanStaysInItsSequence) {
  const auto p = make_problem({100, {{0, 50}, {50, 100}}, 1, 2, 20, 24, 4}, dtype(), rng_);
  const GatedDeltaPrefillArgs& args = p->args;
  ASSERT_EQ(run_kernel(*table_, args), 0);
  const TensorView second = tokens_of(args.out, 50, 100);
  std::vector<double> want;
  reference::for_each(second, [&](std::int64_t at) { want.push_back(reference::get(second, at)); });
  for (std::int64_t t = 0; t < 50; ++t) {
    const std::int64_t at = reference::offset(args.v, t, 0, 1, 3);
    const std::size_t size = size_of(dtype());
    std::memset(args.v.as<char>() + at * static_cast<std::int64_t>(size), 0xFF, size);
  }
  ASSERT_EQ(run_kernel(*table_, args), 0);
  std::size_t i = 0;
  reference::for_each(
      second, [&](std::int64_t at) { ASSERT_EQ(reference::get(second, at), want[i++]) << at; });
  EXPECT_TRUE(std::isnan(reference::get(args.out, reference::offset(args.out, 10, 24 + 3))));
}

SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(GatedDeltaPrefill);

TEST(GatedDeltaPrefillCheck, RefusesWhatTheContractExcludes) {
  Rng rng(1);
  const auto p = make_problem({20, {{0, 9}, {9, 20}}, 2, 2, 8, 8, 4}, DType::kF32, rng);
  EXPECT_NO_THROW(check(p->args));
  using Args = GatedDeltaPrefillArgs;
  struct Damage {
    std::string argument;
    std::function<void(Args&)> apply;
  };
  const std::vector<Damage> damages = {
      {"q", [](Args& a) { a.q.dtype = DType::kI32; }},
      {"k", [](Args& a) { a.k.shape[1] = 3; }},
      {"z", [](Args& a) { a.z.shape[0] = 19; }},
      {"conv_weight", [](Args& a) { a.conv_weight.shape[1] = 9; }},
      {"a_log", [](Args& a) { a.a_log = {}; }},
      {"begins", [](Args& a) { a.begins.dtype = DType::kI64; }},
      {"ends", [](Args& a) { a.ends.shape[0] = 1; }},
      {"conv_state", [](Args& a) { a.conv_state.shape[0] = 1; }},
      {"state", [](Args& a) { a.state.dtype = DType::kBF16; }},
      {"out", [](Args& a) { a.out.shape[1] = 31; }},
      {"continued", [](Args& a) { a.continued = 2; }},
      {"begins", [](Args& a) { a.begins.as<std::int32_t>()[0] = -1; }},
      {"begins", [](Args& a) { a.ends.as<std::int32_t>()[1] = 21; }},
      {"begins", [](Args& a) { a.ends.as<std::int32_t>()[1] = 8; }},
  };
  const std::vector<std::byte> before = p->bytes();
  for (const Damage& damage : damages) {
    p->restore(before);
    Args bad = p->args;
    damage.apply(bad);
    try {
      gated_delta_prefill(backend("cpu"), bad);
      ADD_FAILURE() << "accepted a bad '" << damage.argument << "'";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << message;
      EXPECT_NE(message.find("'" + damage.argument), std::string::npos) << message;
      EXPECT_NE(message.find("accepted"), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace segki::test
