// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint {

/// A JSON document whose objects keep the order of their keys.
using Json = nlohmann::ordered_json;

/// The document in `text`, which came from `file`.
/// @throws vha::Error naming the file, if it is not JSON, nests deeper than 64 levels, or says a key
/// twice: parsers differ in which of the two they take.
inline Json parse_json(const std::filesystem::path& file, std::string_view text) {
  // The parser takes a NUL for the end of its input and would not look at what comes after.
  if (text.find('\0') != std::string_view::npos) raise(file.string(), "valid JSON", "a NUL byte");
  constexpr int deepest = 64;
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t event, Json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > deepest) raise(file.string(), "at most 64 levels of nesting", "more");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      raise(file.string() + ": \"" + detail::printable(parsed.get<std::string>()) + "\"",
            "one key of that name", "two");
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const nlohmann::json::exception& error) {
    std::string_view what = error.what();
    what = what.substr(0, what.find("; last read"));
    raise(file.string(), "valid JSON", detail::printable(what));
  }
}

/// The document in `file`, of 100 MB at most.
/// @throws vha::Error as `parse_json` does, and where the file cannot be read.
inline Json read_json(const std::filesystem::path& file) {
  constexpr std::size_t most = 100'000'000;
  const detail::MappedFile bytes(file, 1);
  if (bytes.size() > most) {
    raise(file.string(), "at most " + std::to_string(most) + " bytes",
          std::to_string(bytes.size()));
  }
  return parse_json(file, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace vha::checkpoint
