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
#include <string>
#include <utility>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint::detail {

/// A name for what is not yet complete: short, because one derived from the target's might be longer
/// than a file name may be.
inline std::string temporary_name() {
  static std::atomic<unsigned> counter{0};
  return ".vha-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp";
}

inline std::filesystem::path folder_of(const std::filesystem::path& target) {
  return target.has_parent_path() ? target.parent_path() : std::filesystem::path(".");
}

/// Makes the names in a folder durable. What they name is whole with or without that, so a folder
/// that cannot be synced is no failure.
inline void sync_folder(const std::filesystem::path& path) {
  const FileDescriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0) ::fsync(folder.get());
}

/// A file that is written to from any place on.
class WritableFile {
 public:
  /// An open file, which messages call `label`.
  WritableFile(int descriptor, std::string label) : file_(descriptor), label_(std::move(label)) {}

  /// Writes to the place `at`. May be called from several threads, each for places of its own.
  void write(std::uint64_t at, const void* data, std::size_t size) const {
    constexpr std::size_t most_at_once = std::size_t{1} << 30U;  // Linux writes no more than 2 GiB
    const auto begin = static_cast<::off_t>(at);
    auto from = static_cast<const std::byte*>(data);
    for (std::size_t left = size; left > 0;) {
      const ::off_t place = begin + static_cast<::off_t>(size - left);
      const ::ssize_t written = ::pwrite(file_.get(), from, std::min(left, most_at_once), place);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("a successful write", errno);
      from += written;
      left -= static_cast<std::size_t>(written);
    }
    // What goes to the disk from now on need not be waited for in commit. Only a saving: an error
    // is seen there too.
    constexpr std::size_t worth_starting = std::size_t{1} << 18U;
    if (size < worth_starting) return;
    ::sync_file_range(file_.get(), begin, static_cast<::off_t>(size), SYNC_FILE_RANGE_WRITE);
  }

  void sync() const {
    if (::fsync(file_.get()) != 0) fail("a successful fsync", errno);
  }

  const std::string& label() const { return label_; }

 private:
  [[noreturn]] void fail(const std::string& expected, int code) const {
    raise(label_, expected, errno_text(code));
  }

  FileDescriptor file_;
  std::string label_;
};

/// A new file beside `target` that takes its name on commit and is removed otherwise.
class TemporaryFile {
 public:
  /// @throws vha::Error naming the file as `label`.
  TemporaryFile(std::filesystem::path target, const std::string& label)
      : target_(std::move(target)),
        path_(folder_of(target_) / temporary_name()),
        file_(create(label), label) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!committed_) ::unlink(path_.c_str());
  }

  /// Where its bytes go.
  const WritableFile& file() const { return file_; }
  void write(std::uint64_t at, const void* data, std::size_t size) { file_.write(at, data, size); }

  /// Makes the bytes durable before the name points at them: after a power cut there is the old
  /// file or the new one, never a part.
  void commit() {
    file_.sync();
    if (std::rename(path_.c_str(), target_.c_str()) != 0) {
      raise(file_.label(), "a successful rename", errno_text(errno));
    }
    committed_ = true;
    sync_folder(folder_of(target_));
  }

 private:
  int create(const std::string& label) {
    // A device of that name would be replaced too, by a file.
    std::error_code none;
    const auto status = std::filesystem::symlink_status(target_, none);
    if (exists(status) && !is_regular_file(status) && !is_symlink(status)) {
      raise(label, "a regular file to replace", "another kind of file");
    }
    for (;;) {
      // Not mkstemp: its mode 0600 would outlive the rename, where a user expects the umask's.
      const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd >= 0) return fd;
      if (errno != EEXIST) raise(label, "a folder to write in", errno_text(errno));
      // Left by a process that was killed and had our id.
      path_.replace_filename(temporary_name());
    }
  }

  std::filesystem::path target_;
  std::filesystem::path path_;
  WritableFile file_;
  bool committed_ = false;
};

}  // namespace vha::checkpoint::detail
