// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vha/checkpoint/message_text.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint::detail {

/// Owns a file descriptor.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

/// A regular file, or a link to one, open for reading.
class RegularFile {
 public:
  /// @throws vha::Error naming the file, if it is none or cannot be read.
  explicit RegularFile(const std::filesystem::path& path)
      // O_NONBLOCK has no effect on a regular file and keeps a FIFO from blocking here for ever.
      : file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (file_.get() < 0) raise(path.string(), "a readable file", errno_text(errno));
    struct stat status = {};
    if (::fstat(file_.get(), &status) != 0) {
      raise(path.string(), "a file status", errno_text(errno));
    }
    if (!S_ISREG(status.st_mode)) raise(path.string(), "a regular file", "another kind of file");
    size_ = static_cast<std::size_t>(status.st_size);
  }
  std::size_t size() const { return size_; }

  /// Reads up to `size` bytes from byte `at` on; fewer, down to none, where the file ends.
  /// @throws vha::Error naming the file as `label`, where it cannot be read.
  std::size_t read(const std::string& label, std::size_t at, std::byte* data,
                   std::size_t size) const {
    for (;;) {
      const ::ssize_t given = ::pread(file_.get(), data, size, static_cast<::off_t>(at));
      if (given >= 0) return static_cast<std::size_t>(given);
      if (errno != EINTR) raise(label, "a successful read", errno_text(errno));
    }
  }

  /// All of it, as memory. Precondition: it is not empty.
  /// @throws vha::Error naming the file as `label`, where it cannot be mapped.
  const std::byte* map(const std::string& label) const {
    void* const address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file_.get(), 0);
    if (address == MAP_FAILED) raise(label, "a file to map", errno_text(errno));
    return static_cast<const std::byte*>(address);
  }

 private:
  FileDescriptor file_;
  std::size_t size_ = 0;
};

/// A regular file, mapped for reading; a move leaves the bytes where they are.
class MappedFile {
 public:
  /// @throws vha::Error naming the file, if it cannot be mapped or has less than `least` bytes.
  /// Precondition: `least` > 0.
  MappedFile(const std::filesystem::path& path, std::size_t least)
      : file_(path), bytes_(map(path, least)) {}

  const std::byte* data() const { return bytes_.get(); }
  std::size_t size() const { return file_.size(); }

  /// The same file, to be read piece by piece.
  const RegularFile& file() const { return file_; }

 private:
  struct Unmap {
    std::size_t size = 0;
    void operator()(const std::byte* address) const noexcept {
      ::munmap(const_cast<std::byte*>(address), size);
    }
  };
  using Mapping = std::unique_ptr<const std::byte, Unmap>;

  Mapping map(const std::filesystem::path& path, std::size_t least) const {
    if (size() < least) {
      raise(path.string(), "at least " + std::to_string(least) + " bytes", std::to_string(size()));
    }
    return Mapping(file_.map(path.string()), Unmap{size()});
  }

  RegularFile file_;
  Mapping bytes_;
};

/// Lets the system take back the memory of the whole pages in a part of a mapped file; they are read
/// from it again when they are touched. Precondition: the part is of a MappedFile, since elsewhere
/// the bytes would be lost.
inline void forget_pages(const std::byte* data, std::size_t size) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t skipped = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
  if (size < skipped + page) return;
  // Only a saving: where it fails, nothing is lost.
  ::madvise(const_cast<std::byte*>(data) + skipped, (size - skipped) / page * page, MADV_DONTNEED);
}

/// Whether `name` is that of an entry of a folder, and no path that leads out of it.
inline bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

}  // namespace vha::checkpoint::detail
