// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/safetensors_writer.hpp>
#include <vha/checkpoint/temporary_file.hpp>
#include <vha/checkpoint/tensor_files.hpp>
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

  /// Writes TensorFiles. Each tensor is asked for its bytes once, in the order of the files, as many at a
  /// time as the executor has threads.
  void write_tensors(std::span<const StreamedTensor> tensors, const Metadata& metadata,
                     std::uint64_t max_shard_bytes, const Executor& executor = {}) {
    const TensorFiles files(target_, tensors, metadata, max_shard_bytes);
    files.create(path_);
    files.write(path_, executor, [](const StreamedTensor&) { return true; });
    files.sync(path_);
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

  [[noreturn]] void fail(const std::string& expected, int code) const {
    raise(target_.string(), expected, detail::errno_text(code));
  }

  std::filesystem::path target_;
  bool overwrite_;
  std::filesystem::path path_;
  bool committed_ = false;
};

}  // namespace vha::checkpoint
