// When a row stops.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "segki/export.h"

namespace segki {

enum class StopReason : std::int32_t {
  kRunning = 0,
  kEos = 1,     // chose one of the end-of-sequence ids (it is the row's last valid token)
  kLength = 2,  // reached max_new_tokens
  kNan = 3,     // a logit was NaN
};

struct StopRule {
  std::vector<std::int64_t> eos;    // may be empty: rows stop by length alone
  std::int32_t min_new_tokens = 0;  // no eos id is chosen before this many new tokens
  std::int32_t max_new_tokens = 0;  // >= 1
  std::int64_t pad = 0;           // what a stopped row emits; any id of the vocabulary, 0 included
  std::int32_t check_every = 16;  // steps between two looks at which rows have stopped; >= 1
};

// Throws Error(kInvalidArgument): max_new_tokens < 1, min_new_tokens < 0, check_every < 1, an id
// that is negative.
SEGKI_EXPORT void check(const StopRule& rule);

}  // namespace segki
