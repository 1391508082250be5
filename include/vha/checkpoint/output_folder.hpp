// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/safetensors_header.hpp>
#include <vha/checkpoint/safetensors_writer.hpp>
#include <vha/checkpoint/sharded_tensors.hpp>
#include <vha/checkpoint/temporary_file.hpp>
#include <vha/core/error.hpp>
#include <vha/core/executor.hpp>

namespace vha::checkpoint {

/// A new folder of files that takes its name when it is complete: after a kill, a full disk or an
/// exception there is nothing under that name, or what was there before.
///
///     OutputFolder out("folded", false);
///     out.copy_file("tokenizer.json", input / "tokenizer.json");
///     out.write_tensors(tensors, {{"format", "pt"}}, 5'000'000'000);
///     out.commit();
///
/// Until then it is a hidden folder beside the target, called ".vha-<process>-<number>.tmp". Only a
/// kill leaves that behind; it may be removed by hand. Every member throws vha::Error naming the
/// file by its place in the target, and may be followed by nothing but the destructor then.
class OutputFolder {
 public:
  /// @throws vha::Error where `target` exists and `overwrite` is false, or is no folder, or where its
  /// parent is no folder that can be written in.
  OutputFolder(std::filesystem::path target, bool overwrite)
      : target_(without_slash(std::move(target))), overwrite_(overwrite) {
    if (!detail::is_plain_name(target_.filename().string())) {
      raise("target", "the name of a folder", "\"" + target_.string() + "\"");
    }
    if (target_exists() && !overwrite_) raise(target_.string(), "no such file or folder", "one");
    std::error_code ignored;
    if (target_exists() && !is_directory(target_, ignored)) {
      raise(target_.string(), "a folder to replace", "another kind of file");
    }
    for (;;) {
      path_ = detail::folder_of(target_) / detail::temporary_name();
      if (::mkdir(path_.c_str(), 0777) == 0) break;
      if (errno != EEXIST) fail("a folder to make it in", errno);
    }
  }
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder() {
    if (!committed_) remove(path_);
  }

  /// The unfinished folder, to read back what was written. Not to be used after commit.
  const std::filesystem::path& path() const { return path_; }

  void write_file(const std::string& name, std::string_view bytes) {
    detail::TemporaryFile file(place(name), label(name));
    file.write(0, bytes.data(), bytes.size());
    file.commit();
  }

  /// Copies a regular file, or the one that a link leads to, byte for byte.
  void copy_file(const std::string& name, const std::filesystem::path& from) {
    const detail::RegularFile source(from);
    detail::TemporaryFile file(place(name), label(name));
    std::vector<std::byte> buffer(std::size_t{1} << 20U);
    for (std::size_t at = 0;;) {
      const std::size_t size = source.read(from.string(), at, buffer.data(), buffer.size());
      if (size == 0) break;
      file.write(at, buffer.data(), size);
      at += size;
    }
    file.commit();
  }

  /// Writes "model.safetensors", or if the data are more than `max_shard_bytes` the shards
  /// "model-00001-of-0000N.safetensors" of at most so many each, and their index. A larger tensor
  /// has a shard of its own.
  ///
  /// Shards are filled in the order given; within each, tensors are laid out by falling element size
  /// as write_safetensors does it. Each is asked for its bytes once, in the order of the files, as
  /// many at a time as the executor has threads.
  void write_tensors(std::span<const StreamedTensor> tensors, const Metadata& metadata,
                     std::uint64_t max_shard_bytes, const Executor& executor = {}) {
    detail::check_tensors(target_, tensors);
    const auto shards = split(tensors, max_shard_bytes);
    const auto write_shard = [&](const std::string& name, std::span<const StreamedTensor> shard) {
      detail::write_file_of(place(name), label(name), shard, metadata, executor);
    };
    if (shards.size() == 1) return write_shard("model.safetensors", shards.front());

    nlohmann::json index;  // with its keys in order, as others write it
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const std::string name = shard_name(i + 1, shards.size());
      write_shard(name, shards[i]);
      for (const StreamedTensor& tensor : shards[i]) {
        index["weight_map"][tensor.name] = name;
        total += detail::bytes_of(tensor);
      }
    }
    index["metadata"]["total_size"] = total;
    write_file(std::string(shard_index_name), index.dump(2) + "\n");
  }

  /// Makes the folder durable and gives it its name. One that it replaces is removed after that, with
  /// all in it; a link is replaced itself, not what it leads to.
  void commit() {
    detail::sync_folder(path_);
    if (overwrite_ && target_exists()) {
      // Both names change at once: at no time is there none under the target's.
      if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) != 0) {
        fail("an exchange with the folder to replace", errno);
      }
      committed_ = true;
      detail::sync_folder(detail::folder_of(target_));
      remove(path_);
    } else {
      // This may replace an empty folder that has come meanwhile, and nothing else.
      if (std::rename(path_.c_str(), target_.c_str()) != 0) fail("a successful rename", errno);
      committed_ = true;
      detail::sync_folder(detail::folder_of(target_));
    }
  }

 private:
  static std::filesystem::path without_slash(std::filesystem::path path) {
    return path.has_filename() ? path : path.parent_path();
  }

  bool target_exists() const {
    std::error_code ignored;
    return std::filesystem::exists(symlink_status(target_, ignored));
  }

  static void remove(const std::filesystem::path& folder) {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }

  std::filesystem::path place(const std::string& name) const {
    if (!detail::is_plain_name(name)) {
      raise(target_.string(), "the name of a file in it", "\"" + detail::printable(name) + "\"");
    }
    return path_ / name;
  }

  std::string label(const std::string& name) const { return (target_ / name).string(); }

  static std::string shard_name(std::size_t number, std::size_t count) {
    std::array<char, 80> name = {};
    std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", number, count);
    return name.data();
  }

  /// At least one shard, which then may be empty.
  static std::vector<std::span<const StreamedTensor>> split(std::span<const StreamedTensor> tensors,
                                                            std::uint64_t max_shard_bytes) {
    std::vector<std::span<const StreamedTensor>> shards;
    std::size_t begin = 0;
    std::uint64_t bytes = 0;  // of the tensors from `begin` on
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::uint64_t more = detail::bytes_of(tensors[i]);
      // Not the sum, which could overflow: a shard of one large tensor may be over the limit.
      if (i > begin && (bytes > max_shard_bytes || more > max_shard_bytes - bytes)) {
        shards.push_back(tensors.subspan(begin, i - begin));
        begin = i;
        bytes = 0;
      }
      bytes += more;
    }
    shards.push_back(tensors.subspan(begin));
    return shards;
  }

  [[noreturn]] void fail(const std::string& expected, int code) const {
    raise(target_.string(), expected, detail::errno_text(code));
  }

  std::filesystem::path target_;
  bool overwrite_;
  std::filesystem::path path_;
  bool committed_ = false;
};

}  // namespace vha::checkpoint
