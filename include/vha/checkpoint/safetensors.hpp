// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "vha/core/error.hpp"

namespace vha::checkpoint {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and is used in place: a big-endian host would "
              "read every number wrong");
static_assert(sizeof(std::size_t) >= 8, "checkpoints are larger than a 32-bit address space");

/// Element types of the format. Those of less than one byte (F4, F6) are unknown here.
enum class Dtype {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
};

/// `__metadata__`: a flat map of strings.
using Metadata = std::map<std::string, std::string>;

/// A named tensor in row-major order over bytes that somebody else owns.
///
/// `data` need not be aligned for the element type: a header may have any length, so copy elements
/// out with std::memcpy and never cast the pointer.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;  ///< empty for a scalar
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// The format's limit on the length of the JSON header.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

namespace safetensors_detail {

struct DtypeInfo {
  std::string_view name;
  std::size_t size;
};

/// In the order of Dtype.
inline constexpr std::array<DtypeInfo, 16> kDtypes{{{"BOOL", 1},
                                                    {"U8", 1},
                                                    {"I8", 1},
                                                    {"F8_E4M3", 1},
                                                    {"F8_E5M2", 1},
                                                    {"F8_E8M0", 1},
                                                    {"I16", 2},
                                                    {"U16", 2},
                                                    {"F16", 2},
                                                    {"BF16", 2},
                                                    {"I32", 4},
                                                    {"U32", 4},
                                                    {"F32", 4},
                                                    {"I64", 8},
                                                    {"U64", 8},
                                                    {"F64", 8}}};
static_assert(kDtypes.size() == static_cast<std::size_t>(Dtype::kF64) + 1);

}  // namespace safetensors_detail

/// The format's name of `dtype`, such as "BF16".
constexpr std::string_view dtype_name(Dtype dtype) {
  return safetensors_detail::kDtypes[static_cast<std::size_t>(dtype)].name;
}

/// Bytes per element.
constexpr std::size_t dtype_size(Dtype dtype) {
  return safetensors_detail::kDtypes[static_cast<std::size_t>(dtype)].size;
}

/// The type of that name, or nothing if the name is not exactly one of the format's.
constexpr std::optional<Dtype> parse_dtype(std::string_view name) {
  for (std::size_t i = 0; i < safetensors_detail::kDtypes.size(); ++i) {
    if (safetensors_detail::kDtypes[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

namespace safetensors_detail {

inline constexpr std::string_view kMetadataKey = "__metadata__";

/// `text` fit for an error message. A hostile name may be 100 MB long, hold a NUL that would cut
/// the message short, or steer a terminal.
inline std::string printable(std::string_view text) {
  constexpr std::size_t kLimit = 200;
  std::size_t length = std::min(text.size(), kLimit);
  if (length < text.size()) {
    // Do not cut a UTF-8 sequence in two: step back to the start of the one that would be split.
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U) --length;
  }
  std::string out;
  for (const char c : text.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      constexpr std::string_view kHex = "0123456789abcdef";
      out += "\\x";
      out += kHex[byte >> 4U];
      out += kHex[byte & 0xFU];
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

/// Bytes of a tensor, or nothing if a dimension is negative or the size does not fit 63 bits.
///
/// Zero dimensions are left out of the product until the end, so that [2^40, 2^40, 0] is refused in
/// whatever order it is written: later stride arithmetic would overflow on it.
inline std::optional<std::uint64_t> tensor_bytes(Dtype dtype,
                                                 const std::vector<std::int64_t>& shape) {
  constexpr auto kLimit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t product = dtype_size(dtype);
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (product > kLimit / static_cast<std::uint64_t>(extent)) return std::nullopt;
    product *= static_cast<std::uint64_t>(extent);
  }
  return empty ? 0 : product;
}

/// "F32 [2, 3]".
inline std::string type_text(Dtype dtype, const std::vector<std::int64_t>& shape) {
  constexpr std::size_t kMostShown = 16;
  std::string out = std::string(dtype_name(dtype)) + " [";
  for (std::size_t i = 0; i < std::min(shape.size(), kMostShown); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return out + (shape.size() > kMostShown ? ", ...]" : "]");
}

/// Owns a file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct Unmap {
  std::size_t size = 0;
  void operator()(const std::byte* address) const noexcept {
    ::munmap(const_cast<std::byte*>(address), size);
  }
};
using Mapping = std::unique_ptr<const std::byte, Unmap>;

/// Maps a regular file of at least `least` bytes, `least` > 0, for reading.
inline Mapping map_file(const std::filesystem::path& path, std::size_t least) {
  // O_NONBLOCK has no effect on a regular file and keeps a FIFO from blocking here for ever.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) raise(path.string(), "a readable file", errno_text(errno));
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) raise(path.string(), "a file status", errno_text(errno));
  if (!S_ISREG(status.st_mode)) raise(path.string(), "a regular file", "another kind of file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size < least) {
    raise(path.string(), "at least " + std::to_string(least) + " bytes", std::to_string(size));
  }
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) raise(path.string(), "a file to map", errno_text(errno));
  return Mapping(static_cast<const std::byte*>(address), Unmap{size});
}

/// One tensor of the header; offsets count from the end of the header.
struct HeaderEntry {
  TensorView view;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
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

  std::vector<HeaderEntry> take_entries() { return std::move(entries_); }
  Metadata take_metadata() { return std::move(metadata_); }

  bool null() { refuse("null"); }
  bool boolean(bool value) { refuse(value ? "true" : "false"); }
  bool binary(nlohmann::json::binary_t&) { refuse("binary data"); }
  bool number_float(double, const std::string& text) { refuse("the number " + printable(text)); }
  // The parser reports as signed only what is written with a minus sign.
  bool number_integer(std::int64_t value) { refuse("the number " + std::to_string(value)); }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::kShape && value <= kMaxExtent) {
      entry_.view.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::kOffsets && offsets_seen_ < 2) {
      (offsets_seen_ == 0 ? entry_.begin : entry_.end) = value;
      ++offsets_seen_;
    } else {
      refuse(place_ == Place::kOffsets ? "more than two" : "the number " + std::to_string(value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      metadata_[field_] = std::move(value);
    } else if (place_ == Place::kTensor && field_ == "dtype") {
      const std::optional<Dtype> dtype = parse_dtype(value);
      if (!dtype) raise(where(), "a known element type", "\"" + printable(value) + "\"");
      entry_.view.dtype = *dtype;
    } else {
      refuse("the string \"" + printable(value) + "\"");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop && name_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTop) {
      place_ = Place::kTensor;
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
    if (place_ == Place::kTop) {
      name_ = std::move(value);
      field_.clear();
      if (name_ == kMetadataKey && std::exchange(metadata_seen_, true)) refuse_duplicate();
    } else {
      field_ = std::move(value);
      if (place_ == Place::kMetadata) {
        if (metadata_.contains(field_)) refuse_duplicate();
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
    if (place_ == Place::kTensor) finish_tensor();
    place_ = place_ == Place::kTop ? Place::kStart : Place::kTop;
    name_.reset();
    field_.clear();
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ == Place::kTensor && field_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && field_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::kOffsets) {
      if (offsets_seen_ != 2) refuse(std::to_string(offsets_seen_) + " of them");
      if (entry_.begin > entry_.end) {
        raise(where(), "a begin that is not past the end",
              "[" + std::to_string(entry_.begin) + ", " + std::to_string(entry_.end) + "]");
      }
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) {
    // The parser quotes the whole token that it stumbled over, which may be most of the header.
    std::string_view text = error.what();
    text = text.substr(0, text.find("; last read"));
    raise(where(), "valid JSON", printable(text));
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets };

  static constexpr auto kMaxExtent =
      static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

  std::string where() const {
    if (!name_) return file_.string() + ": header";
    const std::string base =
        name_ == kMetadataKey ? file_.string() + ": " + *name_ : tensor_label(file_, *name_);
    return field_.empty() ? base : base + ": \"" + printable(field_) + "\"";
  }

  [[noreturn]] void refuse(const std::string& actual) const {
    std::string expected;
    if (place_ == Place::kMetadata || (place_ == Place::kTensor && field_ == "dtype")) {
      expected = "a string";
    } else if (place_ == Place::kTop || place_ == Place::kStart) {
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
    entries_.push_back(std::move(entry_));
  }

  const std::filesystem::path& file_;
  std::vector<HeaderEntry> entries_;
  Metadata metadata_;
  bool metadata_seen_ = false;

  Place place_ = Place::kStart;
  std::optional<std::string> name_;  // the key in the outermost object, while inside its value
  std::string field_;                // the key in the object within
  HeaderEntry entry_;
  bool dtype_seen_ = false;
  bool shape_seen_ = false;
  int offsets_seen_ = 0;
};

}  // namespace safetensors_detail

/// A safetensors file, mapped read-only. Opening it checks the whole header, so that every view it
/// gives lies within the file; data pages are read from disk when they are touched.
///
///     const SafetensorsFile file("model.safetensors");
///     const TensorView& wq = file.at("model.layers.0.self_attn.q_proj.weight");
///     std::vector<float> values(wq.bytes / sizeof(float));
///     std::memcpy(values.data(), wq.data, wq.bytes);  // after checking wq.dtype and wq.shape
///
/// Views and their bytes live as long as the object, also when it is moved from one place to
/// another. Precondition: nobody shortens the file meanwhile (the system would raise SIGBUS);
/// replacing it by rename, as write_safetensors does, is harmless.
class SafetensorsFile {
 public:
  /// @throws vha::Error naming the file, and the tensor where there is one, if the file cannot be
  /// read or departs from the format in anything: length of the header, JSON, UTF-8, duplicate or
  /// unknown keys, types of values, unknown dtype, size that differs from the offsets, tensors that
  /// do not tile the data exactly.
  explicit SafetensorsFile(std::filesystem::path path)
      : path_(std::move(path)),
        mapping_(safetensors_detail::map_file(path_, sizeof(std::uint64_t))) {
    const std::string_view header = header_text();
    const std::size_t data_offset = sizeof(std::uint64_t) + header.size();
    std::vector<safetensors_detail::HeaderEntry> entries = parse(header);
    refuse_twins(entries);
    place_in_order(entries, mapping_.get_deleter().size - data_offset);
    for (safetensors_detail::HeaderEntry& entry : entries) {
      entry.view.data = mapping_.get() + data_offset + entry.begin;
      entry.view.bytes = entry.end - entry.begin;
      by_name_.push_back(tensors_.size());
      tensors_.push_back(std::move(entry.view));
    }
    std::ranges::sort(by_name_, {}, [this](std::size_t i) { return name_of(i); });
  }

  const std::filesystem::path& path() const { return path_; }

  /// All tensors, in the order of their bytes in the file.
  const std::vector<TensorView>& tensors() const { return tensors_; }

  /// `__metadata__`; empty if the file has none.
  const Metadata& metadata() const { return metadata_; }

  /// The tensor of that name, or nullptr.
  const TensorView* find(std::string_view name) const {
    const auto it =
        std::ranges::lower_bound(by_name_, name, {}, [this](std::size_t i) { return name_of(i); });
    return it != by_name_.end() && name_of(*it) == name ? &tensors_[*it] : nullptr;
  }

  /// The tensor of that name.
  /// @throws vha::Error naming the file and the tensor if there is none.
  const TensorView& at(std::string_view name) const {
    const TensorView* const tensor = find(name);
    if (tensor == nullptr) {
      raise(safetensors_detail::tensor_label(path_, name), "a tensor of this name",
            "none among " + std::to_string(tensors_.size()));
    }
    return *tensor;
  }

 private:
  std::string_view header_text() const {
    const std::size_t rest = mapping_.get_deleter().size - sizeof(std::uint64_t);
    std::uint64_t length = 0;
    std::memcpy(&length, mapping_.get(), sizeof(length));
    const std::string label = path_.string() + ": header length";
    if (length > kMaxHeaderBytes) {
      raise(label, "at most " + std::to_string(kMaxHeaderBytes), std::to_string(length));
    }
    if (length > rest) {
      raise(label, "no more than the " + std::to_string(rest) + " bytes that follow in the file",
            std::to_string(length));
    }
    return {reinterpret_cast<const char*>(mapping_.get()) + sizeof(length),
            static_cast<std::size_t>(length)};
  }

  std::vector<safetensors_detail::HeaderEntry> parse(std::string_view header) {
    const std::string label = path_.string() + ": header";
    if (!header.starts_with('{')) raise(label, "a JSON object that starts with '{'", "none");
    // The parser takes a NUL for the end of its input and would not look at what comes after.
    if (header.find('\0') != std::string_view::npos) raise(label, "valid JSON", "a NUL byte");
    // It also keeps a copy of the padding, so do not show it any.
    header = header.substr(0, header.find_last_not_of(" \t\r\n") + 1);
    safetensors_detail::HeaderHandler handler(path_);
    nlohmann::json::sax_parse(header.begin(), header.end(), &handler);
    metadata_ = handler.take_metadata();
    return handler.take_entries();
  }

  std::string_view name_of(std::size_t i) const { return tensors_[i].name; }

  /// Sorts by name, rather than hashing: names chosen to collide cost nothing here.
  void refuse_twins(std::vector<safetensors_detail::HeaderEntry>& entries) const {
    const auto name = [](const auto& entry) { return std::string_view(entry.view.name); };
    std::ranges::stable_sort(entries, {}, name);
    const auto twin = std::ranges::adjacent_find(entries, {}, name);
    if (twin != entries.end()) {
      raise(safetensors_detail::tensor_label(path_, name(*twin)), "one key of that name", "two");
    }
  }

  /// Sorts by offset and checks that the tensors tile `available` bytes without hole or overlap.
  void place_in_order(std::vector<safetensors_detail::HeaderEntry>& entries,
                      std::uint64_t available) const {
    // An empty tensor goes before the one that begins where it stands. Stable, after a sort by
    // name: several empty ones at one place come in the order of their names.
    std::ranges::stable_sort(entries, [](const auto& a, const auto& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t cursor = 0;
    for (const safetensors_detail::HeaderEntry& entry : entries) {
      const std::string offsets =
          "data_offsets [" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + "]";
      if (entry.begin != cursor) {
        raise(safetensors_detail::tensor_label(path_, entry.view.name),
              "data from byte " + std::to_string(cursor) + " on, where the tensor before it ends",
              (entry.begin > cursor ? "a hole: " : "an overlap: ") + offsets);
      }
      if (entry.end > available) {
        raise(safetensors_detail::tensor_label(path_, entry.view.name),
              "data within the " + std::to_string(available) + " bytes after the header", offsets);
      }
      cursor = entry.end;
    }
    if (cursor != available) {
      const std::string label = path_.string() + ": data";
      raise(entries.empty() ? label
                            : label + " after tensor \"" +
                                  safetensors_detail::printable(entries.back().view.name) + "\"",
            std::to_string(cursor) + " bytes as in the header",
            std::to_string(available) + " bytes, some of them trailing");
    }
  }

  std::filesystem::path path_;
  safetensors_detail::Mapping mapping_;
  Metadata metadata_;
  std::vector<TensorView> tensors_;   // by offset
  std::vector<std::size_t> by_name_;  // positions in tensors_, by name
};

}  // namespace vha::checkpoint
