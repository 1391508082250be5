// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>
#include <vha/checkpoint/json_file.hpp>
#include <vha/checkpoint/mapped_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/safetensors.hpp>
#include <vha/checkpoint/safetensors_header.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint {

/// The name of the file that says which shard holds which tensor.
inline constexpr std::string_view shard_index_name = "model.safetensors.index.json";

/// The safetensors files of one folder, as one set of tensors: those that its index names, or
/// without an index the only one there is.
///
///     const ShardedTensors tensors("Qwen3-4B");
///     const TensorView& wq = tensors.at("model.layers.0.self_attn.q_proj.weight");
///
/// The files are mapped, as those of SafetensorsFile are: views and their bytes live as long as the
/// object, also when it is moved.
class ShardedTensors {
 public:
  /// @throws vha::Error naming the file, and the tensor where there is one, if a file cannot be
  /// read, the index and the files do not say the same, or two shards differ in what both say.
  explicit ShardedTensors(std::filesystem::path folder) : folder_(std::move(folder)) {
    const std::set<std::string> files = files_in_folder();
    const std::filesystem::path index = folder_ / shard_index_name;
    // A link that leads nowhere is an index too: one that cannot be read.
    std::error_code ignored;
    const bool has_index = std::filesystem::exists(symlink_status(index, ignored));
    const ShardOf shard_of = has_index ? read_index(index) : ShardOf();
    if (has_index) {
      refuse_other_files(files, shard_of);
    } else {
      refuse_several(files);
    }
    for (const std::string& file : files) shards_.emplace_back(folder_ / file);
    for (const SafetensorsFile& shard : shards_) {
      add_tensors(shard);
      add_metadata(shard);
    }
    if (has_index) refuse_misplaced(index, shard_of);
  }

  ShardedTensors(ShardedTensors&&) = default;
  ShardedTensors& operator=(ShardedTensors&&) = default;

  const std::filesystem::path& folder() const { return folder_; }

  /// All tensors: shard by shard in the order of their names, in each in the order of their bytes.
  const std::vector<const TensorView*>& tensors() const { return tensors_; }

  /// The tensor of that name, or nullptr.
  const TensorView* find(std::string_view name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? nullptr : found->second.tensor;
  }

  /// The tensor of that name.
  /// @throws vha::Error naming the folder and the tensor if there is none.
  const TensorView& at(std::string_view name) const {
    const TensorView* const tensor = find(name);
    if (tensor == nullptr) {
      raise(detail::tensor_label(folder_, name), "a tensor of this name",
            "none among " + std::to_string(tensors_.size()));
    }
    return *tensor;
  }

  /// `__metadata__` of all shards together.
  const Metadata& metadata() const { return metadata_; }

  /// Lets the system take back the memory that the tensor's pages fill once they have been touched,
  /// so that a walk over all tensors needs little at a time. The bytes stay readable.
  /// @throws vha::Error where it is none of these tensors.
  void forget(const TensorView& tensor) const {
    const TensorView& own = at(tensor.name);
    detail::forget_pages(own.data, own.bytes);
  }

  /// As SafetensorsFile::read, of the tensor's own file. May be called from several threads.
  /// @throws vha::Error where it is none of these tensors, too.
  template <class Sink>
  void read(const TensorView& tensor, std::size_t first, std::size_t size, Sink&& sink) const {
    const TensorView& own = at(tensor.name);
    places_.find(own.name)->second.shard->read(own, first, size, sink);
  }

 private:
  struct Place {
    const TensorView* tensor;
    const SafetensorsFile* shard;
    std::string file() const { return shard->path().filename().string(); }
  };
  using ShardOf = std::map<std::string, std::string, std::less<>>;

  static constexpr std::string_view extension = ".safetensors";

  std::set<std::string> files_in_folder() const {
    std::set<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(folder_, error), end; !error && entry != end;
         entry.increment(error)) {
      std::string name = entry->path().filename().string();
      if (name.ends_with(extension)) names.insert(std::move(name));
    }
    if (error) raise(folder_.string(), "a readable folder", error.message());
    return names;
  }

  void refuse_several(const std::set<std::string>& files) const {
    const std::string expected = "one .safetensors file, or " + std::string(shard_index_name);
    if (files.empty()) raise(folder_.string(), expected, "neither");
    if (files.size() > 1) {
      raise(folder_.string(), expected,
            std::to_string(files.size()) + " files, among them \"" +
                detail::printable(*files.begin()) + "\" and \"" +
                detail::printable(*std::next(files.begin())) + "\", and no index");
    }
  }

  /// The shard of each tensor. What else an index says, sizes above all, is not relied on.
  static ShardOf read_index(const std::filesystem::path& path) {
    const Json index = read_json(path);
    const std::string label = path.string() + ": \"weight_map\"";
    if (!index.is_object()) raise(path.string(), "an object", index.type_name());
    const auto weight_map = index.find("weight_map");
    if (weight_map == index.end()) raise(label, "an object", "none");
    if (!weight_map->is_object()) raise(label, "an object", weight_map->type_name());
    ShardOf shard_of;
    for (const auto& [tensor, shard] : weight_map->items()) {
      const std::string where = detail::tensor_label(path, tensor);
      if (!shard.is_string()) raise(where, "the name of a file", shard.type_name());
      const auto& name = shard.get_ref<const std::string&>();
      if (!detail::is_plain_name(name) || !name.ends_with(extension)) {
        raise(where, "the name of a .safetensors file in the same folder",
              "\"" + detail::printable(name) + "\"");
      }
      shard_of.emplace(tensor, name);
    }
    return shard_of;
  }

  /// A shard that is absent, or one too many, as in a folder that was copied by half or saved to
  /// twice.
  void refuse_other_files(const std::set<std::string>& files, const ShardOf& shard_of) const {
    std::set<std::string_view> named;
    for (const auto& [tensor, shard] : shard_of) {
      named.insert(shard);
      if (!files.contains(shard)) {
        raise((folder_ / detail::printable(shard)).string(),
              "a shard, since the index names it for tensor \"" + detail::printable(tensor) + "\"",
              "no such file");
      }
    }
    for (const std::string& file : files) {
      if (!named.contains(file)) {
        raise((folder_ / detail::printable(file)).string(), "no shards but those of the index",
              "one that it does not name");
      }
    }
  }

  void add_tensors(const SafetensorsFile& shard) {
    for (const TensorView& tensor : shard.tensors()) {
      const auto [place, is_new] = places_.emplace(tensor.name, Place{&tensor, &shard});
      if (!is_new) {
        raise(detail::tensor_label(shard.path(), tensor.name), "a tensor in one shard alone",
              "one that is in \"" + detail::printable(place->second.file()) + "\" too");
      }
      tensors_.push_back(&tensor);
    }
  }

  void add_metadata(const SafetensorsFile& shard) {
    for (const auto& [key, value] : shard.metadata()) {
      const auto [entry, is_new] = metadata_.emplace(key, value);
      if (!is_new && entry->second != value) {
        raise(shard.path().string() + ": " + std::string(detail::metadata_key) + ": \"" +
                  detail::printable(key) + "\"",
              "\"" + detail::printable(entry->second) + "\" as in the shards before",
              "\"" + detail::printable(value) + "\"");
      }
    }
  }

  /// Whether each tensor is where the index says, and is in the index at all.
  void refuse_misplaced(const std::filesystem::path& index, const ShardOf& shard_of) const {
    for (const auto& [tensor, shard] : shard_of) {
      const auto place = places_.find(tensor);
      if (place == places_.end() || place->second.file() != shard) {
        raise(
            detail::tensor_label(index, tensor), "a tensor in \"" + detail::printable(shard) + "\"",
            place == places_.end() ? "none in any shard"
                                   : "one in \"" + detail::printable(place->second.file()) + "\"");
      }
    }
    for (const TensorView* const tensor : tensors_) {
      if (!shard_of.contains(tensor->name)) {
        const std::string shard = places_.find(tensor->name)->second.file();
        raise(detail::tensor_label(folder_ / shard, tensor->name), "a tensor that the index names",
              "one that it does not");
      }
    }
  }

  std::filesystem::path folder_;
  std::vector<SafetensorsFile> shards_;  // their tensors stay where they are when these move
  std::vector<const TensorView*> tensors_;
  std::map<std::string_view, Place> places_;
  Metadata metadata_;
};

}  // namespace vha::checkpoint
