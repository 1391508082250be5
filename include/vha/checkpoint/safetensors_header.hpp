// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/dtype.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint {

/// `__metadata__`: a flat map of strings.
using Metadata = std::map<std::string, std::string>;

/// The format's limit on the length of the JSON header.
inline constexpr std::uint64_t max_header_bytes = 100'000'000;

namespace detail {

inline constexpr std::string_view metadata_key = "__metadata__";

/// One tensor of the header; offsets count from the end of the header.
struct HeaderEntry {
  TensorView view;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// What the header says. The names of its tensors may still repeat and their bytes overlap.
struct Header {
  std::vector<HeaderEntry> entries;
  Metadata metadata;
};

/// Reads the header by events, so that nothing is built beyond what the format allows.
///
///     { "__metadata__": { string: string ... },
///       name: { "dtype": string, "shape": [n ...], "data_offsets": [begin, end] } ... }
///
/// A value in any other place is refused when it opens, whatever it holds: that bounds the nesting
/// at three. Names are compared for duplicates by the caller. Every handler either returns true or
/// throws vha::Error.
class HeaderHandler {
 public:
  explicit HeaderHandler(const std::filesystem::path& file) : file_(file) {}

  Header take() { return std::move(header_); }

  bool null() { refuse("null"); }
  bool boolean(bool value) { refuse(value ? "true" : "false"); }
  bool binary(nlohmann::json::binary_t&) { refuse("binary data"); }
  bool number_float(double, const std::string& text) { refuse("the number " + printable(text)); }
  // The parser reports as signed only what is written with a minus sign.
  bool number_integer(std::int64_t value) { refuse("the number " + std::to_string(value)); }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape && value <= max_extent) {
      entry_.view.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::offsets && offsets_seen_ < 2) {
      (offsets_seen_ == 0 ? entry_.begin : entry_.end) = value;
      ++offsets_seen_;
    } else {
      refuse(place_ == Place::offsets ? "more than two" : "the number " + std::to_string(value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata[field_] = std::move(value);
    } else if (place_ == Place::tensor && field_ == "dtype") {
      const std::optional<Dtype> dtype = parse_dtype(value);
      if (!dtype) raise(where(), "a known element type", "\"" + printable(value) + "\"");
      entry_.view.dtype = *dtype;
    } else {
      refuse("the string \"" + printable(value) + "\"");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::start) {
      place_ = Place::top;
    } else if (place_ == Place::top && name_ == metadata_key) {
      place_ = Place::metadata;
    } else if (place_ == Place::top) {
      place_ = Place::tensor;
      entry_ = HeaderEntry{};
      entry_.view.name = *name_;
      dtype_seen_ = shape_seen_ = false;
      offsets_seen_ = 0;
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    if (place_ == Place::top) {
      name_ = std::move(value);
      field_.clear();
      if (name_ == metadata_key && std::exchange(metadata_seen_, true)) refuse_duplicate();
    } else {
      field_ = std::move(value);
      if (place_ == Place::metadata) {
        if (header_.metadata.contains(field_)) refuse_duplicate();
      } else if (field_ == "dtype") {
        if (std::exchange(dtype_seen_, true)) refuse_duplicate();
      } else if (field_ == "shape") {
        if (std::exchange(shape_seen_, true)) refuse_duplicate();
      } else if (field_ == "data_offsets") {
        if (offsets_seen_ != 0) refuse_duplicate();
      } else {
        raise(where(), "no key but dtype, shape and data_offsets", "this key");
      }
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::tensor) finish_tensor();
    place_ = place_ == Place::top ? Place::start : Place::top;
    name_.reset();
    field_.clear();
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ == Place::tensor && field_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::tensor && field_ == "data_offsets") {
      place_ = Place::offsets;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::offsets) {
      if (offsets_seen_ != 2) refuse(std::to_string(offsets_seen_) + " of them");
      if (entry_.begin > entry_.end) {
        raise(where(), "a begin that is not past the end",
              "[" + std::to_string(entry_.begin) + ", " + std::to_string(entry_.end) + "]");
      }
    }
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) {
    // The parser quotes the whole token that it stumbled over, which may be most of the header.
    std::string_view text = error.what();
    text = text.substr(0, text.find("; last read"));
    raise(where(), "valid JSON", printable(text));
  }

 private:
  enum class Place { start, top, metadata, tensor, shape, offsets };

  static constexpr auto max_extent =
      static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

  std::string where() const {
    if (!name_) return file_.string() + ": header";
    const std::string base =
        name_ == metadata_key ? file_.string() + ": " + *name_ : tensor_label(file_, *name_);
    return field_.empty() ? base : base + ": \"" + printable(field_) + "\"";
  }

  [[noreturn]] void refuse(const std::string& actual) const {
    std::string expected;
    if (place_ == Place::metadata || (place_ == Place::tensor && field_ == "dtype")) {
      expected = "a string";
    } else if (place_ == Place::top || place_ == Place::start) {
      expected = "an object";
    } else if (field_ == "shape") {
      expected = "an array of non-negative 63-bit integers";
    } else {
      expected = "an array of two non-negative 64-bit integers";
    }
    raise(where(), expected, actual);
  }

  [[noreturn]] void refuse_duplicate() const { raise(where(), "one key of that name", "two"); }

  void finish_tensor() {
    field_.clear();
    const char* const missing = !dtype_seen_         ? "no dtype"
                                : !shape_seen_       ? "no shape"
                                : offsets_seen_ != 2 ? "no data_offsets"
                                                     : nullptr;
    if (missing != nullptr) raise(where(), "dtype, shape and data_offsets", missing);
    const auto needed = tensor_bytes(entry_.view.dtype, entry_.view.shape);
    const std::string type = type_text(entry_.view.dtype, entry_.view.shape);
    if (!needed) raise(where(), "a size that fits 63 bits", type);
    if (*needed != entry_.end - entry_.begin) {
      raise(where(), std::to_string(*needed) + " bytes for " + type,
            std::to_string(entry_.end - entry_.begin) + " bytes by data_offsets");
    }
    header_.entries.push_back(std::move(entry_));
  }

  const std::filesystem::path& file_;
  Header header_;
  bool metadata_seen_ = false;

  Place place_ = Place::start;
  std::optional<std::string> name_;  // the key in the outermost object, while inside its value
  std::string field_;                // the key in the object within
  HeaderEntry entry_;
  bool dtype_seen_ = false;
  bool shape_seen_ = false;
  int offsets_seen_ = 0;
};

/// Reads `text`, the header of `file` from its first byte to its last.
/// @throws vha::Error naming the file, and the tensor where there is one.
inline Header parse_header(const std::filesystem::path& file, std::string_view text) {
  const std::string label = file.string() + ": header";
  if (!text.starts_with('{')) raise(label, "a JSON object that starts with '{'", "none");
  // The parser takes a NUL for the end of its input and would not look at what comes after.
  if (text.find('\0') != std::string_view::npos) raise(label, "valid JSON", "a NUL byte");
  // It also keeps a copy of the padding, so do not show it any.
  text = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
  HeaderHandler handler(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
  return handler.take();
}

}  // namespace detail

}  // namespace vha::checkpoint
