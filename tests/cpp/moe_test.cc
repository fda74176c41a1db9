// The ops of a mixture of experts, and projections with fp32 outputs, on each instruction set.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "op_cases_moe.h"
#include "rows_checks.h"
#include "segki/error.h"

namespace segki::test {
namespace {

template <typename Case>
std::vector<Case> as(const std::vector<ExpertCase>& cases) {
  std::vector<Case> all;
  for (const ExpertCase& c : cases) all.push_back(Case{c});
  return all;
}

class RouteExperts : public OnInstructionSet {};
class ExpertGatedProjection : public OnInstructionSet {};
class ExpertProjection : public OnInstructionSet {};
class WideProjection : public OnInstructionSet {};

TEST_P(RouteExperts, Cases) { check_all(router_cases()); }
TEST_P(ExpertGatedProjection, Cases) {
  check_all(as<GatedExpertCase>(expert_gated_projection_cases()));
}
TEST_P(ExpertProjection, Cases) { check_all(as<DownExpertCase>(expert_projection_cases())); }

// Writes nothing past the scratch that it asked for, in any number of parts.
template <typename Cases>
void check_scratch(const Cases& cases, DType dtype, const char* set, Rng& rng) {
  for (const auto& c : cases) {
    const auto p = make_problem(c, dtype, rng);
    SCOPED_TRACE(p->name);
    for (const std::int32_t parts : {1, 2, 5}) {
      ASSERT_EQ(segki::testing::run_kernel(cpu_backend(set), p->args, parts), 0)
          << parts << " parts";
    }
  }
}

TEST_P(RouteExperts, KeepsToItsScratch) {
  check_scratch(router_cases(), dtype(), std::get<0>(GetParam()), rng_);
}
TEST_P(ExpertGatedProjection, KeepsToItsScratch) {
  check_scratch(as<GatedExpertCase>(expert_gated_projection_cases()), dtype(),
                std::get<0>(GetParam()), rng_);
}
TEST_P(ExpertProjection, KeepsToItsScratch) {
  check_scratch(as<DownExpertCase>(expert_projection_cases()), dtype(), std::get<0>(GetParam()),
                rng_);
}

// NaN is the largest score, as for torch.topk; a group that holds one is the best group.
TEST_P(RouteExperts, NanIsTheLargest) {
  for (const std::int32_t groups : {1, 6}) {
    for (const bool by_max : {false, true}) {
      for (std::int64_t place = 0; place < 24; ++place) {
        const auto p = make_problem(RouterCase{.rows = 2,
                                               .experts = 24,
                                               .k = 3,
                                               .score = RouterScore::kSigmoid,
                                               .groups = groups,
                                               .group_top_k = groups == 1 ? 1 : 2,
                                               .group_by_max = by_max},
                                    dtype(), rng_);
        const std::vector<reference::Expected> expected = reference::expected(p->args);
        p->args.logits.as<float>()[place] = std::numeric_limits<float>::quiet_NaN();
        ASSERT_EQ(run_kernel(*table_, p->args), 0);
        ASSERT_EQ(reference::at(p->args.experts, 0, 0), static_cast<double>(place));
        ASSERT_TRUE(std::isnan(reference::at(p->args.weights, 0, 0)));
        for (const reference::Expected& e : expected) {  // the other row
          if (e.offset < e.view.stride[0]) continue;
          ASSERT_NEAR(reference::get(e.view, e.offset), e.value, 4e-6 * e.magnitude);
        }
      }
    }
  }
}

// With all logits equal no expert is better than another; still k different ones are chosen, with
// equal weights.
TEST_P(RouteExperts, AllEqual) {
  for (const RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kSoftmaxChosen, RouterScore::kSigmoid}) {
    const auto p = make_problem(
        RouterCase{.rows = 1, .experts = 70, .k = 9, .score = score, .normalise = true}, dtype(),
        rng_);
    reference::for_each(p->args.logits,
                        [&](std::int64_t at) { reference::set(p->args.logits, at, -1.5); });
    ASSERT_EQ(run_kernel(*table_, p->args), 0);
    std::vector<bool> seen(70, false);
    for (std::int64_t j = 0; j < 9; ++j) {
      const auto e = static_cast<std::size_t>(reference::at(p->args.experts, 0, j));
      ASSERT_LT(e, seen.size());
      EXPECT_FALSE(seen[e]) << e;
      seen[e] = true;
      EXPECT_NEAR(reference::at(p->args.weights, 0, j), 1.0 / 9.0, 1e-6);
    }
  }
}

TEST_P(ExpertGatedProjection, Activations) {
  for (const Activation activation : segki::testing::activations()) {
    for (const Layout layout : {Layout::kFused, Layout::kSideBySide}) {
      const auto p = make_gated_problem({.rows = 5,
                                         .k = 2,
                                         .experts = 3,
                                         .inputs = 70,
                                         .outputs = 83,
                                         .layout = layout,
                                         .bias = true,
                                         .activation = activation},
                                        dtype(), rng_);
      SCOPED_TRACE(p->name);
      const ExpertGatedProjectionArgs& a = p->args;
      ASSERT_EQ(run_kernel(*table_, a, 2), 0);
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t j = 0; j < 2; ++j) {
          for (std::int64_t f = 0; f < 83; ++f) {
            const auto accepted = reference::gated_interval(a, r, j, f);
            const double got = reference::at(a.out, r, j, f);
            ASSERT_TRUE(accepted.contains(got))
                << "row " << r << " slot " << j << " output " << f << ": got " << got
                << ", accepted [" << accepted.low << ", " << accepted.high << "]";
          }
        }
      }
    }
  }
}

// A row's bits do not depend on how many others go through the same experts.
template <typename Make>
void check_grouping(const Make& make, const BackendTable& table, Rng& rng) {
  for (const Layout layout : {Layout::kFused, Layout::kSideBySide}) {
    const ExpertCase c = {.rows = 33,
                          .k = 2,
                          .experts = 35,
                          .inputs = 75,
                          .outputs = 50,
                          .layout = layout,
                          .bias = true};
    const auto p = make(c, rng);
    auto& args = p->args;
    // All experts have weights, so that the choice may change.
    const std::int64_t size = args.out.stride[0];
    const std::int64_t width = size * static_cast<std::int64_t>(size_of(args.out.dtype));
    std::vector<std::vector<std::byte>> first;
    const std::vector<std::byte> before = p->bytes();
    for (const int how : {0, 1, 2}) {  // as drawn; all as row 0; as row 0 the other way round
      p->restore(before);
      for (std::int64_t r = 1; r < c.rows && how > 0; ++r) {
        for (std::int64_t j = 0; j < c.k; ++j) {
          const std::int64_t from = how == 1 ? j : c.k - 1 - j;
          reference::set(args.experts, reference::offset(args.experts, r, j),
                         reference::at(args.experts, 0, from));
        }
      }
      ASSERT_EQ(run_kernel(table, args, 2), 0);
      first.emplace_back(args.out.template as<std::byte>(),
                         args.out.template as<std::byte>() + width);
    }
    EXPECT_TRUE(first[0] == first[1]);
    EXPECT_TRUE(first[0] == first[2]);
  }
}

TEST_P(ExpertGatedProjection, GroupingChangesNoBit) {
  check_grouping(
      [this](const ExpertCase& c, Rng& rng) { return make_gated_problem(c, dtype(), rng); },
      *table_, rng_);
}
TEST_P(ExpertProjection, GroupingChangesNoBit) {
  check_grouping(
      [this](const ExpertCase& c, Rng& rng) { return make_down_problem(c, dtype(), rng); }, *table_,
      rng_);
}

// The rows of x that hold a NaN, and no others, have NaN in their outputs.
template <typename Problem>
void check_nan(Problem& p, const BackendTable& table) {
  auto& args = p.args;
  std::memset(args.x.template as<unsigned char>() +
                  reference::offset(args.x, 3) * static_cast<std::int64_t>(size_of(args.x.dtype)),
              0xFF, size_of(args.x.dtype));
  ASSERT_EQ(run_kernel(table, args), 0);
  for (std::int64_t r = 0; r < p.rows; ++r) {
    TensorView row = args.out;
    row.shape[0] = 1;
    const std::int64_t begin = reference::offset(args.out, r);
    std::int64_t bad = 0;
    reference::for_each(row, [&](std::int64_t at) {
      bad += std::isnan(reference::get(args.out, begin + at)) ? 1 : 0;
    });
    EXPECT_EQ(bad > 0, r == 3) << "row " << r;
  }
}

TEST_P(ExpertGatedProjection, NanInOneRowStaysInIt) {
  for (const Layout layout : {Layout::kEach, Layout::kFused, Layout::kSideBySide}) {
    check_nan(*make_gated_problem(
                  {.rows = 6, .k = 2, .experts = 3, .inputs = 37, .outputs = 21, .layout = layout},
                  dtype(), rng_),
              *table_);
  }
}
TEST_P(ExpertProjection, NanInOneRowStaysInIt) {
  for (const Layout layout : {Layout::kEach, Layout::kFused, Layout::kSideBySide}) {
    check_nan(*make_down_problem(
                  {.rows = 6, .k = 2, .experts = 3, .inputs = 37, .outputs = 21, .layout = layout},
                  dtype(), rng_),
              *table_);
  }
}

// --- Projections whose outputs are f32 beside half-precision inputs, in one op with others.

struct WideCase {
  std::int64_t rows, k;
  std::vector<std::int64_t> columns;
  std::vector<bool> wide;        // out[i] is f32
  std::vector<bool> f32_weight;  // only with wide
  bool bias, transposed;
};

struct WideProblem {
  Problem<ProjectionArgs> p;
  WideCase c;

  WideProblem(const WideCase& of, DType dtype, Rng& rng) : c(of) {
    ProjectionArgs& a = p.args;
    a.x = p.tensor(dtype, Shape{c.rows, c.k}, 3).fill([&] { return normal(rng); }).view();
    a.count = static_cast<std::int32_t>(c.columns.size());
    a.transposed = c.transposed ? 1 : 0;
    for (std::size_t i = 0; i < c.columns.size(); ++i) {
      const std::int64_t n = c.columns[i];
      const DType of_weight = c.f32_weight[i] ? DType::kF32 : dtype;
      const Shape shape = c.transposed ? Shape{c.k, n} : Shape{n, c.k};
      a.weight[i] = p.tensor(of_weight, shape).fill([&] { return normal(rng); }).view();
      if (c.bias) {
        a.bias[i] = p.tensor(of_weight, Shape{n}).fill([&] { return normal(rng); }).view();
      }
      a.out[i] = p.tensor(c.wide[i] ? DType::kF32 : dtype, Shape{c.rows, n}, 5).view();
    }
  }

  std::vector<reference::Expected> expected() const {
    std::vector<reference::Expected> all;
    const ProjectionArgs& a = p.args;
    for (std::int64_t r = 0; r < c.rows; ++r) {
      for (int i = 0; i < a.count; ++i) {
        for (std::int64_t n = 0; n < a.out[i].shape[1]; ++n) {
          double sum = a.bias[i].present() ? reference::at(a.bias[i], n) : 0.0;
          double size = std::abs(sum);
          for (std::int64_t j = 0; j < c.k; ++j) {
            const double w =
                c.transposed ? reference::at(a.weight[i], j, n) : reference::at(a.weight[i], n, j);
            sum += reference::at(a.x, r, j) * w;
            size += std::abs(reference::at(a.x, r, j) * w);
          }
          const DType dtype = a.out[i].dtype;
          const double value = reference::rounded(dtype, sum);
          all.push_back({a.out[i], reference::offset(a.out[i], r, n), value,
                         reference::error_size(dtype, value, size)});
        }
      }
    }
    return all;
  }

  ProjectionArgs one_row(std::int64_t r) const {
    ProjectionArgs one = p.args;
    const auto take = [r](TensorView& view) {
      view.data =
          view.as<char>() + r * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
      view.shape[0] = 1;
    };
    take(one.x);
    for (int i = 0; i < one.count; ++i) take(one.out[i]);
    return one;
  }
};

std::vector<WideCase> wide_cases() {
  return {
      {1, 1, {1}, {true}, {false}, false, false},
      {1, 300, {64}, {true}, {false}, false, false},
      {3, 77, {60}, {true}, {true}, true, false},
      {64, 50, {17}, {true}, {true}, false, false},
      {8, 65, {33, 40, 9}, {false, true, true}, {false, true, false}, true, false},
      {5, 130, {40, 3, 20, 50}, {true, true, false, true}, {true, false, false, true}, true, false},
      {6, 45, {70}, {true}, {false}, true, true},
      {9, 33, {70, 130}, {true, false}, {true, false}, false, true},
  };
}

TEST_P(WideProjection, Cases) {
  for (const WideCase& c : wide_cases()) {
    WideProblem w(c, dtype(), rng_);
    SCOPED_TRACE("rows " + std::to_string(c.rows) + " k " + std::to_string(c.k));
    check(w.p.args);
    const std::vector<reference::Expected> expected = w.expected();
    const std::vector<std::byte> before = w.p.bytes();
    ASSERT_EQ(run_kernel(*table_, w.p.args), 0);
    check_values<ProjectionArgs>(expected);
    const std::vector<std::byte> after = w.p.bytes();
    for (const std::int32_t parts : {2, 3, 7}) {
      w.p.restore(before);
      ASSERT_EQ(run_kernel(*table_, w.p.args, parts), 0);
      EXPECT_TRUE(w.p.bytes() == after) << parts << " parts";
    }
    w.p.restore(before);
    for (std::int64_t r = c.rows; r-- > 0;) ASSERT_EQ(run_kernel(*table_, w.one_row(r)), 0);
    EXPECT_TRUE(w.p.bytes() == after) << "row by row";
    erase(expected);
    const std::vector<std::byte> rest = w.p.bytes();
    w.p.restore(before);
    erase(expected);
    EXPECT_TRUE(w.p.bytes() == rest) << "wrote outside of its outputs";
  }
}

// Not rounded: rounding an f32 output gives what the op writes in the dtype.
TEST_P(WideProjection, RoundsToTheNarrowOutput) {
  WideProblem wide({4, 90, {50}, {true}, {false}, true, false}, dtype(), rng_);
  ASSERT_EQ(run_kernel(*table_, wide.p.args), 0);
  ProjectionArgs narrow = wide.p.args;
  narrow.out[0] = wide.p.tensor(dtype(), Shape{4, 50}).view();
  ASSERT_EQ(run_kernel(*table_, narrow), 0);
  std::int64_t unequal = 0;
  for (std::int64_t r = 0; r < 4; ++r) {
    for (std::int64_t n = 0; n < 50; ++n) {
      const double value = reference::at(wide.p.args.out[0], r, n);
      ASSERT_EQ(reference::rounded(dtype(), value), reference::at(narrow.out[0], r, n));
      if (value != reference::at(narrow.out[0], r, n)) ++unequal;
    }
  }
  EXPECT_EQ(unequal > 100, dtype() != DType::kF32);
}

SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(RouteExperts);
SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(ExpertGatedProjection);
SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(ExpertProjection);
SEGKI_INSTANTIATE_ON_INSTRUCTION_SETS(WideProjection);

// --- Bad arguments

// check() accepts `good`, and names `argument` after `damage` was done to it.
template <typename Args>
void expect_refused(const Args& good, const std::string& argument,
                    const std::function<void(Args&)>& damage) {
  EXPECT_NO_THROW(check(good));
  Args bad = good;
  damage(bad);
  try {
    check(bad);
    ADD_FAILURE() << OpTraits<Args>::kName << " accepted a bad '" << argument << "'";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << message;
    for (const std::string& part :
         {std::string(OpTraits<Args>::kName), "'" + argument + "'", std::string("accepted")}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
}

TEST(MoeCheck, RouteExperts) {
  Rng rng(1);
  const auto p = make_problem(RouterCase{.rows = 3,
                                         .experts = 12,
                                         .k = 4,
                                         .bias = RouterBias::kF32,
                                         .groups = 4,
                                         .group_top_k = 2},
                              DType::kBF16, rng);
  using A = RouterArgs;
  const auto refused = [&p](const std::string& argument, const std::function<void(A&)>& damage) {
    expect_refused<A>(p->args, argument, damage);
  };
  refused("logits", [](A& a) { a.logits = {}; });
  refused("logits", [](A& a) { a.logits.dtype = DType::kBF16; });
  refused("logits", [](A& a) { a.logits.stride[1] = 2; });
  refused("logits",
          [](A& a) { a.logits.shape[0] = a.experts.shape[0] = a.weights.shape[0] = kMaxRows + 1; });
  refused("bias", [](A& a) { a.bias.shape[0] = 11; });
  refused("bias", [](A& a) { a.bias.dtype = DType::kI32; });
  refused("experts", [](A& a) { a.experts.dtype = DType::kI64; });
  refused("experts", [](A& a) { a.experts.shape[0] = 2; });
  refused("experts", [](A& a) { a.experts.stride[0] = 1; });
  refused("weights", [](A& a) { a.weights.shape[1] = 3; });
  refused("weights", [](A& a) { a.weights.dtype = DType::kBF16; });
  refused("score", [](A& a) { a.score = static_cast<RouterScore>(3); });
  refused("dtype", [](A& a) { a.dtype = DType::kI32; });
  refused("groups", [](A& a) { a.groups = 0; });
  refused("groups", [](A& a) { a.groups = 5; });
  refused("group_top_k", [](A& a) { a.group_top_k = 5; });
  refused("group_top_k", [](A& a) { a.group_top_k = 1; });  // 3 experts for k = 4
  refused("sum_eps", [](A& a) { a.sum_eps = -1.0F; });
  refused("sum_min", [](A& a) { a.sum_min = NAN; });
  refused("scale", [](A& a) { a.scale = INFINITY; });
}

TEST(MoeCheck, ExpertGatedProjection) {
  Rng rng(1);
  using A = ExpertGatedProjectionArgs;
  const auto p = make_gated_problem(
      {.rows = 3, .k = 2, .experts = 4, .inputs = 10, .outputs = 6, .bias = true}, DType::kBF16,
      rng);
  const auto refused = [&p](const std::string& argument, const std::function<void(A&)>& damage) {
    expect_refused<A>(p->args, argument, damage);
  };
  refused("x", [](A& a) { a.x.dtype = DType::kI32; });
  refused("x", [](A& a) { a.x.stride[1] = 2; });
  refused("x", [](A& a) { a.x.shape[0] = a.experts.shape[0] = a.out.shape[0] = kMaxRows + 1; });
  refused("experts", [](A& a) { a.experts.dtype = DType::kI64; });
  refused("experts", [](A& a) { a.experts.shape[0] = 2; });
  refused("gate", [](A& a) { a.gate.dtype = DType::kF32; });
  refused("gate", [](A& a) { a.gate = {}; });
  refused("up", [](A& a) { a.up.shape[0] = 3; });
  refused("gate_bias", [](A& a) { a.gate_bias.shape[0] = 3; });
  refused("up_bias", [](A& a) { a.up_bias.dtype = DType::kI32; });
  refused("out", [](A& a) { a.out.dtype = DType::kF32; });
  refused("out", [](A& a) { a.out.shape[1] = 1; });
  refused("out", [](A& a) { a.out.stride[1] += 1; });
  refused("weight_stride", [](A& a) { a.weight_stride = 11; });
  refused("weight_stride", [](A& a) {
    a.transposed = 1;
    a.weight_stride = 5;
  });
  refused("activation", [](A& a) { a.activation = static_cast<Activation>(6); });
  refused("fp32_activation", [](A& a) { a.fp32_activation = 2; });
}

TEST(MoeCheck, ExpertProjection) {
  Rng rng(1);
  using A = ExpertProjectionArgs;
  const auto p = make_down_problem({.rows = 3,
                                    .k = 2,
                                    .experts = 4,
                                    .inputs = 10,
                                    .outputs = 6,
                                    .bias = true,
                                    .shared = true,
                                    .shared_gate = true},
                                   DType::kF16, rng);
  const auto refused = [&p](const std::string& argument, const std::function<void(A&)>& damage) {
    expect_refused<A>(p->args, argument, damage);
  };
  refused("x", [](A& a) { a.x.stride[1] += 1; });
  refused("x", [](A& a) { a.x.rank = 2; });
  refused("experts", [](A& a) { a.experts.shape[1] = 3; });
  refused("weights", [](A& a) { a.weights.dtype = DType::kF16; });
  refused("weight", [](A& a) { a.weight.dtype = DType::kF16; });
  refused("bias", [](A& a) { a.bias.shape[0] = 5; });
  refused("out", [](A& a) { a.out.dtype = DType::kF32; });
  refused("out", [](A& a) { a.out.stride[0] = 1; });
  refused("shared", [](A& a) { a.shared.shape[1] = 5; });
  refused("shared_gate", [](A& a) { a.shared_gate.shape[1] = 2; });
  refused("shared_gate", [](A& a) { a.shared = {}; });
  refused("weight_stride", [](A& a) { a.weight_stride = 9; });
  refused("routed_scale", [](A& a) { a.routed_scale = NAN; });
  refused("out_scale", [](A& a) { a.out_scale = INFINITY; });
}

TEST(MoeCheck, WideProjection) {
  Rng rng(1);
  using A = ProjectionArgs;
  const WideProblem w({3, 10, {6, 5}, {true, false}, {true, false}, true, false}, DType::kBF16,
                      rng);
  const auto refused = [&w](const std::string& argument, const std::function<void(A&)>& damage) {
    expect_refused<A>(w.p.args, argument, damage);
  };
  refused("weight[0]", [](A& a) { a.weight[0].dtype = DType::kF16; });
  refused("weight[1]", [](A& a) { a.weight[1].dtype = DType::kF32; });  // its output is bf16
  refused("bias[0]", [](A& a) { a.bias[0].dtype = DType::kBF16; });
  refused("out[1]", [](A& a) { a.out[1].dtype = DType::kF16; });
  refused("activation", [](A& a) { a.activation = Activation::kSilu; });
  refused("residual", [](A& a) {
    a.count = 1;
    a.residual = a.out[0];
  });
}

}  // namespace
}  // namespace segki::test
