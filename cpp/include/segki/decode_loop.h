// Calls a replay until every row has stopped.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "segki/export.h"
#include "segki/ops.h"
#include "segki/stop.h"

namespace segki {

// The per-row state that a step reads and advances (see SelectTokenArgs). The memory belongs to the
// caller: host memory for a host backend, device memory else.
struct DecodeState {
  TensorView next;       // i64 [rows], input token of the coming step
  TensorView lengths;    // i32 [rows]
  TensorView positions;  // i32 [rows]
  TensorView generated;  // i32 [rows]
  TensorView finished;   // i32 [rows], StopReason
  TensorView history;    // i64 [rows, capacity]
  TensorView log_prob;   // f32 [rows, capacity], optional
};

// Runs one step. It must advance `generated` and `finished` as select_token does; a step program
// that ends with that op does.
using Replay = std::function<void()>;

// New tokens of all rows since the last call: `tokens[r * stride + i]` for i in [0, count), first
// step number `begin`. Return false to end the loop.
using OnTokens = std::function<bool(std::int32_t begin, std::int32_t count,
                                    const std::int64_t* tokens, std::int64_t stride)>;

// How the loop looks at the state without making a device wait: `begin_look` starts copying
// `finished`, `end_look` gives the copy started by the latest begin_look (rows values). On the host
// both are trivial; leave them empty then.
struct Look {
  std::function<void()> begin_look;
  std::function<const std::int32_t*()> end_look;
};

struct DecodeResult {
  std::int32_t steps_run = 0;  // replays made by this run
  std::int32_t columns = 0;    // columns of history that hold tokens: the longest row's count
  std::vector<std::int32_t> lengths;  // valid new tokens of each row, its eos included
  std::vector<StopReason> reasons;    // kRunning when the loop was ended from outside
  bool interrupted = false;
};

// Every `check_every` steps it looks which rows have stopped, gives new tokens to `on_tokens` and
// asks `interrupted`; between looks it does nothing but call the replay. Steps run past the last
// row's end write pad: at most check_every - 1 of them on the host, 2 * check_every - 1 with a Look
// (whose answer is one interval old), and never more than history has room for. History must be
// readable by the host up to the column of the latest ended look.
class SEGKI_EXPORT DecodeLoop {
 public:
  // Throws Error(kInvalidArgument): bad rule, views of wrong dtype or shape, history narrower than
  // rule.max_new_tokens.
  DecodeLoop(Replay replay, DecodeState state, StopRule rule, Look look = {});

  // `already` tokens of history are there (the prefill's first token): generated[r] == already for
  // all rows. Throws Error(kNumeric) naming row and step when a row stopped by NaN, and what the
  // replay throws. The state stays consistent: the loop may be run again.
  DecodeResult run(std::int32_t already = 0, const OnTokens& on_tokens = {},
                   const std::function<bool()>& interrupted = {});

 private:
  Replay replay_;
  DecodeState state_;
  StopRule rule_;
  Look look_;
};

}  // namespace segki
