// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
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

/// The safetensors files of a folder: "model.safetensors", or if the data are more than `max_shard_bytes`
/// the shards "model-00001-of-0000N.safetensors" of at most so many each, and their index. A larger tensor
/// has a shard of its own. Shards are filled in the order given; within each, tensors are laid out by
/// falling element size as write_safetensors does it.
///
/// They are made in three steps, of which several processes that see the same folder can share the second:
/// one has `create` done before, each chooses other tensors, and each calls `sync` when it is done.
class TensorFiles {
 public:
  /// Messages name files by their place in `target`. The tensors must live as long.
  /// @throws vha::Error as write_safetensors does.
  TensorFiles(const std::filesystem::path& target, std::span<const StreamedTensor> tensors,
              const Metadata& metadata, std::uint64_t max_shard_bytes)
      : target_(target) {
    detail::check_tensors(target, tensors);
    const auto shards = split(tensors, max_shard_bytes);
    const bool is_whole = shards.size() == 1;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const std::string name = is_whole ? "model.safetensors" : shard_name(i + 1, shards.size());
      files_.push_back({name, detail::FileLayout::of(label(name), shards[i], metadata)});
    }
    if (!is_whole) make_index(shards);
  }

  /// Makes the files in `folder`, which has none of these names, with all but the tensors' bytes.
  void create(const std::filesystem::path& folder) const {
    for (const auto& [name, layout] : files_) {
      layout.write_header(open(folder, name, O_CREAT | O_EXCL));
    }
    if (index_.empty()) return;
    const std::string name(shard_index_name);
    open(folder, name, O_CREAT | O_EXCL).write(0, index_.data(), index_.size());
  }

  /// Writes the tensors that `is_chosen(tensor)` is true of. Each is asked for its bytes once, in the order
  /// of the files, as many at a time as the executor has threads.
  template <class Choice>
  void write(const std::filesystem::path& folder, const Executor& executor,
             const Choice& is_chosen) const {
    for (const auto& [name, layout] : files_) {
      layout.write_tensors(open(folder, name, 0), executor, is_chosen);
    }
  }

  /// Waits until what this process wrote is on disk: where several machines share a file system, each
  /// knows its own bytes alone.
  void sync(const std::filesystem::path& folder) const {
    for (const auto& file : files_) open(folder, file.name, 0).sync();
    if (!index_.empty()) open(folder, std::string(shard_index_name), 0).sync();
  }

 private:
  using Shards = std::vector<std::span<const StreamedTensor>>;
  struct File {
    std::string name;
    detail::FileLayout layout;
  };

  std::string label(const std::string& name) const { return (target_ / name).string(); }

  detail::WritableFile open(const std::filesystem::path& folder, const std::string& name,
                            int flags) const {
    const int file = ::open((folder / name).c_str(), O_WRONLY | O_CLOEXEC | flags, 0666);
    if (file < 0) raise(label(name), "a file to write to", detail::errno_text(errno));
    return {file, label(name)};
  }

  static std::string shard_name(std::size_t number, std::size_t count) {
    std::array<char, 80> name = {};
    std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", number, count);
    return name.data();
  }

  /// At least one shard, which then may be empty.
  static Shards split(std::span<const StreamedTensor> tensors, std::uint64_t max_shard_bytes) {
    Shards shards;
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

  void make_index(const Shards& shards) {
    nlohmann::json index;  // with its keys in order, as others write it
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      for (const StreamedTensor& tensor : shards[i]) {
        index["weight_map"][tensor.name] = files_[i].name;
        total += detail::bytes_of(tensor);
      }
    }
    index["metadata"]["total_size"] = total;
    index_ = index.dump(2) + "\n";
  }

  std::filesystem::path target_;
  std::vector<File> files_;
  std::string index_;
};

}  // namespace vha::checkpoint
