// Tests of segki::Error.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "segki/error.h"

namespace segki {

// Runs `call`, which must throw segki::Error, and returns it.
template <typename Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kOk, "");
}

inline bool contains(const Error& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

}  // namespace segki
