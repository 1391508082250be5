// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/safetensors_header.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint {

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
      : path_(std::move(path)), mapping_(path_, sizeof(std::uint64_t)) {
    const std::string_view text = header_text();
    const std::size_t data_offset = sizeof(std::uint64_t) + text.size();
    detail::Header header = detail::parse_header(path_, text);
    metadata_ = std::move(header.metadata);
    refuse_twins(header.entries);
    place_in_order(header.entries, mapping_.size() - data_offset);
    for (detail::HeaderEntry& entry : header.entries) {
      entry.view.data = mapping_.data() + data_offset + entry.begin;
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
      raise(detail::tensor_label(path_, name), "a tensor of this name",
            "none among " + std::to_string(tensors_.size()));
    }
    return *tensor;
  }

  /// Gives bytes [first, first + size) of a tensor to `sink`, some at a time: read from the file, as
  /// is faster than through the mapping for what is wanted once, and leaves no memory in use.
  /// Precondition: a tensor of this file, and bytes of it.
  /// @throws vha::Error naming the file where it cannot be read.
  template <class Sink>
  void read(const TensorView& tensor, std::size_t first, std::size_t size, Sink&& sink) const {
    constexpr std::size_t most_at_once = std::size_t{1} << 20U;
    std::vector<std::byte> buffer(std::min(size, most_at_once));
    auto at = static_cast<std::size_t>(tensor.data - mapping_.data()) + first;
    for (std::size_t left = size; left > 0;) {
      // Whole pieces, since a sink may want whole elements.
      std::size_t filled = 0;
      const std::size_t piece = std::min(left, buffer.size());
      while (filled < piece) {
        const std::size_t given = mapping_.file().read(path_.string(), at + filled,
                                                       buffer.data() + filled, piece - filled);
        if (given == 0) {
          raise(path_.string(), text(mapping_.size(), " bytes, as when it was opened"), "fewer");
        }
        filled += given;
      }
      sink(std::as_const(buffer).data(), piece);
      at += piece;
      left -= piece;
    }
  }

 private:
  std::string_view header_text() const {
    const std::size_t rest = mapping_.size() - sizeof(std::uint64_t);
    std::uint64_t length = 0;
    std::memcpy(&length, mapping_.data(), sizeof(length));
    const std::string label = path_.string() + ": header length";
    if (length > max_header_bytes) {
      raise(label, "at most " + std::to_string(max_header_bytes), std::to_string(length));
    }
    if (length > rest) {
      raise(label, "no more than the " + std::to_string(rest) + " bytes that follow in the file",
            std::to_string(length));
    }
    return {reinterpret_cast<const char*>(mapping_.data()) + sizeof(length),
            static_cast<std::size_t>(length)};
  }

  std::string_view name_of(std::size_t i) const { return tensors_[i].name; }

  /// Sorts by name, rather than hashing: names chosen to collide cost nothing here.
  void refuse_twins(std::vector<detail::HeaderEntry>& entries) const {
    const auto name = [](const auto& entry) { return std::string_view(entry.view.name); };
    std::ranges::stable_sort(entries, {}, name);
    const auto twin = std::ranges::adjacent_find(entries, {}, name);
    if (twin != entries.end()) {
      raise(detail::tensor_label(path_, name(*twin)), "one key of that name", "two");
    }
  }

  /// Sorts by offset and checks that the tensors tile `available` bytes without hole or overlap.
  void place_in_order(std::vector<detail::HeaderEntry>& entries, std::uint64_t available) const {
    // An empty tensor goes before the one that begins where it stands. Stable, after a sort by
    // name: several empty ones at one place come in the order of their names.
    std::ranges::stable_sort(entries, [](const auto& a, const auto& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t cursor = 0;
    for (const detail::HeaderEntry& entry : entries) {
      const std::string offsets =
          "data_offsets [" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + "]";
      if (entry.begin != cursor) {
        raise(detail::tensor_label(path_, entry.view.name),
              "data from byte " + std::to_string(cursor) + " on, where the tensor before it ends",
              (entry.begin > cursor ? "a hole: " : "an overlap: ") + offsets);
      }
      if (entry.end > available) {
        raise(detail::tensor_label(path_, entry.view.name),
              "data within the " + std::to_string(available) + " bytes after the header", offsets);
      }
      cursor = entry.end;
    }
    if (cursor != available) {
      const std::string label = path_.string() + ": data";
      raise(entries.empty()
                ? label
                : label + " after tensor \"" + detail::printable(entries.back().view.name) + "\"",
            std::to_string(cursor) + " bytes as in the header",
            std::to_string(available) + " bytes, some of them trailing");
    }
  }

  std::filesystem::path path_;
  detail::MappedFile mapping_;
  Metadata metadata_;
  std::vector<TensorView> tensors_;   // by offset
  std::vector<std::size_t> by_name_;  // positions in tensors_, by name
};

}  // namespace vha::checkpoint
