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
#include <vha/checkpoint/message_text.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint::detail {

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
  int get() const { return file_.get(); }
  std::size_t size() const { return size_; }

 private:
  FileDescriptor file_;
  std::size_t size_ = 0;
};

/// A regular file, mapped for reading; a move leaves the bytes where they are.
class MappedFile {
 public:
  /// @throws vha::Error naming the file, if it cannot be mapped or has less than `least` bytes.
  /// Precondition: `least` > 0.
  MappedFile(const std::filesystem::path& path, std::size_t least) : bytes_(map(path, least)) {}

  const std::byte* data() const { return bytes_.get(); }
  std::size_t size() const { return bytes_.get_deleter().size; }

 private:
  struct Unmap {
    std::size_t size = 0;
    void operator()(const std::byte* address) const noexcept {
      ::munmap(const_cast<std::byte*>(address), size);
    }
  };
  using Mapping = std::unique_ptr<const std::byte, Unmap>;

  static Mapping map(const std::filesystem::path& path, std::size_t least) {
    const RegularFile file(path);
    const std::size_t size = file.size();
    if (size < least) {
      raise(path.string(), "at least " + std::to_string(least) + " bytes", std::to_string(size));
    }
    void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (address == MAP_FAILED) raise(path.string(), "a file to map", errno_text(errno));
    return Mapping(static_cast<const std::byte*>(address), Unmap{size});
  }

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
