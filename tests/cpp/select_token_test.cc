// Argmax and the choice of the next token on each instruction set.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "rows_checks.h"
#include "segki/stop.h"

namespace segki::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// torch.argmax of one row.
std::int64_t reference_argmax(const float* logits, std::int64_t count) {
  std::int64_t best = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isnan(logits[i])) return i;
    if (logits[i] > logits[best]) best = i;
  }
  return best;
}

double reference_log_prob(const float* logits, std::int64_t count, std::int64_t token) {
  double max = -std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::isnan(logits[i])) return kNaN;
    max = std::max(max, static_cast<double>(logits[i]));
  }
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += std::exp(static_cast<double>(logits[i]) - max);
  return static_cast<double>(logits[token]) - max - std::log(sum);
}

void expect_log_prob(float got, double want) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << got;
  } else {
    EXPECT_NEAR(static_cast<double>(got), want, 2e-6 * std::max(1.0, std::abs(want)));
  }
}

class InstructionSets : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::vector<std::string> sets = cpu_instruction_sets();
    if (std::find(sets.begin(), sets.end(), GetParam()) == sets.end()) {
      GTEST_SKIP() << GetParam() << " is not here";
    }
    table_ = &cpu_backend(GetParam()).table();
    seed_ = fresh_seed();
    rng_.seed(seed_);
  }
  void TearDown() override {
    if (HasFailure()) GTEST_LOG_(INFO) << "SEGKI_TEST_SEED=" << seed_;
  }

  const BackendTable* table_ = nullptr;
  std::uint64_t seed_ = 0;
  Rng rng_;
};

class Argmax : public InstructionSets {
 protected:
  struct Answer {
    std::int64_t token;
    float log_prob;
  };

  // Of each row; rows are checked to be the same alone, in any number of parts and without
  // log_prob.
  std::vector<Answer> run(const std::vector<std::vector<float>>& logits) {
    const std::int64_t rows = static_cast<std::int64_t>(logits.size());
    const std::int64_t count = static_cast<std::int64_t>(logits[0].size());
    Problem<ArgmaxArgs> p;
    p.args.logits = p.tensor(DType::kF32, Shape{rows, count}, 3).view();
    p.args.tokens = p.tensor(DType::kI64, Shape{rows}).view();
    p.args.log_prob = p.tensor(DType::kF32, Shape{rows}).view();
    p.row_views = {&ArgmaxArgs::logits, &ArgmaxArgs::tokens, &ArgmaxArgs::log_prob};
    for (std::int64_t r = 0; r < rows; ++r) {
      std::copy(logits[static_cast<std::size_t>(r)].begin(),
                logits[static_cast<std::size_t>(r)].end(),
                p.args.logits.as<float>() + r * p.args.logits.stride[0]);
    }
    const std::vector<std::byte> before = p.bytes();
    EXPECT_EQ(run_kernel(*table_, p.args), 0);
    std::vector<Answer> answers;
    for (std::int64_t r = 0; r < rows; ++r) {
      answers.push_back({p.args.tokens.as<std::int64_t>()[r], p.args.log_prob.as<float>()[r]});
    }
    const std::vector<std::byte> after = p.bytes();
    p.restore(before);
    EXPECT_EQ(run_kernel(*table_, p.args, 3), 0);
    EXPECT_TRUE(p.bytes() == after);
    p.restore(before);
    for (std::int64_t r = rows; r-- > 0;) EXPECT_EQ(run_kernel(*table_, p.one_row(r)), 0);
    EXPECT_TRUE(p.bytes() == after);
    ArgmaxArgs tokens_only = p.args;
    tokens_only.log_prob = {};
    p.restore(before);
    EXPECT_EQ(run_kernel(*table_, tokens_only), 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      EXPECT_EQ(p.args.tokens.as<std::int64_t>()[r], answers[static_cast<std::size_t>(r)].token);
    }
    return answers;
  }

  void check(const std::vector<std::vector<float>>& logits) {
    const std::vector<Answer> answers = run(logits);
    for (std::size_t r = 0; r < logits.size(); ++r) {
      const std::int64_t count = static_cast<std::int64_t>(logits[r].size());
      const std::int64_t token = reference_argmax(logits[r].data(), count);
      EXPECT_EQ(answers[r].token, token) << "row " << r << " of " << count;
      expect_log_prob(answers[r].log_prob, reference_log_prob(logits[r].data(), count, token));
    }
  }

  std::vector<float> random_row(std::int64_t count) {
    std::vector<float> row(static_cast<std::size_t>(count));
    for (float& v : row) v = static_cast<float>(4.0 * normal(rng_));
    return row;
  }
};

TEST_P(Argmax, RandomRows) {
  for (const std::int64_t count : {1, 2, 15, 16, 17, 63, 1000, 1024, 1025, 4099, 49152, 250001}) {
    check({random_row(count), random_row(count), random_row(count)});
  }
}

TEST_P(Argmax, LowestOfEqualIndices) {
  for (int i = 0; i < 200; ++i) {
    std::vector<float> row = random_row(uniform(rng_, 2, 3000));
    const float top = *std::max_element(row.begin(), row.end());
    for (int copies = 0; copies < 3; ++copies) {
      row[static_cast<std::size_t>(uniform(rng_, 0, std::ssize(row) - 1))] = top;
    }
    check({row});
  }
  check({{-0.0F, 0.0F, -0.0F}, {0.0F, -0.0F, 0.0F}});
  check({std::vector<float>(5000, 2.5F)});
}

TEST_P(Argmax, FirstNaNIsLargest) {
  for (int i = 0; i < 200; ++i) {
    std::vector<float> row = random_row(uniform(rng_, 1, 3000));
    for (int copies = 0; copies < 2; ++copies) {
      row[static_cast<std::size_t>(uniform(rng_, 0, std::ssize(row) - 1))] =
          copies == 0 ? kNaN : -kNaN;
    }
    row[static_cast<std::size_t>(uniform(rng_, 0, std::ssize(row) - 1))] = kInfinity;
    check({row});
  }
}

TEST_P(Argmax, InfiniteLogits) {
  std::vector<float> row = random_row(2000);
  row[1500] = kInfinity;
  const std::vector<Answer> answers = run({row, std::vector<float>(2000, -kInfinity)});
  EXPECT_EQ(answers[0].token, 1500);
  EXPECT_TRUE(std::isnan(answers[0].log_prob));
  EXPECT_EQ(answers[1].token, 0);
  EXPECT_TRUE(std::isnan(answers[1].log_prob));
  row[1500] = -kInfinity;
  check({row});
}

class SelectToken : public InstructionSets {
 protected:
  static constexpr std::int64_t kRows = 3;
  static constexpr std::int64_t kVocabulary = 1200;
  static constexpr std::int64_t kColumns = 6;

  void SetUp() override {
    InstructionSets::SetUp();
    SelectTokenArgs& a = p_.args;
    a.logits = p_.tensor(DType::kF32, Shape{kRows, kVocabulary}, 1)
                   .fill([&] { return 3.0 * normal(rng_); })
                   .view();
    a.next = p_.tensor(DType::kI64, Shape{kRows}).fill([] { return 5.0; }).view();
    a.lengths = p_.tensor(DType::kI32, Shape{kRows}).fill([] { return 20.0; }).view();
    a.positions = p_.tensor(DType::kI32, Shape{kRows}).fill([] { return 17.0; }).view();
    a.generated = p_.tensor(DType::kI32, Shape{kRows}).fill([] { return 2.0; }).view();
    a.finished = p_.tensor(DType::kI32, Shape{kRows}).fill([] { return 0.0; }).view();
    a.history = p_.tensor(DType::kI64, Shape{kRows, kColumns}, 2).view();
    a.log_prob = p_.tensor(DType::kF32, Shape{kRows, kColumns}, 2).view();
    a.pad = 0;
    a.max_new_tokens = 5;
  }

  void run(std::int32_t parts = 1) { ASSERT_EQ(run_kernel(*table_, p_.args, parts), 0); }
  void set_eos(const std::vector<std::int64_t>& ids) {
    std::size_t i = 0;
    p_.args.eos = p_.tensor(DType::kI64, Shape{std::ssize(ids)})
                      .fill([&] { return static_cast<double>(ids[i++]); })
                      .view();
  }

  float* logits(std::int64_t r) { return p_.args.logits.as<float>() + r * (kVocabulary + 1); }
  std::int64_t best(std::int64_t r) { return reference_argmax(logits(r), kVocabulary); }
  std::int64_t& next(std::int64_t r) { return p_.args.next.as<std::int64_t>()[r]; }
  std::int32_t& generated(std::int64_t r) { return p_.args.generated.as<std::int32_t>()[r]; }
  std::int32_t& finished(std::int64_t r) { return p_.args.finished.as<std::int32_t>()[r]; }
  std::int64_t& history(std::int64_t r, std::int64_t i) {
    return p_.args.history.as<std::int64_t>()[r * (kColumns + 2) + i];
  }
  float& log_prob(std::int64_t r, std::int64_t i) {
    return p_.args.log_prob.as<float>()[r * (kColumns + 2) + i];
  }

  // The whole state of a row that ran and chose `token` at step 2.
  void expect_chosen(std::int64_t r, std::int64_t token, StopReason reason) {
    SCOPED_TRACE("row " + std::to_string(r));
    EXPECT_EQ(next(r), token);
    EXPECT_EQ(history(r, 2), token);
    expect_log_prob(log_prob(r, 2), reference_log_prob(logits(r), kVocabulary, token));
    EXPECT_EQ(generated(r), 3);
    EXPECT_EQ(p_.args.lengths.as<std::int32_t>()[r], 21);
    EXPECT_EQ(p_.args.positions.as<std::int32_t>()[r], 18);
    EXPECT_EQ(finished(r), static_cast<std::int32_t>(reason));
    for (std::int64_t i = 0; i < kColumns; ++i) {
      if (i == 2) continue;
      EXPECT_EQ(history(r, i), -1) << "column " << i;
      EXPECT_TRUE(std::isnan(log_prob(r, i))) << "column " << i;
    }
  }

  Problem<SelectTokenArgs> p_;
};

TEST_P(SelectToken, GreedyChoiceMovesTheRow) {
  const std::vector<std::byte> before = p_.bytes();
  run();
  for (std::int64_t r = 0; r < kRows; ++r) expect_chosen(r, best(r), StopReason::kRunning);
  const std::vector<std::byte> after = p_.bytes();
  p_.restore(before);
  run(2);
  EXPECT_TRUE(p_.bytes() == after);
  p_.restore(before);
  p_.args.log_prob = {};
  run();
  EXPECT_EQ(history(1, 2), best(1));
}

TEST_P(SelectToken, EosStopsAndTheStoppedRowEmitsPad) {
  logits(0)[4] = 100.0F;
  logits(1)[6] = 100.0F;
  logits(2)[5] = 100.0F;
  set_eos({kVocabulary + 7, best(1), 3});
  run();
  expect_chosen(0, 4, StopReason::kRunning);
  expect_chosen(1, best(1), StopReason::kEos);
  const std::int64_t eos = history(1, 2);
  run();
  EXPECT_EQ(next(1), 0);
  EXPECT_EQ(history(1, 2), eos);
  EXPECT_EQ(history(1, 3), 0);
  EXPECT_TRUE(std::isnan(log_prob(1, 3)));
  EXPECT_EQ(generated(1), 4);
  EXPECT_EQ(p_.args.lengths.as<std::int32_t>()[1], 21);
  EXPECT_EQ(p_.args.positions.as<std::int32_t>()[1], 18);
  EXPECT_EQ(finished(1), static_cast<std::int32_t>(StopReason::kEos));
  EXPECT_EQ(generated(0), 4);
  EXPECT_EQ(p_.args.lengths.as<std::int32_t>()[0], 22);
}

TEST_P(SelectToken, LengthStopsAndWritesPastTheEndAreDropped) {
  p_.args.max_new_tokens = 3;
  run();
  for (std::int64_t r = 0; r < kRows; ++r) expect_chosen(r, best(r), StopReason::kLength);
  const std::vector<std::byte> guard(p_.tensors[6].bytes().end() - Tensor::kGuard,
                                     p_.tensors[6].bytes().end());
  for (int i = 0; i < 20; ++i) run();
  EXPECT_EQ(generated(0), 23);
  EXPECT_EQ(history(0, kColumns - 1), 0);
  // The gap between rows keeps its poison.
  EXPECT_EQ(history(0, kColumns), -1);
  EXPECT_EQ(history(1, kColumns + 1), -1);
  EXPECT_TRUE(std::equal(guard.begin(), guard.end(), p_.tensors[6].bytes().end() - Tensor::kGuard));
  generated(1) = kColumns;
  finished(1) = 0;
  run();
  EXPECT_EQ(generated(1), kColumns + 1);
  EXPECT_EQ(next(1), best(1));
  EXPECT_EQ(history(1, kColumns), -1);
}

TEST_P(SelectToken, MinimumKeepsEosOut) {
  p_.args.min_new_tokens = 3;
  const std::int64_t first = best(0);
  std::vector<float> without(logits(0), logits(0) + kVocabulary);
  std::vector<std::int64_t> ids;
  // The five best of row 0, not in order of ids; row 1 and 2 have others on top.
  for (int i = 0; i < 5; ++i) {
    ids.push_back(reference_argmax(without.data(), kVocabulary));
    without[static_cast<std::size_t>(ids.back())] = -kInfinity;
  }
  set_eos({ids[3], ids[0], ids[0], ids[4], ids[1], ids[2], kVocabulary});
  std::int64_t allowed = 7;
  while (std::find(ids.begin(), ids.end(), allowed) != ids.end()) ++allowed;
  logits(1)[allowed] = 1000.0F;
  run();
  const std::int64_t chosen = reference_argmax(without.data(), kVocabulary);
  EXPECT_NE(chosen, first);
  expect_chosen(0, chosen, StopReason::kRunning);
  expect_chosen(1, allowed, StopReason::kRunning);
  // From the third token on eos is allowed.
  run();
  EXPECT_EQ(next(0), first);
  EXPECT_EQ(finished(0), static_cast<std::int32_t>(StopReason::kEos));
}

TEST_P(SelectToken, MinimumWithNothingLeftGivesIndexZero) {
  p_.args.min_new_tokens = 10;
  std::vector<std::int64_t> all;
  for (std::int64_t id = kVocabulary; id-- > 0;) all.push_back(id);
  set_eos(all);
  run();
  EXPECT_EQ(next(0), 0);
  set_eos({best(1)});
  for (std::int64_t i = 0; i < kVocabulary; ++i) {
    if (i != p_.args.eos.as<std::int64_t>()[0]) logits(1)[i] = -kInfinity;
  }
  run();
  EXPECT_EQ(next(1), 0);
}

TEST_P(SelectToken, ForcedTokensIgnoreEos) {
  set_eos({9, best(2)});
  std::int64_t forced[kRows][4] = {{1, 2, 9, 4}, {1, 2, 30, 4}, {1, 2, 1199, 4}};
  p_.args.forced = dense_view(forced, DType::kI64, kRows, 4);
  run();
  expect_chosen(0, 9, StopReason::kRunning);
  expect_chosen(1, 30, StopReason::kRunning);
  expect_chosen(2, 1199, StopReason::kRunning);
  run();
  run();
  EXPECT_EQ(finished(0), static_cast<std::int32_t>(StopReason::kLength));
  EXPECT_EQ(finished(2), static_cast<std::int32_t>(StopReason::kLength));
  EXPECT_EQ(history(0, 3), 4);
}

TEST_P(SelectToken, NaNStopsTheRowAlone) {
  set_eos({700, 3});
  logits(0)[4] = 100.0F;
  logits(1)[900] = kNaN;
  logits(1)[700] = kNaN;
  logits(2)[1199] = kNaN;
  p_.args.max_new_tokens = 3;
  run();
  expect_chosen(0, best(0), StopReason::kLength);
  expect_chosen(1, 700, StopReason::kNan);
  expect_chosen(2, 1199, StopReason::kNan);
  generated(1) = 1;
  finished(1) = 0;
  p_.args.min_new_tokens = 5;
  run();
  EXPECT_EQ(next(1), 700);
  EXPECT_EQ(finished(1), static_cast<std::int32_t>(StopReason::kNan));
}

TEST_P(SelectToken, FreezesARowInTheStepInWhichItFinishes) {
  std::vector<std::int32_t> frozen = {0, 0, 0};
  p_.args.frozen = dense_view(frozen.data(), DType::kI32, kRows);
  logits(0)[4] = 100.0F;
  logits(1)[6] = 100.0F;
  logits(2)[5] = 100.0F;
  set_eos({6});
  run();
  EXPECT_EQ(finished(1), static_cast<std::int32_t>(StopReason::kEos));
  EXPECT_EQ(frozen, (std::vector<std::int32_t>{0, 1, 0}));
  logits(2)[9] = kNaN;
  run();
  EXPECT_EQ(finished(2), static_cast<std::int32_t>(StopReason::kNan));
  EXPECT_EQ(frozen, (std::vector<std::int32_t>{0, 1, 1}));
  run();
  EXPECT_EQ(finished(0), static_cast<std::int32_t>(StopReason::kLength));
  EXPECT_EQ(frozen, (std::vector<std::int32_t>{1, 1, 1}));
}

TEST_P(SelectToken, FreezesARowThatHadFinishedBefore) {
  std::vector<std::int32_t> frozen = {0, 0, 0};
  p_.args.frozen = dense_view(frozen.data(), DType::kI32, kRows);
  finished(2) = static_cast<std::int32_t>(StopReason::kEos);
  run();
  EXPECT_EQ(frozen, (std::vector<std::int32_t>{0, 0, 1}));
}

TEST_P(SelectToken, NeverThawsARow) {
  std::vector<std::int32_t> frozen = {1, 1, 1};
  p_.args.frozen = dense_view(frozen.data(), DType::kI32, kRows);
  finished(2) = static_cast<std::int32_t>(StopReason::kEos);
  run();
  EXPECT_EQ(finished(0), 0);
  EXPECT_EQ(frozen, (std::vector<std::int32_t>{1, 1, 1}));
}

TEST_P(SelectToken, RowsThatGoOnAfterTheirEndAreNotFrozen) {
  std::vector<std::int32_t> frozen = {0, 0, 1};
  p_.args.frozen = dense_view(frozen.data(), DType::kI32, kRows);
  p_.args.advance_finished = 1;
  logits(0)[4] = 100.0F;
  logits(1)[6] = 100.0F;
  set_eos({6});
  run();
  run();
  EXPECT_EQ(finished(1), static_cast<std::int32_t>(StopReason::kEos));
  EXPECT_EQ(p_.args.lengths.as<std::int32_t>()[1], 22);
  EXPECT_EQ(frozen, (std::vector<std::int32_t>{0, 0, 1}));
}

INSTANTIATE_TEST_SUITE_P(, Argmax, ::testing::Values("avx512", "avx2", "generic"),
                         [](const auto& info) { return std::string(info.param); });
INSTANTIATE_TEST_SUITE_P(, SelectToken, ::testing::Values("avx512", "avx2", "generic"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace segki::test
