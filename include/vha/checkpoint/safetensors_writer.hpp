// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include <vha/checkpoint/dtype.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/safetensors_header.hpp>
#include <vha/checkpoint/temporary_file.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>
#include <vha/core/executor.hpp>

namespace vha::checkpoint {

/// Where a tensor's bytes go, one after the other, in as many calls as it takes.
using ByteSink = std::function<void(const std::byte* data, std::size_t size)>;

/// A tensor whose bytes need not be in memory before they are asked for.
struct StreamedTensor {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;             ///< empty for a scalar
  std::function<void(const ByteSink&)> write;  ///< gives all bytes, row-major, on one thread
};

namespace detail {

/// `text` as a JSON string.
inline std::string json_string(const std::string& label, std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    raise(label, "valid UTF-8", "\"" + printable(text) + "\"");
  }
}

/// @throws vha::Error naming the tensor, unless names are UTF-8, each is a tensor's own, and sizes
/// fit 63 bits.
inline void check_tensors(const std::filesystem::path& file,
                          std::span<const StreamedTensor> tensors) {
  std::set<std::string_view> names{metadata_key};
  for (const StreamedTensor& tensor : tensors) {
    const std::string label = tensor_label(file, tensor.name);
    json_string(label, tensor.name);
    if (!names.insert(tensor.name).second) {
      raise(label, "a name of its own", tensor.name == metadata_key ? "a reserved one" : "two");
    }
    if (!tensor_bytes(tensor.dtype, tensor.shape)) {
      raise(label, "non-negative extents and a size that fits 63 bits",
            type_text(tensor.dtype, tensor.shape));
    }
  }
}

/// Precondition: the tensor is one that check_tensors let pass.
inline std::uint64_t bytes_of(const StreamedTensor& tensor) {
  return *tensor_bytes(tensor.dtype, tensor.shape);
}

/// The header of `tensors`, whose data follow in the given order, padded to a multiple of 8 bytes.
inline std::string make_header(const std::filesystem::path& file,
                               const std::vector<const StreamedTensor*>& tensors,
                               const Metadata& metadata) {
  std::string header = "{";
  if (!metadata.empty()) {
    const std::string label = file.string() + ": " + std::string(metadata_key);
    header += json_string(label, metadata_key) + ":{";
    for (const auto& [key, value] : metadata) {
      header += json_string(label, key) + ":" + json_string(label, value) + ",";
    }
    header.back() = '}';
    header += ",";
  }
  std::uint64_t offset = 0;
  for (const StreamedTensor* const tensor : tensors) {
    const std::uint64_t end = offset + bytes_of(*tensor);
    header += json_string(tensor_label(file, tensor->name), tensor->name) + R"(:{"dtype":")" +
              std::string(dtype_name(tensor->dtype)) + R"(","shape":)" +
              nlohmann::json(tensor->shape).dump() + R"(,"data_offsets":[)" +
              std::to_string(offset) + "," + std::to_string(end) + "]},";
    offset = end;
  }
  if (header.size() > 1) header.pop_back();  // the last comma
  header += '}';
  header.append((8 - header.size() % 8) % 8, ' ');
  if (header.size() > max_header_bytes) {
    raise(file.string() + ": header length", "at most " + std::to_string(max_header_bytes),
          std::to_string(header.size()));
  }
  return header;
}

/// Asks `tensor` for its bytes and writes them from the place `at` on.
inline void write_tensor(const WritableFile& file, const StreamedTensor& tensor, std::uint64_t at) {
  const std::uint64_t needed = bytes_of(tensor);
  std::uint64_t given = 0;
  tensor.write([&](const std::byte* data, std::size_t size) {
    if (size <= needed - std::min(given, needed)) file.write(at + given, data, size);
    given += size;
  });
  if (given != needed) {
    raise(tensor_label(file.label(), tensor.name),
          std::to_string(needed) + " bytes for " + type_text(tensor.dtype, tensor.shape),
          std::to_string(given));
  }
}

/// A file of tensors: what stands where.
struct FileLayout {
  struct Placed {
    const StreamedTensor* tensor;
    std::uint64_t at;
  };
  std::string header;
  std::vector<Placed> tensors;

  /// As write_safetensors says. In messages the file is called `label`. The tensors must live as long.
  /// Precondition: the tensors passed check_tensors.
  static FileLayout of(const std::filesystem::path& label, std::span<const StreamedTensor> tensors,
                       const Metadata& metadata) {
    std::vector<const StreamedTensor*> order;
    for (const StreamedTensor& tensor : tensors) order.push_back(&tensor);
    std::ranges::stable_sort(order, std::ranges::greater{}, [](const StreamedTensor* tensor) {
      return dtype_size(tensor->dtype);
    });
    FileLayout layout{make_header(label, order, metadata), {}};
    std::uint64_t at = sizeof(std::uint64_t) + layout.header.size();
    for (const StreamedTensor* const tensor : order) {
      layout.tensors.push_back({tensor, at});
      at += bytes_of(*tensor);
    }
    return layout;
  }

  void write_header(const WritableFile& file) const {
    const std::uint64_t length = header.size();
    file.write(0, &length, sizeof(length));
    file.write(sizeof(length), header.data(), header.size());
  }
  /// Those that `is_chosen(tensor)` is true of, as many at a time as the executor has threads.
  template <class Choice>
  void write_tensors(const WritableFile& file, const Executor& executor,
                     const Choice& is_chosen) const {
    std::vector<Placed> chosen;
    std::ranges::copy_if(tensors, std::back_inserter(chosen),
                         [&](const Placed& placed) { return is_chosen(*placed.tensor); });
    executor.for_each(static_cast<Index>(chosen.size()), [&](Index task, Index) {
      const auto& [tensor, at] = chosen[static_cast<std::size_t>(task)];
      write_tensor(file, *tensor, at);
    });
  }
};

}  // namespace detail

/// Writes a safetensors file under `path`, all or nothing: the bytes go to a new file in the same
/// folder, which takes the name when it is complete and on disk. A file of that name is replaced (a
/// symbolic link too, not what it points at), and whoever has it mapped keeps the old bytes; the
/// tensors may therefore come from that very file.
///
/// Tensors are laid out by falling element size, otherwise in the order given, so that each is
/// aligned for its type. Precondition: `data` points at `bytes` bytes.
///
///     write_safetensors("copy.safetensors", file.tensors(), {{"format", "pt"}});
///
/// @throws vha::Error naming the file, and the tensor where there is one, if two tensors share a
/// name or one is called "__metadata__", if bytes differ from shape times element size, if a string
/// is not UTF-8, or if the file cannot be written. What was under `path` is then unchanged, and
/// nothing is left beside it.
inline void write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorView> tensors, const Metadata& metadata = {}) {
  if (!path.has_filename()) raise("path", "a file name", "\"" + path.string() + "\"");
  std::vector<StreamedTensor> streamed;
  for (const TensorView& tensor : tensors) {
    if (tensor.bytes > 0 && tensor.data == nullptr) {
      raise(detail::tensor_label(path, tensor.name), "data", "a null pointer");
    }
    const auto write = [&tensor](const ByteSink& sink) { sink(tensor.data, tensor.bytes); };
    streamed.push_back({tensor.name, tensor.dtype, tensor.shape, write});
  }
  detail::check_tensors(path, streamed);
  const auto layout = detail::FileLayout::of(path, streamed, metadata);
  detail::TemporaryFile file(path, path.string());
  layout.write_header(file.file());
  layout.write_tensors(file.file(), {}, [](const StreamedTensor&) { return true; });
  file.commit();
}

}  // namespace vha::checkpoint
