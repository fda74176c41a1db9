#include "segki/stop.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "segki/error.h"

namespace segki {
namespace {

StopRule valid_rule() {
  StopRule rule;
  rule.eos = {2, 7};
  rule.max_new_tokens = 8;
  return rule;
}

TEST(Stop, AcceptsWhatIsInRange) {
  EXPECT_NO_THROW(check(valid_rule()));
  StopRule rule = valid_rule();
  rule.eos = {};
  rule.min_new_tokens = 0;
  rule.max_new_tokens = 1;
  rule.check_every = 1;
  rule.pad = 0;
  EXPECT_NO_THROW(check(rule));
  rule.eos = {0};
  EXPECT_NO_THROW(check(rule));
}

TEST(Stop, MessageNamesArgumentGivenAndAccepted) {
  struct Case {
    std::function<void(StopRule&)> spoil;
    std::string message;
  };
  const Case cases[] = {
      {[](StopRule& rule) { rule.max_new_tokens = 0; },
       "stop rule: max_new_tokens is 0, accepted is 1 or more"},
      {[](StopRule& rule) { rule.max_new_tokens = -3; },
       "stop rule: max_new_tokens is -3, accepted is 1 or more"},
      {[](StopRule& rule) { rule.min_new_tokens = -1; },
       "stop rule: min_new_tokens is -1, accepted is 0 or more"},
      {[](StopRule& rule) { rule.check_every = 0; },
       "stop rule: check_every is 0, accepted is 1 or more"},
      {[](StopRule& rule) { rule.pad = -1; },
       "stop rule: pad is -1, accepted is a token id, 0 or more"},
      {[](StopRule& rule) { rule.eos[1] = -9; },
       "stop rule: eos[1] is -9, accepted is a token id, 0 or more"},
  };
  for (const Case& test : cases) {
    StopRule rule = valid_rule();
    test.spoil(rule);
    try {
      check(rule);
      ADD_FAILURE() << "accepted: " << test.message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(std::string(error.what()), test.message);
    }
  }
}

}  // namespace
}  // namespace segki
