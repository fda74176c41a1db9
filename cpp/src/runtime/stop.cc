#include "segki/stop.h"

#include <string>

#include "segki/error.h"

namespace segki {
namespace {

[[noreturn]] void reject(const std::string& what, std::int64_t given, const std::string& accepted) {
  throw Error(ErrorCode::kInvalidArgument,
              "stop rule: " + what + " is " + std::to_string(given) + ", accepted is " + accepted);
}

}  // namespace

void check(const StopRule& rule) {
  if (rule.max_new_tokens < 1) reject("max_new_tokens", rule.max_new_tokens, "1 or more");
  if (rule.min_new_tokens < 0) reject("min_new_tokens", rule.min_new_tokens, "0 or more");
  if (rule.check_every < 1) reject("check_every", rule.check_every, "1 or more");
  if (rule.pad < 0) reject("pad", rule.pad, "a token id, 0 or more");
  for (std::size_t i = 0; i < rule.eos.size(); ++i) {
    if (rule.eos[i] < 0) {
      reject("eos[" + std::to_string(i) + "]", rule.eos[i], "a token id, 0 or more");
    }
  }
}

}  // namespace segki
