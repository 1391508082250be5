// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include <vha/checkpoint/dtype.hpp>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/safetensors_header.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint {

namespace detail {

/// A new file beside `target` that takes its name on commit and is removed otherwise.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target)
      : target_(target),
        folder_(target.has_parent_path() ? target.parent_path() : std::filesystem::path(".")),
        path_(folder_ / fresh_name()),
        file_(create()) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!committed_) ::unlink(path_.c_str());
  }

  void write(const void* data, std::size_t size) {
    constexpr std::size_t most_at_once = std::size_t{1} << 30U;  // Linux writes no more than 2 GiB
    auto from = static_cast<const std::byte*>(data);
    while (size > 0) {
      const ::ssize_t written = ::write(file_.get(), from, std::min(size, most_at_once));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("a successful write", errno);
      from += written;
      size -= static_cast<std::size_t>(written);
    }
  }

  /// Makes the bytes durable before the name points at them: after a power cut there is the old
  /// file or the new one, never a part.
  void commit() {
    if (::fsync(file_.get()) != 0) fail("a successful fsync", errno);
    if (std::rename(path_.c_str(), target_.c_str()) != 0) fail("a successful rename", errno);
    committed_ = true;
    // The file is whole under either name, so a folder that cannot be synced is no failure.
    const FileDescriptor folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.get() >= 0) ::fsync(folder.get());
  }

 private:
  /// Short, because a name derived from the target's might be longer than a file name may be.
  static std::string fresh_name() {
    static std::atomic<unsigned> counter{0};
    return ".vha-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp";
  }

  int create() {
    for (;;) {
      // Not mkstemp: its mode 0600 would outlive the rename, where a user expects the umask's.
      const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd >= 0) return fd;
      if (errno != EEXIST) fail("a folder to write in", errno);
      path_ = folder_ / fresh_name();  // left by a process that was killed and had our id
    }
  }

  [[noreturn]] void fail(const std::string& expected, int code) const {
    raise(target_.string(), expected, errno_text(code));
  }

  const std::filesystem::path& target_;
  std::filesystem::path folder_;
  std::filesystem::path path_;
  FileDescriptor file_;
  bool committed_ = false;
};

/// `text` as a JSON string.
inline std::string json_string(const std::string& label, std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    raise(label, "valid UTF-8", "\"" + printable(text) + "\"");
  }
}

/// The header of `tensors`, whose data follow in the given order, padded to a multiple of 8 bytes.
inline std::string make_header(const std::filesystem::path& file,
                               const std::vector<const TensorView*>& tensors,
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
  std::set<std::string_view> names{metadata_key};
  std::uint64_t offset = 0;
  for (const TensorView* const tensor : tensors) {
    const std::string label = tensor_label(file, tensor->name);
    if (!names.insert(tensor->name).second) {
      raise(label, "a name of its own", tensor->name == metadata_key ? "a reserved one" : "two");
    }
    const auto needed = tensor_bytes(tensor->dtype, tensor->shape);
    const std::string type = type_text(tensor->dtype, tensor->shape);
    if (!needed) raise(label, "non-negative extents and a size that fits 63 bits", type);
    if (*needed != tensor->bytes) {
      raise(label, std::to_string(*needed) + " bytes for " + type, std::to_string(tensor->bytes));
    }
    if (tensor->bytes > 0 && tensor->data == nullptr) raise(label, "data", "a null pointer");
    header += json_string(label, tensor->name) + R"(:{"dtype":")" +
              std::string(dtype_name(tensor->dtype)) + R"(","shape":)" +
              nlohmann::json(tensor->shape).dump() + R"(,"data_offsets":[)" +
              std::to_string(offset) + "," + std::to_string(offset + tensor->bytes) + "]},";
    offset += tensor->bytes;
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
  std::vector<const TensorView*> order;
  for (const TensorView& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [](const TensorView* tensor) { return dtype_size(tensor->dtype); });

  const std::string header = detail::make_header(path, order, metadata);
  const std::uint64_t length = header.size();
  detail::TemporaryFile file(path);
  file.write(&length, sizeof(length));
  file.write(header.data(), header.size());
  for (const TensorView* const tensor : order) file.write(tensor->data, tensor->bytes);
  file.commit();
}

}  // namespace vha::checkpoint
