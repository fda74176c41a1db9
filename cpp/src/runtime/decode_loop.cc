#include "segki/decode_loop.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "runtime/describe.h"
#include "segki/error.h"

namespace segki {
namespace {

[[noreturn]] void reject(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "decode loop: " + message);
}

void check_vector(const char* name, const TensorView& view, DType dtype, std::int64_t rows) {
  if (!view.present() || view.dtype != dtype || view.rank != 1 || view.shape[0] != rows ||
      (rows > 1 && view.stride[0] != 1)) {
    reject(std::string("state.") + name + " is " + describe(view) + ", accepted is dense " +
           name_of(dtype) + " [" + std::to_string(rows) + "]");
  }
}

void check_history(const char* name, const TensorView& view, DType dtype, std::int64_t rows,
                   std::int64_t columns) {
  if (!view.present() || view.dtype != dtype || view.rank != 2 || view.shape[0] != rows ||
      view.shape[1] < columns || (view.shape[1] > 1 && view.stride[1] != 1) ||
      (rows > 1 && view.stride[0] < view.shape[1])) {
    reject(std::string("state.") + name + " is " + describe(view) + ", accepted is " +
           name_of(dtype) + " [" + std::to_string(rows) + ", " + std::to_string(columns) +
           " or more] with dense rows that do not overlap");
  }
}

void check_state(const DecodeState& state, const StopRule& rule) {
  const std::int64_t rows = state.next.rank == 1 ? state.next.shape[0] : 0;
  if (!state.next.present() || rows < 1 || rows > kMaxRows) {
    reject("state.next is " + describe(state.next) + ", accepted is i64 [rows] with 1 to " +
           std::to_string(kMaxRows) + " rows");
  }
  check_vector("next", state.next, DType::kI64, rows);
  check_vector("lengths", state.lengths, DType::kI32, rows);
  check_vector("positions", state.positions, DType::kI32, rows);
  check_vector("generated", state.generated, DType::kI32, rows);
  check_vector("finished", state.finished, DType::kI32, rows);
  check_history("history", state.history, DType::kI64, rows, rule.max_new_tokens);
  if (state.log_prob.present()) {
    check_history("log_prob", state.log_prob, DType::kF32, rows, rule.max_new_tokens);
  }
}

// What one run knows: how far the replays are, and how far the latest look saw.
class Run {
 public:
  Run(const DecodeState& state, const StopRule& rule, bool on_host, std::int32_t already,
      const OnTokens& on_tokens)
      : state_(state),
        rule_(rule),
        on_host_(on_host),
        already_(already),
        on_tokens_(on_tokens),
        rows_(static_cast<std::int32_t>(state.next.shape[0])),
        seen_(already),
        given_(already) {
    result_.lengths.resize(static_cast<std::size_t>(rows_));
    result_.reasons.resize(static_cast<std::size_t>(rows_));
    if (on_host_) {
      check_generated(already, ErrorCode::kInvalidArgument);
      std::copy_n(state_.lengths.as<const std::int32_t>(), rows_, lengths_before_.begin());
    }
  }

  bool all_stopped() const { return all_stopped_; }
  bool ended() const { return ended_; }
  std::int32_t seen() const { return seen_; }

  // Takes in one look at `finished`, made when history held `column` tokens a row.
  void observe(const std::int32_t* finished, std::int32_t column) {
    if (on_host_) check_generated(column, ErrorCode::kState);
    all_stopped_ = true;
    for (std::int32_t r = 0; r < rows_; ++r) {
      const auto reason = static_cast<StopReason>(finished[r]);
      if (reason == StopReason::kNan) reject_nan(r, column);
      all_stopped_ = all_stopped_ && reason != StopReason::kRunning;
      result_.reasons[static_cast<std::size_t>(r)] = reason;
    }
    seen_ = column;
    give_tokens(all_stopped_ ? longest() : seen_);
  }

  DecodeResult finish(std::int32_t column, bool interrupted) {
    result_.steps_run = column - already_;
    result_.columns = longest();
    for (std::int32_t r = 0; r < rows_; ++r) {
      result_.lengths[static_cast<std::size_t>(r)] = valid_tokens(r);
    }
    result_.interrupted = interrupted;
    return std::move(result_);
  }

 private:
  void check_generated(std::int32_t expected, ErrorCode code) const {
    const auto* generated = state_.generated.as<const std::int32_t>();
    for (std::int32_t r = 0; r < rows_; ++r) {
      if (generated[r] == expected) continue;
      const std::string found =
          "generated[" + std::to_string(r) + "] is " + std::to_string(generated[r]);
      throw Error(code, code == ErrorCode::kState
                            ? "decode loop: " + found + " after a replay, it must be " +
                                  std::to_string(expected) + ": one more for every step and row"
                            : "decode loop: already is " + std::to_string(expected) + " but " +
                                  found + ", accepted is the count that all rows have");
    }
  }

  // A running row's cache length grows by one a step, so that the host can tell in which step it
  // stopped; behind a Look only the interval is known.
  [[noreturn]] void reject_nan(std::int32_t row, std::int32_t column) const {
    std::string where = "row " + std::to_string(row);
    if (column == already_) {
      where += ", before step " + std::to_string(already_);
    } else {
      std::int32_t first = seen_;
      std::int32_t last = column - 1;
      if (on_host_) {
        const std::int32_t ran = state_.lengths.as<const std::int32_t>()[row] -
                                 lengths_before_[static_cast<std::size_t>(row)];
        first = last = std::clamp(already_ + ran - 1, first, last);
      }
      where += first == last
                   ? ", step " + std::to_string(first)
                   : ", one of the steps " + std::to_string(first) + " to " + std::to_string(last);
    }
    throw Error(ErrorCode::kNumeric, "decode loop: a logit is NaN in " + where);
  }

  // New tokens of a row that are its own and not padding, among the columns seen.
  std::int32_t valid_tokens(std::int32_t row) const {
    if (result_.reasons[static_cast<std::size_t>(row)] != StopReason::kEos) return seen_;
    const std::int64_t* tokens =
        state_.history.as<const std::int64_t>() + row * state_.history.stride[0];
    for (std::int32_t c = 0; c < seen_; ++c) {
      if (std::find(rule_.eos.begin(), rule_.eos.end(), tokens[c]) != rule_.eos.end()) return c + 1;
    }
    return seen_;
  }

  std::int32_t longest() const {
    std::int32_t most = 0;
    for (std::int32_t r = 0; r < rows_; ++r) most = std::max(most, valid_tokens(r));
    return most;
  }

  void give_tokens(std::int32_t end) {
    if (!on_tokens_ || ended_ || end <= given_) return;
    const std::int32_t begin = std::exchange(given_, end);
    ended_ = !on_tokens_(begin, end - begin, state_.history.as<const std::int64_t>() + begin,
                         state_.history.stride[0]);
  }

  const DecodeState& state_;
  const StopRule& rule_;
  const bool on_host_;
  const std::int32_t already_;
  const OnTokens& on_tokens_;
  const std::int32_t rows_;
  std::int32_t seen_;   // columns that the latest look covers
  std::int32_t given_;  // columns that on_tokens has had
  bool all_stopped_ = false;
  bool ended_ = false;  // on_tokens said so
  std::array<std::int32_t, kMaxRows> lengths_before_ = {};
  DecodeResult result_;
};

}  // namespace

DecodeLoop::DecodeLoop(Replay replay, DecodeState state, StopRule rule, Look look)
    : replay_(std::move(replay)), state_(state), rule_(std::move(rule)), look_(std::move(look)) {
  if (!replay_) reject("replay is empty, accepted is a function that runs one step");
  if (static_cast<bool>(look_.begin_look) != static_cast<bool>(look_.end_look)) {
    reject("one of look.begin_look and look.end_look is empty, accepted are both or none");
  }
  check(rule_);
  check_state(state_, rule_);
}

DecodeResult DecodeLoop::run(std::int32_t already, const OnTokens& on_tokens,
                             const std::function<bool()>& interrupted) {
  // A running row stops at this many tokens, so that no replay past it can be of use.
  const std::int32_t limit = rule_.max_new_tokens;
  if (already < 0 || already > limit) {
    reject("already is " + std::to_string(already) + ", accepted is 0 to max_new_tokens (" +
           std::to_string(limit) + ")");
  }
  const bool on_host = !look_.begin_look;
  Run state(state_, rule_, on_host, already, on_tokens);
  std::int32_t column = already;
  std::int32_t look_column = -1;  // of a look begun and not yet ended
  bool stop_asked = false;
  for (;;) {
    if (on_host) {
      state.observe(state_.finished.as<const std::int32_t>(), column);
    } else if (look_column >= 0) {
      state.observe(look_.end_look(), std::exchange(look_column, -1));
    }
    if (state.all_stopped() || state.ended() || column == limit) break;
    stop_asked = interrupted && interrupted();
    if (stop_asked) break;
    if (!on_host) {
      look_.begin_look();
      look_column = column;
    }
    const std::int32_t pause = column + std::min(rule_.check_every, limit - column);
    for (; column < pause; ++column) replay_();
  }
  if (!on_host && !state.all_stopped()) {
    look_.begin_look();
    state.observe(look_.end_look(), column);
  }
  return state.finish(column, stop_asked);
}

}  // namespace segki
