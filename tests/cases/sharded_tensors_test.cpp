// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/checkpoint/safetensors_writer.hpp>
#include <vha/checkpoint/sharded_tensors.hpp>

#include "error_of.hpp"
#include "temporary_folder.hpp"
#include "tensor_bytes.hpp"

namespace {

using support::data_of;
using support::error_of;
using support::TemporaryFolder;
using vha::checkpoint::Dtype;
using vha::checkpoint::Metadata;
using vha::checkpoint::ShardedTensors;
using vha::checkpoint::TensorView;
using vha::checkpoint::write_safetensors;
namespace fs = std::filesystem;

static_assert(!std::is_copy_constructible_v<ShardedTensors>);
static_assert(std::is_move_constructible_v<ShardedTensors>);

const std::string index_name = "model.safetensors.index.json";

/// A folder of shards whose tensors are bytes, and an index.
class ShardFolder {
 public:
  const fs::path& path() const { return folder_.path(); }
  void add(const std::string& name, std::string_view bytes) const { folder_.add(name, bytes); }

  void add_shard(const std::string& name,
                 const std::vector<std::pair<std::string, std::string>>& tensors,
                 const Metadata& metadata = {}) const {
    std::vector<TensorView> views;
    for (const auto& [tensor, data] : tensors) {
      views.push_back({tensor,
                       Dtype::u8,
                       {static_cast<std::int64_t>(data.size())},
                       reinterpret_cast<const std::byte*>(data.data()),
                       data.size()});
    }
    write_safetensors(folder_ / name, views, metadata);
  }

  /// Two shards: "z" and "b" in "1.safetensors", "a" in "2.safetensors".
  void add_shards() const {
    add_shard("1.safetensors", {{"z", "zzz"}, {"b", "bb"}});
    add_shard("2.safetensors", {{"a", "aaaa"}});
  }

  void add_index(const std::string& weight_map) const {
    add(index_name, "{\"weight_map\":" + weight_map + "}");
  }

  ShardedTensors open() const { return ShardedTensors(path()); }

  /// The error, which starts with the place of `file` in the folder.
  std::string error(const std::string& file) const {
    const std::string message = error_of([&] { open(); });
    const fs::path place = file.empty() ? path() : folder_ / file;
    EXPECT_EQ(message.find(place.string()), 0U) << message;
    return message;
  }

 private:
  TemporaryFolder folder_;
};

const std::string right_map = R"({"a":"2.safetensors","b":"1.safetensors","z":"1.safetensors"})";

void expect_in(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no " << part << " in: " << message;
  }
  EXPECT_LT(message.size(), 2000U);
}

std::string names_of(const ShardedTensors& tensors) {
  std::string names;
  for (const TensorView* tensor : tensors.tensors()) names += tensor->name + " ";
  return names;
}

// ---------------------------------------------------------------------------------- what is taken

TEST(ShardedTensors, TakesTheOnlyFileWithoutAnIndex) {
  const ShardFolder folder;
  folder.add("config.json", "{}");
  folder.add_shard("any name.safetensors", {{"t", "1234"}}, {{"format", "pt"}});
  const ShardedTensors tensors = folder.open();
  EXPECT_EQ(tensors.folder(), folder.path());
  EXPECT_EQ(names_of(tensors), "t ");
  EXPECT_EQ(data_of(tensors.at("t")), "1234");
  EXPECT_EQ(tensors.metadata(), (Metadata{{"format", "pt"}}));
}

TEST(ShardedTensors, ListsShardByShardInTheOrderOfBytes) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(right_map);
  const ShardedTensors tensors = folder.open();
  EXPECT_EQ(names_of(tensors), "z b a ");
  EXPECT_EQ(data_of(tensors.at("z")), "zzz");
  EXPECT_EQ(data_of(tensors.at("b")), "bb");
  EXPECT_EQ(data_of(tensors.at("a")), "aaaa");
  EXPECT_EQ(tensors.find("a"), tensors.tensors()[2]);
}

TEST(ShardedTensors, FollowsAnIndexOfOneShard) {
  const ShardFolder folder;
  folder.add_shard("model.safetensors", {{"t", "1"}});
  folder.add_index(R"({"t":"model.safetensors"})");
  EXPECT_EQ(names_of(folder.open()), "t ");
}

TEST(ShardedTensors, DoesNotRelyOnTheIndexForSizes) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add(index_name, R"({"metadata":{"total_size":-1e300,"more":[{}]},"weight_map":)" +
                             right_map + R"(,"other":null})");
  EXPECT_EQ(names_of(folder.open()), "z b a ");
}

TEST(ShardedTensors, FollowsLinksAsInADownloadCache) {
  const ShardFolder folder, blobs;
  blobs.add_shard("blob", {{"t", "1234"}});
  blobs.add("index", R"({"weight_map":{"t":"1.safetensors"}})");
  fs::create_symlink(blobs.path() / "blob", folder.path() / "1.safetensors");
  fs::create_symlink(blobs.path() / "index", folder.path() / index_name);
  EXPECT_EQ(data_of(folder.open().at("t")), "1234");
}

TEST(ShardedTensors, NamesFolderAndTensorThatIsMissing) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(right_map);
  const ShardedTensors tensors = folder.open();
  EXPECT_EQ(tensors.find("absent"), nullptr);
  EXPECT_EQ(tensors.find(""), nullptr);
  expect_in(error_of([&] { tensors.at("absent"); }), {folder.path().string(), "\"absent\""});
}

TEST(ShardedTensors, ViewsSurviveAMove) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(right_map);
  ShardedTensors first = folder.open();
  const TensorView& tensor = first.at("a");
  const ShardedTensors second = std::move(first);
  EXPECT_EQ(&second.at("a"), &tensor);
  EXPECT_EQ(second.tensors()[2], &tensor);
  EXPECT_EQ(data_of(tensor), "aaaa");
}

TEST(ShardedTensors, JoinsMetadata) {
  const ShardFolder folder;
  folder.add_shard("1.safetensors", {{"a", "1"}}, {{"format", "pt"}, {"one", "1"}});
  folder.add_shard("2.safetensors", {{"b", "2"}}, {{"format", "pt"}, {"two", "2"}});
  folder.add_index(R"({"a":"1.safetensors","b":"2.safetensors"})");
  EXPECT_EQ(folder.open().metadata(), (Metadata{{"format", "pt"}, {"one", "1"}, {"two", "2"}}));
}

TEST(ShardedTensors, RefusesMetadataThatDisagree) {
  const ShardFolder folder;
  folder.add_shard("1.safetensors", {{"a", "1"}}, {{"format", "pt"}});
  folder.add_shard("2.safetensors", {{"b", "2"}}, {{"format", "np"}});
  folder.add_index(R"({"a":"1.safetensors","b":"2.safetensors"})");
  expect_in(folder.error("2.safetensors"), {"__metadata__", "\"format\"", "\"pt\"", "\"np\""});
}

// -------------------------------------------------------------------------------- refused folders

TEST(ShardedTensors, RefusesAFolderThatIsNone) {
  const ShardFolder folder;
  const auto error = [&](const std::string& name) {
    return error_of([&] { ShardedTensors(folder.path() / name); });
  };
  folder.add("file", "");
  expect_in(error("absent"), {(folder.path() / "absent").string(), "folder"});
  expect_in(error("file"), {(folder.path() / "file").string(), "folder"});
}

TEST(ShardedTensors, RefusesAFolderWithoutTensors) {
  const ShardFolder folder;
  folder.add("pytorch_model.bin", "");
  expect_in(folder.error(""), {".safetensors", "neither"});
}

TEST(ShardedTensors, RefusesSeveralFilesWithoutAnIndexAndNamesTwo) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add("3.safetensors", "");
  expect_in(folder.error(""), {index_name, "3 files", "\"1.safetensors\"", "\"2.safetensors\""});
}

TEST(ShardedTensors, RefusesAnAbsentShard) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(R"({"a":"2.safetensors","b":"1.safetensors","z":"3.safetensors"})");
  expect_in(folder.error("3.safetensors"), {"tensor \"z\"", "no such file"});
}

TEST(ShardedTensors, RefusesAShardThatIsALinkToNothing) {
  const ShardFolder folder;
  folder.add_index(R"({"a":"1.safetensors"})");
  fs::create_symlink(folder.path() / "nothing", folder.path() / "1.safetensors");
  expect_in(folder.error("1.safetensors"), {"a readable file"});
}

TEST(ShardedTensors, RefusesAShardShorterThanItsHeaderSays) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(right_map);
  const fs::path shard = folder.path() / "2.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1);
  expect_in(folder.error("2.safetensors"), {"tensor \"a\"", "3 bytes"});
}

TEST(ShardedTensors, RefusesATensorThatIsInAnotherShard) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(R"({"a":"1.safetensors","b":"2.safetensors","z":"1.safetensors"})");
  expect_in(folder.error(index_name),
            {"tensor \"a\"", "in \"1.safetensors\"", "one in \"2.safetensors\""});
}

TEST(ShardedTensors, RefusesATensorThatIsInNoShard) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(R"({"a":"2.safetensors","b":"1.safetensors","c":"1.safetensors",)"
                   R"("z":"1.safetensors"})");
  expect_in(folder.error(index_name), {"tensor \"c\"", "in \"1.safetensors\"", "none"});
}

TEST(ShardedTensors, RefusesATensorThatTheIndexDoesNotName) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(R"({"a":"2.safetensors","z":"1.safetensors"})");
  expect_in(folder.error("1.safetensors"), {"tensor \"b\"", "the index names"});
}

TEST(ShardedTensors, RefusesATensorInTwoShards) {
  const ShardFolder folder;
  folder.add_shard("1.safetensors", {{"a", "1"}, {"b", "1"}});
  folder.add_shard("2.safetensors", {{"b", "1"}, {"c", "1"}});
  folder.add_index(R"({"a":"1.safetensors","b":"2.safetensors","c":"2.safetensors"})");
  expect_in(folder.error("2.safetensors"), {"tensor \"b\"", "\"1.safetensors\""});
}

TEST(ShardedTensors, RefusesFilesThatTheIndexDoesNotName) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(right_map);
  folder.add_shard("model.safetensors", {{"a", "1"}});
  expect_in(folder.error("model.safetensors"), {"the index", "does not name"});
}

TEST(ShardedTensors, RefusesAnIndexThatCannotBeRead) {
  const ShardFolder folder;
  folder.add_shard("model.safetensors", {{"a", "1"}});
  fs::create_symlink(folder.path() / "nothing", folder.path() / index_name);
  expect_in(folder.error(index_name), {"a readable file"});
}

struct BadIndex {
  std::string name;               // of the test
  std::string bytes;              // of the index
  std::vector<std::string> says;  // parts of the message beside the file
};

std::ostream& operator<<(std::ostream& out, const BadIndex& bad) {
  return out << bad.name;
}

std::vector<BadIndex> bad_indices() {
  const auto with_shard = [](const std::string& value) {
    return R"({"weight_map":{"a":"2.safetensors","b":"1.safetensors","z":)" + value + "}}";
  };
  const std::string other_file = "a .safetensors file in the same folder";
  const std::string in_z = "tensor \"z\"";
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  return {
      {"Empty", "", {"at least 1 bytes"}},
      {"Array", "[]", {"an object", "array"}},
      {"NotClosed", R"({"weight_map":{)", {"valid JSON"}},
      {"TextAfterIt", R"({"weight_map":{}} {})", {"valid JSON"}},
      {"InvalidUtf8", with_shard("\"\xC3\x28.safetensors\""), {"valid JSON"}},
      {"NoWeightMap", R"({"metadata":{"total_size":9}})", {"\"weight_map\"", "none"}},
      {"WeightMapIsArray", R"({"weight_map":["a"]})", {"\"weight_map\"", "array"}},
      {"WeightMapIsNull", R"({"weight_map":null})", {"\"weight_map\"", "null"}},
      {"ShardIsNumber", with_shard("1"), {in_z, "number"}},
      {"ShardIsArray", with_shard(R"(["1.safetensors"])"), {in_z, "array"}},
      {"ShardIsNull", with_shard("null"), {in_z, "null"}},
      {"ParentFolder", with_shard(R"("../1.safetensors")"), {in_z, other_file, "../"}},
      {"EscapedSlash", with_shard(R"("..\/1.safetensors")"), {in_z, other_file, "../"}},
      {"OtherFolder", with_shard(R"("sub/1.safetensors")"), {in_z, other_file}},
      {"ThisFolder", with_shard(R"("./1.safetensors")"), {in_z, other_file}},
      {"Absolute", with_shard(R"("/etc/1.safetensors")"), {in_z, other_file, "/etc"}},
      {"Nul", with_shard(R"("1.safetensors\u0000.safetensors")"), {in_z, other_file, "\\x00"}},
      {"NoName", with_shard("\"\""), {in_z, other_file}},
      {"Dots", with_shard("\"..\""), {in_z, other_file}},
      {"OtherExtension", with_shard(R"("config.json")"), {in_z, other_file, "config.json"}},
      {"LongName",
       with_shard("\"" + std::string(1'000'000, 'n') + ".safetensors\""),
       {in_z, "no such file"}},
      {"TwinWeightMap", R"({"weight_map":{},"weight_map":{}})", {"\"weight_map\"", "two"}},
      {"TwinTensor",
       R"({"weight_map":{"a":"2.safetensors","a":"2.safetensors"}})",
       {"\"a\"", "two"}},
      {"TwinByEscape",
       R"({"weight_map":{"a":"2.safetensors","\u0061":"1.safetensors"}})",
       {"\"a\"", "two"}},
      {"TwinInMetadata",
       R"({"metadata":{"total_size":1,"total_size":2},"weight_map":)" + right_map + "}",
       {"\"total_size\"", "two"}},
      {"Nested", R"({"weight_map":)" + right_map + R"(,"other":)" + deep + "}", {"nesting"}},
  };
}

class BadShardIndex : public testing::TestWithParam<BadIndex> {};

TEST_P(BadShardIndex, IsRefusedByName) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add(index_name, GetParam().bytes);
  const std::string message = error_of([&] { folder.open(); });
  EXPECT_EQ(message.find(folder.path().string()), 0U) << message;
  expect_in(message, GetParam().says);
}

INSTANTIATE_TEST_SUITE_P(ShardedTensors, BadShardIndex, testing::ValuesIn(bad_indices()),
                         [](const auto& param_info) { return param_info.param.name; });

TEST(ShardedTensors, RefusesAnIndexThatIsTooLarge) {
  const ShardFolder folder;
  folder.add_shards();
  folder.add_index(right_map);
  fs::resize_file(folder.path() / index_name, 100'000'001);
  expect_in(folder.error(index_name), {"at most 100000000 bytes", "100000001"});
}

// ------------------------------------------------------------------------------------------ memory

/// What the process has in memory.
std::size_t resident_pages() {
  std::size_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident;
}

std::uint64_t sum_of(const TensorView& tensor) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < tensor.bytes; ++i)
    sum += std::to_integer<std::uint64_t>(tensor.data[i]);
  return sum;
}

TEST(ShardedTensors, ForgetsPagesAndKeepsBytesReadable) {
  const ShardFolder folder;
  const std::size_t size = std::size_t{32} << 20U;
  folder.add_shard("m.safetensors",
                   {{"t", std::string(size, '\1')}, {"u", std::string(size, '\2')}});
  const ShardedTensors tensors = folder.open();
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t before = resident_pages();
  std::uint64_t sum = sum_of(tensors.at("t"));
  const std::size_t touched = resident_pages();
  tensors.forget(tensors.at("t"));
  const std::size_t after = resident_pages();
  EXPECT_EQ(sum, size);
  EXPECT_GE(touched, before + size / page / 2);
  EXPECT_LE(after, touched - size / page / 2);
  EXPECT_EQ(sum_of(tensors.at("t")), size);
  EXPECT_EQ(sum_of(tensors.at("u")), 2 * size);
}

TEST(ShardedTensors, ForgetsTensorsOfAnySizeAtAnyPlace) {
  const ShardFolder folder;
  std::vector<std::pair<std::string, std::string>> tensors;
  for (const std::size_t size :
       {0U, 1U, 3000U, 4095U, 4096U, 4097U, 8191U, 8192U, 8193U, 20'000U}) {
    tensors.emplace_back("t" + std::to_string(size), std::string(size, '\3'));
  }
  folder.add_shard("m.safetensors", tensors);
  const ShardedTensors sharded = folder.open();
  for (const auto& [name, data] : tensors) {
    sharded.forget(sharded.at(name));
    for (const auto& [other, other_data] : tensors)
      EXPECT_EQ(data_of(sharded.at(other)), other_data);
  }
}

TEST(ShardedTensors, ReadsAnyPartOfATensor) {
  const ShardFolder folder;
  std::string large(2'500'000, '\0');
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * i >> 7U);
  folder.add_shard("1.safetensors", {{"a", "abc"}, {"large", large}, {"empty", ""}});
  folder.add_shard("2.safetensors", {{"b", "xyz"}});
  folder.add_index(R"({"a":"1.safetensors","large":"1.safetensors","empty":"1.safetensors",
                       "b":"2.safetensors"})");
  ShardedTensors opened = folder.open();
  const ShardedTensors sharded = std::move(opened);
  const auto part = [&](const std::string& name, std::size_t first, std::size_t size) {
    std::string read;
    sharded.read(sharded.at(name), first, size, [&](const std::byte* data, std::size_t more) {
      read.append(reinterpret_cast<const char*>(data), more);
    });
    return read;
  };
  EXPECT_EQ(part("a", 0, 3), "abc");
  EXPECT_EQ(part("b", 1, 2), "yz");
  EXPECT_EQ(part("empty", 0, 0), "");
  EXPECT_EQ(part("large", 0, large.size()), large);
  EXPECT_EQ(part("large", 12'345, 2'000'001), large.substr(12'345, 2'000'001));
}

TEST(ShardedTensors, NoticesWhereAFileIsShortened) {
  const ShardFolder folder;
  folder.add_shard("m.safetensors", {{"t", std::string(100'000, 't')}});
  const ShardedTensors sharded = folder.open();
  fs::resize_file(folder.path() / "m.safetensors", 50'000);
  const auto ignore = [](const std::byte*, std::size_t) {};
  expect_in(error_of([&] { sharded.read(sharded.at("t"), 0, 100'000, ignore); }),
            {(folder.path() / "m.safetensors").string(), "fewer"});
}

TEST(ShardedTensors, ForgetsNothingOfOthers) {
  const ShardFolder folder;
  folder.add_shard("m.safetensors", {{"t", "1"}});
  const ShardedTensors sharded = folder.open();
  const std::string data(100'000, 'x');
  TensorView other{
      "t", Dtype::u8, {100'000}, reinterpret_cast<const std::byte*>(data.data()), data.size()};
  sharded.forget(other);
  EXPECT_EQ(data, std::string(100'000, 'x'));
  other.name = "other";
  expect_in(error_of([&] { sharded.forget(other); }), {folder.path().string(), "\"other\""});
  EXPECT_EQ(data, std::string(100'000, 'x'));
}

}  // namespace
