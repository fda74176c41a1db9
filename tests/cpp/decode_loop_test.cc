#include "segki/decode_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "allocation_count.h"
#include "segki/error.h"

namespace {

std::atomic<long> allocations{0};

void* counted_malloc(std::size_t bytes) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(std::max<std::size_t>(bytes, 1));
}

}  // namespace

// Not inlined, or GCC takes the pairs for mismatched ones.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* address = counted_malloc(bytes);
  if (address == nullptr) throw std::bad_alloc();
  return address;
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted_malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* address) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, std::size_t) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, const std::nothrow_t&) noexcept {
  std::free(address);
}

namespace segki {
namespace testing {

long allocation_count() { return allocations.load(std::memory_order_relaxed); }

}  // namespace testing

namespace {

constexpr std::int64_t kPoison = -77;
constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();

// A model without weights: each row says what it would choose in each step. The bookkeeping is that
// of select_token.
class FakeModel {
 public:
  FakeModel(int rows, int capacity, StopRule rule)
      : rule(std::move(rule)),
        capacity_(capacity),
        next_(size(rows), 5),
        lengths_(size(rows), 10),
        positions_(size(rows), 10),
        generated_(size(rows), 0),
        finished_(size(rows), 0),
        history_(size(rows) * size(capacity), kPoison),
        eos_step(size(rows), kNever),
        nan_step(size(rows), kNever) {}

  void step() {
    ++replays;
    for (std::size_t r = 0; r < next_.size(); ++r) {
      const std::int32_t column = generated_[r];
      if (finished_[r] != 0) {
        put(r, column, rule.pad);
        ++generated_[r];
        continue;
      }
      std::int64_t token = 100 + 10 * column + static_cast<std::int64_t>(r);
      const bool is_eos = column >= eos_step[r] && column >= rule.min_new_tokens;
      if (is_eos) token = rule.eos[r % rule.eos.size()];
      put(r, column, token);
      ++generated_[r];
      ++lengths_[r];
      ++positions_[r];
      if (is_eos) {
        finished_[r] = 1;
      } else if (generated_[r] >= rule.max_new_tokens) {
        finished_[r] = 2;
      }
      if (column == nan_step[r]) finished_[r] = 3;
    }
  }

  DecodeState state() {
    const auto rows = static_cast<std::int64_t>(next_.size());
    DecodeState views;
    views.next = dense_view(next_.data(), DType::kI64, rows);
    views.lengths = dense_view(lengths_.data(), DType::kI32, rows);
    views.positions = dense_view(positions_.data(), DType::kI32, rows);
    views.generated = dense_view(generated_.data(), DType::kI32, rows);
    views.finished = dense_view(finished_.data(), DType::kI32, rows);
    views.history = dense_view(history_.data(), DType::kI64, rows, capacity_);
    return views;
  }

  DecodeLoop loop() {
    return DecodeLoop([this] { step(); }, state(), rule);
  }

  std::int64_t token(int row, int column) const {
    return history_[size(row) * size(capacity_) + size(column)];
  }
  const std::vector<std::int32_t>& finished() const { return finished_; }
  const std::vector<std::int64_t>& history() const { return history_; }

  // New tokens of a row that are not padding, once it has been run to its end.
  std::int32_t valid(int row) const {
    const std::int32_t at = eos_step[size(row)];
    if (at == kNever) return rule.max_new_tokens;
    return std::min(std::max(at, rule.min_new_tokens) + 1, rule.max_new_tokens);
  }
  std::int32_t longest() const {
    std::int32_t most = 0;
    for (std::size_t r = 0; r < next_.size(); ++r)
      most = std::max(most, valid(static_cast<int>(r)));
    return most;
  }

  StopRule rule;
  int replays = 0;

 private:
  static std::size_t size(int value) { return static_cast<std::size_t>(value); }

  void put(std::size_t row, std::int32_t column, std::int64_t token) {
    next_[row] = token;
    ASSERT_LT(column, capacity_) << "a replay past the end of history";
    history_[row * size(capacity_) + size(column)] = token;
  }

  int capacity_;
  std::vector<std::int64_t> next_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> generated_;
  std::vector<std::int32_t> finished_;
  std::vector<std::int64_t> history_;

 public:
  std::vector<std::int32_t> eos_step;  // the column from which a row chooses an eos id
  std::vector<std::int32_t> nan_step;
};

// Stands for a device: the host sees what the latest begin_look copied and nothing newer.
class FakeDevice {
 public:
  explicit FakeDevice(FakeModel& model)
      : model_(model), finished_(model.finished()), history_(model.history().size(), kPoison) {}

  DecodeLoop loop() {
    DecodeState views = model_.state();
    const std::vector<std::int32_t> unreadable(finished_.size(), -1);
    unreadable_ = unreadable;
    const auto rows = static_cast<std::int64_t>(finished_.size());
    views.history.data = history_.data();
    views.finished = dense_view(unreadable_.data(), DType::kI32, rows);
    views.generated = dense_view(unreadable_.data(), DType::kI32, rows);
    views.lengths = dense_view(unreadable_.data(), DType::kI32, rows);
    Look look;
    look.begin_look = [this] {
      ++begun;
      copied_finished_ = model_.finished();
      copied_history_ = model_.history();
    };
    look.end_look = [this] {
      EXPECT_GT(begun, ended) << "end_look without begin_look";
      ended = begun;
      finished_ = copied_finished_;
      std::copy(copied_history_.begin(), copied_history_.end(), history_.begin());
      return finished_.data();
    };
    return DecodeLoop([this] { model_.step(); }, views, model_.rule, look);
  }

  int begun = 0;
  int ended = 0;

 private:
  FakeModel& model_;
  std::vector<std::int32_t> finished_;
  std::vector<std::int64_t> history_;
  std::vector<std::int32_t> unreadable_;
  std::vector<std::int32_t> copied_finished_;
  std::vector<std::int64_t> copied_history_;
};

StopRule make_rule(std::int32_t max_new_tokens, std::int32_t check_every) {
  StopRule rule;
  rule.eos = {2};
  rule.pad = 0;
  rule.max_new_tokens = max_new_tokens;
  rule.check_every = check_every;
  return rule;
}

std::int32_t next_multiple(std::int32_t value, std::int32_t of) {
  return (value + of - 1) / of * of;
}

// Collects what on_tokens gets and fails unless every column comes once and in order.
struct Collector {
  explicit Collector(int rows, std::int32_t begin = 0)
      : tokens(static_cast<std::size_t>(rows)), expected_begin(begin) {}

  OnTokens callback() {
    return [this](std::int32_t begin, std::int32_t count, const std::int64_t* values,
                  std::int64_t stride) {
      EXPECT_EQ(begin, expected_begin);
      EXPECT_GT(count, 0);
      expected_begin = begin + count;
      ++calls;
      for (std::size_t r = 0; r < tokens.size(); ++r) {
        for (std::int32_t i = 0; i < count; ++i) {
          tokens[r].push_back(values[static_cast<std::int64_t>(r) * stride + i]);
        }
      }
      return calls != stop_at_call;
    };
  }

  std::vector<std::vector<std::int64_t>> tokens;
  std::int32_t expected_begin;
  int calls = 0;
  int stop_at_call = 0;
};

void expect_error(ErrorCode code, const std::string& part, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(DecodeLoop, LooksOnlyEveryCheckEverySteps) {
  for (const std::int32_t every : {1, 2, 16}) {
    for (const std::int32_t eos_at : {0, 1, 14, 15, 16, 17, 31, 32, 39}) {
      FakeModel model(1, 40, make_rule(40, every));
      model.eos_step[0] = eos_at;
      const DecodeResult result = model.loop().run();
      SCOPED_TRACE("check_every " + std::to_string(every) + ", eos " + std::to_string(eos_at));
      EXPECT_EQ(model.replays, std::min(40, next_multiple(eos_at + 1, every)));
      EXPECT_EQ(result.steps_run, model.replays);
      EXPECT_EQ(result.columns, eos_at + 1);
      EXPECT_EQ(result.lengths, std::vector<std::int32_t>{eos_at + 1});
      EXPECT_EQ(result.reasons, std::vector<StopReason>{StopReason::kEos});
      EXPECT_FALSE(result.interrupted);
      for (int c = eos_at + 1; c < model.replays; ++c) EXPECT_EQ(model.token(0, c), 0);
    }
  }
}

TEST(DecodeLoop, StopsByLengthAroundMultiplesOfCheckEvery) {
  for (const std::int32_t every : {1, 2, 16, 1000}) {
    for (const std::int32_t length : {1, 2, 15, 16, 17, 32, 33}) {
      FakeModel model(2, length, make_rule(length, every));
      const DecodeResult result = model.loop().run();
      EXPECT_EQ(model.replays, length);
      EXPECT_EQ(result.columns, length);
      EXPECT_EQ(result.lengths, (std::vector<std::int32_t>{length, length}));
      EXPECT_EQ(result.reasons, (std::vector<StopReason>(2, StopReason::kLength)));
    }
  }
}

TEST(DecodeLoop, RowsStopAtDifferentTimesAndEmitPadZero) {
  FakeModel model(4, 64, make_rule(30, 8));
  model.rule.eos = {2, 7, 0};  // pad is an eos id as well
  model.eos_step = {3, 20, kNever, 0};
  const DecodeResult result = model.loop().run();
  EXPECT_EQ(model.replays, 30);
  EXPECT_EQ(result.columns, 30);
  EXPECT_EQ(result.lengths, (std::vector<std::int32_t>{4, 21, 30, 1}));
  EXPECT_EQ(result.reasons, (std::vector<StopReason>{StopReason::kEos, StopReason::kEos,
                                                     StopReason::kLength, StopReason::kEos}));
  for (int c = 4; c < 30; ++c) EXPECT_EQ(model.token(0, c), 0);
  EXPECT_EQ(model.token(0, 3), 2);
  EXPECT_EQ(model.token(1, 20), 7);
}

TEST(DecodeLoop, ColumnsAreThoseOfTheLongestRow) {
  FakeModel model(3, 64, make_rule(64, 16));
  model.eos_step = {3, 17, 9};
  Collector collector(3);
  const DecodeResult result = model.loop().run(0, collector.callback());
  EXPECT_EQ(result.steps_run, 32);
  EXPECT_EQ(result.columns, 18);
  EXPECT_EQ(collector.expected_begin, 18);
}

TEST(DecodeLoop, MinNewTokens) {
  FakeModel model(2, 40, make_rule(40, 4));
  model.rule.min_new_tokens = 9;
  model.eos_step = {0, 12};
  const DecodeResult result = model.loop().run();
  EXPECT_EQ(result.lengths, (std::vector<std::int32_t>{10, 13}));
  EXPECT_EQ(result.steps_run, 16);
}

TEST(DecodeLoop, NoReplayWhenNothingIsToDo) {
  FakeModel model(2, 8, make_rule(8, 4));
  model.eos_step = {0, 0};
  model.step();  // the prefill's token ends both rows
  model.replays = 0;
  Collector collector(2, 1);
  const DecodeResult result = model.loop().run(1, collector.callback());
  EXPECT_EQ(model.replays, 0);
  EXPECT_EQ(result.columns, 1);
  EXPECT_EQ(result.lengths, (std::vector<std::int32_t>{1, 1}));
  EXPECT_EQ(collector.calls, 0);

  FakeModel full(1, 1, make_rule(1, 4));
  full.step();
  EXPECT_EQ(full.loop().run(1).steps_run, 0);
  EXPECT_EQ(full.replays, 1);
}

TEST(DecodeLoop, OnTokensGetsEachColumnOnce) {
  FakeModel model(2, 50, make_rule(50, 8));
  model.step();
  model.eos_step = {11, 21};
  Collector collector(2, 1);
  const DecodeResult result = model.loop().run(1, collector.callback());
  EXPECT_EQ(collector.calls, 3);  // columns 1..8, 9..16, 17..21
  EXPECT_EQ(collector.expected_begin, 22);
  EXPECT_EQ(result.columns, 22);
  for (int r = 0; r < 2; ++r) {
    for (int c = 1; c < 22; ++c) {
      EXPECT_EQ(collector.tokens[static_cast<std::size_t>(r)][static_cast<std::size_t>(c - 1)],
                model.token(r, c));
    }
  }
}

TEST(DecodeLoop, OnTokensMayEndTheLoopAndTheRunGoesOn) {
  FakeModel model(1, 40, make_rule(40, 4));
  model.eos_step = {18};
  DecodeLoop loop = model.loop();
  Collector collector(1);
  collector.stop_at_call = 2;
  const DecodeResult first = loop.run(0, collector.callback());
  EXPECT_EQ(first.steps_run, 8);
  EXPECT_EQ(first.columns, 8);
  EXPECT_EQ(first.lengths, std::vector<std::int32_t>{8});
  EXPECT_EQ(first.reasons, std::vector<StopReason>{StopReason::kRunning});
  EXPECT_FALSE(first.interrupted);
  const DecodeResult second = loop.run(first.columns, collector.callback());
  EXPECT_EQ(second.steps_run, 12);
  EXPECT_EQ(second.columns, 19);
  EXPECT_EQ(second.reasons, std::vector<StopReason>{StopReason::kEos});
  EXPECT_EQ(collector.expected_begin, 19);
  EXPECT_EQ(collector.tokens[0].size(), 19U);
}

TEST(DecodeLoop, InterruptedIsAskedAtEachLook) {
  FakeModel model(2, 100, make_rule(100, 16));
  model.eos_step = {5, kNever};
  DecodeLoop loop = model.loop();
  int asked = 0;
  const DecodeResult first = loop.run(0, {}, [&asked] { return ++asked == 3; });
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(first.steps_run, 32);
  EXPECT_TRUE(first.interrupted);
  EXPECT_EQ(first.lengths, (std::vector<std::int32_t>{6, 32}));
  EXPECT_EQ(first.reasons, (std::vector<StopReason>{StopReason::kEos, StopReason::kRunning}));
  const DecodeResult second = loop.run(32);
  EXPECT_EQ(second.steps_run, 68);
  EXPECT_FALSE(second.interrupted);
  EXPECT_EQ(second.lengths, (std::vector<std::int32_t>{6, 100}));
  EXPECT_EQ(model.replays, 100);
}

TEST(DecodeLoop, WhatTheReplayThrowsComesThrough) {
  FakeModel model(1, 40, make_rule(40, 4));
  int calls = 0;
  DecodeLoop loop(
      [&] {
        if (++calls == 7) throw std::domain_error("seventh");
        model.step();
      },
      model.state(), model.rule);
  EXPECT_THROW(loop.run(), std::domain_error);
  EXPECT_EQ(model.replays, 6);
  const DecodeResult result = loop.run(6);
  EXPECT_EQ(result.steps_run, 34);
  EXPECT_EQ(result.columns, 40);
}

TEST(DecodeLoop, NanNamesRowAndStep) {
  for (const std::int32_t every : {1, 4, 16}) {
    for (const std::int32_t step : {0, 3, 4, 11}) {
      FakeModel model(3, 40, make_rule(40, every));
      model.eos_step[0] = 2;
      model.nan_step[1] = step;
      expect_error(ErrorCode::kNumeric, "NaN in row 1, step " + std::to_string(step),
                   [&] { model.loop().run(); });
      EXPECT_EQ(model.replays, next_multiple(step + 1, every));
    }
  }
  FakeModel model(1, 40, make_rule(40, 4));
  model.nan_step[0] = 0;
  model.step();
  expect_error(ErrorCode::kNumeric, "row 0, before step 1", [&] { model.loop().run(1); });
}

TEST(DecodeLoop, NanBehindALookNamesTheInterval) {
  FakeModel model(2, 40, make_rule(40, 4));
  model.nan_step[1] = 5;
  FakeDevice device(model);
  expect_error(ErrorCode::kNumeric, "row 1, one of the steps 4 to 7", [&] { device.loop().run(); });
}

TEST(DecodeLoop, ALookIsReadOneIntervalLater) {
  for (const std::int32_t every : {1, 2, 16}) {
    for (const std::int32_t eos_at : {0, 1, 15, 16, 30, 39}) {
      FakeModel model(1, 40, make_rule(40, every));
      model.eos_step[0] = eos_at;
      FakeDevice device(model);
      Collector collector(1);
      const DecodeResult result = device.loop().run(0, collector.callback());
      EXPECT_EQ(model.replays, std::min(40, next_multiple(eos_at + 1, every) + every));
      EXPECT_EQ(device.begun, device.ended);
      EXPECT_EQ(result.columns, eos_at + 1);
      EXPECT_EQ(collector.expected_begin, eos_at + 1);
      EXPECT_EQ(result.reasons, std::vector<StopReason>{StopReason::kEos});
    }
  }
}

TEST(DecodeLoop, InterruptedBehindALookKnowsTheLatestState) {
  FakeModel model(2, 100, make_rule(100, 8));
  model.eos_step = {13, kNever};
  FakeDevice device(model);
  Collector collector(2);
  int asked = 0;
  const DecodeResult result =
      device.loop().run(0, collector.callback(), [&asked] { return ++asked == 3; });
  EXPECT_EQ(result.steps_run, 16);
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.lengths, (std::vector<std::int32_t>{14, 16}));
  EXPECT_EQ(collector.expected_begin, 16);
}

TEST(DecodeLoop, RandomRunsMatchTheSimulation) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto draw = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 500; ++trial) {
    const int rows = draw(1, 5);
    const int length = draw(1, 40);
    StopRule rule = make_rule(length, draw(1, 18));
    rule.min_new_tokens = draw(0, 6);
    rule.eos = {2, 3};
    rule.pad = draw(0, 3);
    FakeModel model(rows, length + draw(0, 3), rule);
    for (auto& at : model.eos_step) at = draw(0, 3) == 0 ? kNever : draw(0, 45);
    const int already = draw(0, std::min(2, length));
    for (int i = 0; i < already; ++i) model.step();
    model.replays = 0;
    FakeDevice device(model);
    const bool on_device = draw(0, 1) == 1;
    Collector collector(rows, already);
    const DecodeResult result =
        (on_device ? device.loop() : model.loop()).run(already, collector.callback());
    const std::int32_t needed = std::max(0, model.longest() - already);
    const std::int32_t seen_late = on_device ? rule.check_every : 0;
    const std::int32_t steps =
        std::min(length - already, next_multiple(needed, rule.check_every) + seen_late);
    ASSERT_EQ(result.steps_run, steps);
    ASSERT_EQ(model.replays, steps);
    ASSERT_EQ(result.columns, model.longest());
    ASSERT_EQ(collector.expected_begin, std::max(already, model.longest()));
    for (int r = 0; r < rows; ++r) {
      ASSERT_EQ(result.lengths[static_cast<std::size_t>(r)], model.valid(r));
      ASSERT_EQ(static_cast<std::int32_t>(result.reasons[static_cast<std::size_t>(r)]),
                model.finished()[static_cast<std::size_t>(r)]);
    }
  }
}

TEST(DecodeLoop, AllocatesNothingBetweenReplays) {
  FakeModel model(3, 200, make_rule(200, 4));
  model.eos_step = {kNever, 150, 20};
  long at_first_replay = 0;
  long at_last_look = 0;
  DecodeLoop loop(
      [&] {
        if (model.replays == 0) at_first_replay = testing::allocation_count();
        model.step();
      },
      model.state(), model.rule);
  loop.run(
      0,
      [&](std::int32_t, std::int32_t, const std::int64_t*, std::int64_t) {
        at_last_look = testing::allocation_count();
        return true;
      },
      [] { return false; });
  EXPECT_EQ(model.replays, 200);
  EXPECT_GT(at_first_replay, 0);
  EXPECT_EQ(at_last_look, at_first_replay);
}

TEST(DecodeLoop, AReplayMustAdvanceTheState) {
  FakeModel model(2, 40, make_rule(40, 4));
  DecodeLoop loop([] {}, model.state(), model.rule);
  expect_error(ErrorCode::kState, "generated[0] is 0 after a replay, it must be 4",
               [&] { loop.run(); });
}

TEST(DecodeLoop, AlreadyMustBeWhatTheStateSays) {
  FakeModel model(1, 8, make_rule(8, 4));
  DecodeLoop loop = model.loop();
  expect_error(ErrorCode::kInvalidArgument, "already is -1", [&] { loop.run(-1); });
  expect_error(ErrorCode::kInvalidArgument, "already is 9, accepted is 0 to max_new_tokens (8)",
               [&] { loop.run(9); });
  expect_error(ErrorCode::kInvalidArgument, "already is 3 but generated[0] is 0",
               [&] { loop.run(3); });
  EXPECT_EQ(model.replays, 0);
  EXPECT_EQ(loop.run().columns, 8);
}

TEST(DecodeLoop, RejectsBadArguments) {
  FakeModel model(2, 8, make_rule(8, 4));
  const Replay replay = [&model] { model.step(); };
  const auto expect_rejected = [&](const std::string& part,
                                   const std::function<void(DecodeState&, StopRule&)>& spoil) {
    DecodeState state = model.state();
    StopRule rule = model.rule;
    spoil(state, rule);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { DecodeLoop(replay, state, rule); });
  };
  expect_rejected("max_new_tokens is 0", [](auto&, auto& rule) { rule.max_new_tokens = 0; });
  expect_rejected("state.history is i64 [2, 8], accepted is i64 [2, 9 or more]",
                  [](auto&, auto& rule) { rule.max_new_tokens = 9; });
  expect_rejected("state.next is absent", [](auto& state, auto&) { state.next = {}; });
  expect_rejected("state.next is i64 [0]", [](auto& state, auto&) { state.next.shape[0] = 0; });
  expect_rejected("state.next is i64 [65]", [](auto& state, auto&) { state.next.shape[0] = 65; });
  expect_rejected("state.next is i32 [2], accepted is dense i64 [2]",
                  [](auto& state, auto&) { state.next.dtype = DType::kI32; });
  expect_rejected("state.lengths is i32 [1]",
                  [](auto& state, auto&) { state.lengths.shape[0] = 1; });
  expect_rejected("state.positions is i64 [2], accepted is dense i32 [2]",
                  [](auto& state, auto&) { state.positions.dtype = DType::kI64; });
  expect_rejected("state.generated is i32 [2]",
                  [](auto& state, auto&) { state.generated.stride[0] = 2; });
  expect_rejected("state.finished is absent", [](auto& state, auto&) { state.finished = {}; });
  expect_rejected("state.history is i64 [2, 8]",
                  [](auto& state, auto&) { state.history.stride[0] = 7; });
  expect_rejected("state.log_prob is i64 [2, 8], accepted is f32 [2, 8 or more]",
                  [](auto& state, auto&) { state.log_prob = state.history; });
  expect_error(ErrorCode::kInvalidArgument, "replay is empty",
               [&] { DecodeLoop(Replay(), model.state(), model.rule); });
  Look half;
  half.begin_look = [] {};
  expect_error(ErrorCode::kInvalidArgument, "begin_look",
               [&] { DecodeLoop(replay, model.state(), model.rule, half); });
}

}  // namespace
}  // namespace segki
