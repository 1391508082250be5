// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace vha::checkpoint::detail {

/// `text` fit for an error message. A hostile name may be 100 MB long, hold a NUL that would cut
/// the message short, or steer a terminal.
inline std::string printable(std::string_view text) {
  constexpr std::size_t limit = 200;
  std::size_t length = std::min(text.size(), limit);
  if (length < text.size()) {
    // Do not cut a UTF-8 sequence in two: step back to the start of the one that would be split.
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U) --length;
  }
  std::string out;
  for (const char c : text.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      constexpr std::string_view hex = "0123456789abcdef";
      out += "\\x";
      out += hex[byte >> 4U];
      out += hex[byte & 0xFU];
    } else {
      out += c;
    }
  }
  return length < text.size() ? out + "..." : out;
}

inline std::string tensor_label(const std::filesystem::path& file, std::string_view name) {
  return file.string() + ": tensor \"" + printable(name) + "\"";
}

inline std::string errno_text(int code) {
  return std::generic_category().message(code);
}

}  // namespace vha::checkpoint::detail
