// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace vha {

/// What every check at the library's boundary throws. The text names the argument, what was
/// expected of it and what came: "query.weight: expected [2048, 1024], got [1024, 2048]".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws the Error; out of line so that the checks stay small where they stand.
[[noreturn]] inline void raise(std::string_view argument, const std::string& expected,
                               const std::string& actual) {
  throw Error(std::string(argument) + ": expected " + expected + ", got " + actual);
}

/// Writes its arguments one after the other, as a stream does.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

/// A shape as it stands in messages: "[2, 7, 32]".
template <class... Sizes>
std::string shape_text(Sizes... sizes) {
  std::ostringstream stream;
  const char* separator = "[";
  ((stream << separator << sizes, separator = ", "), ...);
  stream << ']';
  return stream.str();
}

}  // namespace vha
