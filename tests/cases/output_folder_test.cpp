// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/checkpoint/output_folder.hpp>
#include <vha/checkpoint/safetensors.hpp>
#include <vha/checkpoint/sharded_tensors.hpp>

#include "error_of.hpp"
#include "temporary_folder.hpp"
#include "tensor_bytes.hpp"

namespace {

using support::data_of;
using support::error_of;
using support::names_in;
using support::read_all;
using support::TemporaryFolder;
using vha::checkpoint::ByteSink;
using vha::checkpoint::Dtype;
using vha::checkpoint::Metadata;
using vha::checkpoint::OutputFolder;
using vha::checkpoint::SafetensorsFile;
using vha::checkpoint::ShardedTensors;
using vha::checkpoint::StreamedTensor;
using vha::checkpoint::TensorView;
namespace fs = std::filesystem;

static_assert(!std::is_copy_constructible_v<OutputFolder>);
static_assert(!std::is_move_constructible_v<OutputFolder>);

const Metadata pt = {{"format", "pt"}};
const std::string index_name = "model.safetensors.index.json";

using Names = std::vector<std::string>;

/// The files of a folder and what is in them.
std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const std::string& name : names_in(folder)) {
    files[name] = fs::is_directory(folder / name) ? "a folder" : read_all(folder / name);
  }
  return files;
}

void give(const ByteSink& sink, std::string_view data) {
  sink(reinterpret_cast<const std::byte*>(data.data()), data.size());
}

/// A tensor that gives its bytes one after the other.
StreamedTensor tensor(std::string name, Dtype dtype, std::vector<std::int64_t> shape,
                      std::string data) {
  return {std::move(name), dtype, std::move(shape), [data = std::move(data)](const ByteSink& sink) {
            for (const char c : data) give(sink, {&c, 1});
          }};
}

StreamedTensor bytes(const std::string& name, std::size_t size) {
  const std::string data(size, name[0]);
  return {name, Dtype::u8, {static_cast<std::int64_t>(size)}, [data](const ByteSink& sink) {
            give(sink, data);
          }};
}

/// A complete folder "out" of these tensors.
fs::path write(const TemporaryFolder& folder, const std::vector<StreamedTensor>& tensors,
               std::uint64_t max_shard_bytes, const Metadata& metadata = pt) {
  OutputFolder out(folder / "out", true);
  out.write_tensors(tensors, metadata, max_shard_bytes);
  out.commit();
  return folder / "out";
}

std::string header_of(const fs::path& path) {
  const std::string file = read_all(path);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  return file.substr(sizeof(length), length);
}

/// Sets the largest size of a file and puts the old one back; a write past it is an error.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    if (::getrlimit(RLIMIT_FSIZE, &old_) != 0) std::abort();
    rlimit now = old_;
    now.rlim_cur = bytes;
    if (::setrlimit(RLIMIT_FSIZE, &now) != 0) std::abort();
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_ = {};
  void (*old_handler_)(int);
};

void expect_in(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no " << part << " in: " << message;
  }
}

// ------------------------------------------------------------------------------------------- files

TEST(OutputFolder, HasItsNameOnlyWhenItIsComplete) {
  const TemporaryFolder folder;
  {
    OutputFolder out(folder / "out", false);
    out.write_file("config.json", "{}");
    EXPECT_FALSE(fs::exists(folder / "out"));
    ASSERT_EQ(names_in(folder / "").size(), 1U);
    const std::string hidden = names_in(folder / "")[0];
    EXPECT_TRUE(hidden.starts_with(".vha-" + std::to_string(::getpid()) + "-")) << hidden;
    EXPECT_TRUE(hidden.ends_with(".tmp")) << hidden;
    EXPECT_EQ(out.path(), folder / hidden);
    EXPECT_EQ(read_all(out.path() / "config.json"), "{}");
    out.commit();
    EXPECT_EQ(names_in(folder / ""), Names{"out"});
  }
  EXPECT_EQ(names_in(folder / ""), Names{"out"});
  EXPECT_EQ(contents(folder / "out"), (std::map<std::string, std::string>{{"config.json", "{}"}}));
}

TEST(OutputFolder, LeavesNothingWithoutACommit) {
  const TemporaryFolder folder;
  {
    OutputFolder out(folder / "out", false);
    out.write_file("config.json", "{}");
  }
  EXPECT_EQ(names_in(folder / ""), Names{});
}

TEST(OutputFolder, CopiesFilesByteForByte) {
  const TemporaryFolder folder;
  std::string large;
  for (unsigned i = 0; i < 3'000'000; ++i) large += static_cast<char>(i * i);
  std::ofstream(folder / "large", std::ios::binary) << large;
  std::ofstream(folder / "empty").flush();
  fs::create_symlink(folder / "large", folder / "link");
  OutputFolder out(folder / "out", false);
  for (const char* name : {"large", "empty", "link"}) out.copy_file(name, folder / name);
  out.commit();
  EXPECT_EQ(contents(folder / "out"),
            (std::map<std::string, std::string>{{"empty", ""}, {"large", large}, {"link", large}}));
  EXPECT_FALSE(fs::is_symlink(folder / "out" / "link"));
}

TEST(OutputFolder, CopiesRegularFilesAlone) {
  const TemporaryFolder folder;
  OutputFolder out(folder / "out", false);
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  fs::create_directory(folder / "sub");
  for (const char* name : {"fifo", "sub", "absent"}) {
    expect_in(error_of([&] { out.copy_file("copy", folder / name); }), {(folder / name).string()});
  }
  EXPECT_EQ(names_in(out.path()), Names{});
}

TEST(OutputFolder, TakesPlainNamesAlone) {
  const TemporaryFolder folder;
  OutputFolder out(folder / "out", false);
  for (const std::string name : {"", ".", "..", "../a", "/a", "sub/a"}) {
    const std::string message = error_of([&] { out.write_file(name, "x"); });
    expect_in(message, {(folder / "out").string(), "\"" + name + "\""});
    expect_in(error_of([&] { out.copy_file(name, "/proc/self/status"); }), {"\"" + name + "\""});
  }
  EXPECT_EQ(names_in(folder / "").size(), 1U);
}

TEST(OutputFolder, GivesTheModesOfTheUmask) {
  const TemporaryFolder folder;
  const ::mode_t old = ::umask(0027);
  write(folder, {bytes("t", 1)}, 10);
  ::umask(old);
  struct stat status = {};
  ASSERT_EQ(::stat((folder / "out").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0750U);
  ASSERT_EQ(::stat((folder / "out" / "model.safetensors").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0640U);
}

// ------------------------------------------------------------------------------------------ target

TEST(OutputFolder, RefusesATargetThatExists) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "out");
  std::ofstream(folder / "file").flush();
  fs::create_symlink(folder / "nothing", folder / "link");
  for (const char* name : {"out", "out/", "file", "link"}) {
    expect_in(error_of([&] { OutputFolder(folder / name, false); }),
              {(folder / name).parent_path(), "no such file or folder"});
  }
  EXPECT_EQ(names_in(folder / ""), (Names{"file", "link", "out"}));
}

TEST(OutputFolder, ReplacesFoldersAlone) {
  const TemporaryFolder folder;
  std::ofstream(folder / "file").flush();
  fs::create_symlink(folder / "nothing", folder / "link");
  for (const char* name : {"file", "link"}) {
    expect_in(error_of([&] { OutputFolder(folder / name, true); }),
              {(folder / name).string(), "a folder to replace"});
  }
  EXPECT_EQ(names_in(folder / ""), (Names{"file", "link"}));
}

TEST(OutputFolder, RefusesAParentThatIsNoFolder) {
  const TemporaryFolder folder;
  std::ofstream(folder / "file").flush();
  for (const char* name : {"absent/out", "file/out"}) {
    expect_in(error_of([&] { OutputFolder(folder / name, false); }), {(folder / name).string()});
  }
  EXPECT_EQ(names_in(folder / ""), Names{"file"});
}

TEST(OutputFolder, RefusesATargetWithoutAName) {
  for (const char* name : {"", "/", ".", "..", "../", "absent/.."}) {
    expect_in(error_of([&] { OutputFolder(name, true); }), {"the name of a folder"});
  }
}

TEST(OutputFolder, RefusesAParentThatCannotBeWrittenIn) {
  const TemporaryFolder folder;
  const uid_t user = ::geteuid();
  ASSERT_EQ(::chmod((folder / "").c_str(), 0555), 0);
  // Permissions do not bind root, so be somebody else for a moment.
  if (user == 0) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string message = error_of([&] { OutputFolder(folder / "out", false); });
  ASSERT_EQ(::seteuid(user), 0);
  ASSERT_EQ(::chmod((folder / "").c_str(), 0755), 0);
  expect_in(message, {(folder / "out").string(), "Permission denied"});
  EXPECT_EQ(names_in(folder / ""), Names{});
}

TEST(OutputFolder, TakesATargetWithASlashOrBare) {
  const TemporaryFolder folder;
  OutputFolder(folder / "slash/", false).commit();
  const fs::path before = fs::current_path();
  fs::current_path(folder / "");
  OutputFolder("bare", false).commit();
  fs::current_path(before);
  EXPECT_EQ(names_in(folder / ""), (Names{"bare", "slash"}));
}

TEST(OutputFolder, GetsPastAFolderLeftByAKilledProcess) {
  const TemporaryFolder folder;
  const std::string prefix = ".vha-" + std::to_string(::getpid()) + "-";
  const std::string last = OutputFolder(folder / "out", false).path().filename().string();
  const int number = std::stoi(last.substr(prefix.size()));
  for (int i = 1; i <= 3; ++i) {
    fs::create_directory(folder / (prefix + std::to_string(number + i) + ".tmp"));
  }
  OutputFolder out(folder / "out", false);
  EXPECT_EQ(out.path(), folder / (prefix + std::to_string(number + 4) + ".tmp"));
  out.commit();
  EXPECT_EQ(names_in(folder / "").size(), 4U);
}

TEST(OutputFolder, DoesNotReplaceWhatHasComeMeanwhile) {
  const TemporaryFolder folder;
  {
    OutputFolder out(folder / "out", false);
    fs::create_directory(folder / "out");
    std::ofstream(folder / "out" / "other") << "other";
    expect_in(error_of([&] { out.commit(); }), {(folder / "out").string(), "rename"});
  }
  EXPECT_EQ(names_in(folder / ""), Names{"out"});
  EXPECT_EQ(contents(folder / "out"), (std::map<std::string, std::string>{{"other", "other"}}));
}

// --------------------------------------------------------------------------------------- overwrite

TEST(OutputFolder, ReplacesTheEarlierFolderAsAWhole) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "out/sub");
  std::ofstream(folder / "out" / "stale.safetensors") << "old";
  std::ofstream(folder / "out" / "config.json") << "old";
  const auto old = contents(folder / "out");
  OutputFolder out(folder / "out", true);
  out.write_file("config.json", "new");
  EXPECT_EQ(contents(folder / "out"), old);
  out.commit();
  EXPECT_EQ(names_in(folder / ""), Names{"out"});
  EXPECT_EQ(contents(folder / "out"), (std::map<std::string, std::string>{{"config.json", "new"}}));
}

TEST(OutputFolder, ReplacesALinkAndNotWhatItLeadsTo) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "old");
  std::ofstream(folder / "old" / "file") << "old";
  fs::create_directory_symlink("old", folder / "out");
  write(folder, {bytes("t", 1)}, 10);
  EXPECT_EQ(names_in(folder / ""), (Names{"old", "out"}));
  EXPECT_FALSE(fs::is_symlink(folder / "out"));
  EXPECT_EQ(read_all(folder / "old" / "file"), "old");
}

TEST(OutputFolder, ReplacesTheFolderThatItReadsFrom) {
  const TemporaryFolder folder;
  write(folder, {tensor("t", Dtype::u8, {4}, "1111")}, 10);
  const ShardedTensors old(folder / "out");
  const TensorView& view = old.at("t");
  write(folder,
        {{"t", Dtype::u8, {4}, [&](const ByteSink& sink) { sink(view.data, view.bytes); }},
         tensor("u", Dtype::u8, {1}, "2")},
        10);
  EXPECT_EQ(data_of(view), "1111");
  EXPECT_EQ(data_of(ShardedTensors(folder / "out").at("t")), "1111");
  EXPECT_EQ(data_of(ShardedTensors(folder / "out").at("u")), "2");
}

TEST(OutputFolder, KeepsTheEarlierFolderOnFailure) {
  const TemporaryFolder folder;
  write(folder, {bytes("a", 100), bytes("b", 100)}, 100);
  const auto old = contents(folder / "out");
  ASSERT_EQ(old.size(), 3U);
  const StreamedTensor failing{"c", Dtype::u8, {100}, [](const ByteSink& sink) {
                                 give(sink, "half");
                                 throw std::runtime_error("no more");
                               }};
  EXPECT_THROW(write(folder, {bytes("a", 100), failing}, 100), std::runtime_error);
  EXPECT_EQ(names_in(folder / ""), Names{"out"});
  EXPECT_EQ(contents(folder / "out"), old);
}

// ---------------------------------------------------------------------------------------- tensors

TEST(OutputFolder, WritesOneShardWithoutAnIndex) {
  const TemporaryFolder folder;
  const fs::path out =
      write(folder, {tensor("b", Dtype::u8, {1, 3}, "bbb"), tensor("a", Dtype::bf16, {}, "aa")}, 5,
            {{"format", "pt"}, {"a", "\""}});
  EXPECT_EQ(names_in(out), Names{"model.safetensors"});
  std::string header = R"({"__metadata__":{"a":"\"","format":"pt"},)"
                       R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},)"
                       R"("b":{"dtype":"U8","shape":[1,3],"data_offsets":[2,5]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(header_of(out / "model.safetensors"), header);
  EXPECT_EQ(read_all(out / "model.safetensors").substr(8), header + "aabbb");
}

TEST(OutputFolder, WritesNoTensorsAtAll) {
  const TemporaryFolder folder;
  const fs::path out = write(folder, {}, 0);
  EXPECT_EQ(names_in(out), Names{"model.safetensors"});
  EXPECT_TRUE(ShardedTensors(out).tensors().empty());
}

TEST(OutputFolder, FillsShardsInTheOrderGiven) {
  const TemporaryFolder folder;
  // A shard that is exactly full, one with a tensor that is too large for any, and the rest.
  const fs::path out = write(folder,
                             {bytes("a", 6), bytes("b", 4), bytes("c", 1), bytes("d", 11),
                              bytes("e", 0), bytes("f", 5), bytes("g", 5), bytes("h", 1)},
                             10);
  const std::vector<std::string> expected = {"a b ", "c ", "d ", "e f g ", "h "};
  Names names;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    names.push_back("model-0000" + std::to_string(i + 1) + "-of-00005.safetensors");
    const SafetensorsFile shard(out / names.back());
    std::string found;
    for (const TensorView& view : shard.tensors()) found += view.name + " ";
    EXPECT_EQ(found, expected[i]);
    EXPECT_EQ(shard.metadata(), pt);
  }
  names.push_back(index_name);
  EXPECT_EQ(names_in(out), names);
}

TEST(OutputFolder, WritesTheIndex) {
  const TemporaryFolder folder;
  const fs::path out =
      write(folder, {bytes("z", 6), tensor("\xC3\xBC\"", Dtype::f32, {1}, "1234")}, 6);
  EXPECT_EQ(read_all(out / index_name),
            "{\n"
            "  \"metadata\": {\n"
            "    \"total_size\": 10\n"
            "  },\n"
            "  \"weight_map\": {\n"
            "    \"z\": \"model-00001-of-00002.safetensors\",\n"
            "    \"\xC3\xBC\\\"\": \"model-00002-of-00002.safetensors\"\n"
            "  }\n"
            "}\n");
}

TEST(OutputFolder, IsReadBack) {
  const TemporaryFolder folder;
  const Metadata metadata = {{"format", "pt"}, {"odd\n\"", ""}};
  for (const std::uint64_t most : {0U, 1U, 8U, 24U, 1000U}) {
    SCOPED_TRACE(most);
    // Every length of name, so that every amount of padding occurs.
    std::vector<std::pair<StreamedTensor, std::string>> tensors;
    const auto add = [&](const std::string& name, Dtype dtype, std::vector<std::int64_t> shape,
                         const std::string& data) {
      tensors.emplace_back(tensor(name, dtype, std::move(shape), data), data);
    };
    add("a", Dtype::u8, {3}, "aaa");
    add("bb", Dtype::f32, {1, 2}, "bbbbbbbb");
    add("ccc", Dtype::bf16, {}, "cc");
    add("dddd", Dtype::f64, {1}, "dddddddd");
    add("eeeee", Dtype::i32, {0, 7}, "");
    add("ffffff", Dtype::boolean, {2}, std::string("\0\1", 2));
    add("ggggggg", Dtype::f16, {2, 3}, "gggggggggggg");
    std::vector<StreamedTensor> streamed;
    for (const auto& [one, data] : tensors) streamed.push_back(one);
    const ShardedTensors read(write(folder, streamed, most, metadata));
    EXPECT_EQ(read.tensors().size(), tensors.size());
    EXPECT_EQ(read.metadata(), metadata);
    for (const auto& [one, data] : tensors) {
      SCOPED_TRACE(one.name);
      const TensorView& view = read.at(one.name);
      EXPECT_EQ(view.dtype, one.dtype);
      EXPECT_EQ(view.shape, one.shape);
      EXPECT_EQ(data_of(view), data);
      const std::size_t size = vha::checkpoint::dtype_size(view.dtype);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % size, 0U);
    }
    for (const std::string& name : names_in(folder / "out")) {
      if (name == index_name) continue;
      const std::string header = header_of(folder / "out" / name);
      EXPECT_EQ(header.size() % 8, 0U) << header;
      EXPECT_EQ(header[0], '{');
    }
  }
}

TEST(OutputFolder, AsksEachTensorOnceInTheOrderOfTheFiles) {
  const TemporaryFolder folder;
  std::string asked;
  const auto logged = [&](StreamedTensor one) {
    one.write = [&asked, name = one.name, write = one.write](const ByteSink& sink) {
      asked += name + " ";
      write(sink);
    };
    return one;
  };
  const fs::path out =
      write(folder,
            {logged(tensor("a", Dtype::u8, {1}, "1")), logged(tensor("b", Dtype::bf16, {1}, "12")),
             logged(tensor("c", Dtype::bf16, {1}, "12")), logged(bytes("d", 2)),
             logged(bytes("e", 0)), logged(tensor("f", Dtype::f32, {1}, "1234"))},
            6);
  EXPECT_EQ(asked, "b c a f d e ");
  std::string stored;
  const ShardedTensors read(out);
  for (const TensorView* view : read.tensors()) stored += view->name + " ";
  EXPECT_EQ(stored, "b c a f d e ");
}

struct BadTensors {
  std::string says;
  std::vector<StreamedTensor> tensors;
  Metadata metadata = {};
};

TEST(OutputFolder, RefusesBadTensorsByName) {
  const std::string not_utf8 = "\xC3\x28";
  const auto repeating = [](std::size_t calls) {
    return StreamedTensor{"t", Dtype::f32, {2}, [calls](const ByteSink& sink) {
                            for (std::size_t i = 0; i < calls; ++i) give(sink, "123");
                          }};
  };
  const std::vector<BadTensors> table = {
      {"tensor \"t\": expected 8 bytes for F32 [2], got 0", {bytes("a", 10), repeating(0)}},
      {"tensor \"t\": expected 8 bytes for F32 [2], got 6", {bytes("a", 10), repeating(2)}},
      {"tensor \"t\": expected 8 bytes for F32 [2], got 9", {bytes("a", 10), repeating(3)}},
      {"tensor \"t\": expected 8 bytes for F32 [2], got 3000", {repeating(1000)}},
      {"tensor \"e\": expected 0 bytes for U8 [0], got 1", {tensor("e", Dtype::u8, {0}, "1")}},
      // Also where the two would be in different shards.
      {"tensor \"t\": expected a name of its own, got two", {bytes("t", 10), bytes("t", 10)}},
      {"tensor \"__metadata__\": expected a name of its own", {bytes("__metadata__", 1)}},
      {"U8 [-2, -2]", {tensor("t", Dtype::u8, {-2, -2}, "1111")}},
      {"U8 [4294967296, 4294967296]", {tensor("t", Dtype::u8, {4294967296, 4294967296}, "")}},
      {"expected valid UTF-8", {bytes("a", 10), bytes(not_utf8, 1)}},
      {"__metadata__: expected valid UTF-8", {bytes("a", 10), bytes("b", 1)}, {{"k", not_utf8}}},
  };
  const TemporaryFolder folder;
  for (const BadTensors& bad : table) {
    SCOPED_TRACE(bad.says);
    const std::string message = error_of([&] { write(folder, bad.tensors, 10, bad.metadata); });
    EXPECT_EQ(message.find((folder / "out").string()), 0U) << message;
    expect_in(message, {bad.says});
    EXPECT_EQ(names_in(folder / ""), Names{});
  }
}

// --------------------------------------------------------------------------------- interruptions

TEST(OutputFolder, LeavesNothingWhenATensorThrows) {
  const TemporaryFolder folder;
  const StreamedTensor failing{"t", Dtype::u8, {100}, [](const ByteSink& sink) {
                                 give(sink, "half");
                                 throw std::runtime_error("no more");
                               }};
  EXPECT_THROW(write(folder, {bytes("a", 100), failing}, 100), std::runtime_error);
  EXPECT_EQ(names_in(folder / ""), Names{});
}

TEST(OutputFolder, FailsMidwayWithoutATraceAndThenSucceeds) {
  const TemporaryFolder folder;
  const std::vector<StreamedTensor> tensors = {bytes("a", 1000), bytes("b", 100'000)};
  const std::string in_the_way(100'000, 'x');
  std::ofstream(folder / "large") << in_the_way;
  {
    const FileSizeLimit limit(20'000);
    expect_in(error_of([&] { write(folder, tensors, 1000); }),
              {(folder / "out" / "model-00002-of-00002.safetensors").string(), "write"});
    expect_in(error_of([&] { OutputFolder(folder / "out", false).write_file("f", in_the_way); }),
              {(folder / "out" / "f").string(), "write"});
    expect_in(
        error_of([&] { OutputFolder(folder / "out", false).copy_file("copy", folder / "large"); }),
        {(folder / "out" / "copy").string(), "write"});
  }
  EXPECT_EQ(names_in(folder / ""), Names{"large"});
  EXPECT_EQ(data_of(ShardedTensors(write(folder, tensors, 1000)).at("b")),
            std::string(100'000, 'b'));
}

TEST(OutputFolder, FailsOnAFileThatCannotBeMade) {
  const TemporaryFolder folder;
  {
    OutputFolder out(folder / "out", false);
    fs::remove_all(out.path());
    expect_in(error_of([&] { out.write_file("f", ""); }), {(folder / "out" / "f").string()});
    expect_in(error_of([&] { out.commit(); }), {(folder / "out").string()});
  }
  EXPECT_EQ(names_in(folder / ""), Names{});
}

/// Writes "out" in a process that is killed at the second of its tensors.
void write_and_die(const TemporaryFolder& folder) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const StreamedTensor deadly{"t", Dtype::u8, {100}, [](const ByteSink& sink) {
                                  give(sink, "half");
                                  ::raise(SIGKILL);
                                }};
    try {
      write(folder, {bytes("a", 100), deadly}, 100);
    } catch (...) {
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(WTERMSIG(status), SIGKILL);
}

TEST(OutputFolder, LeavesNoTargetWhenItsProcessIsKilled) {
  const TemporaryFolder folder;
  write_and_die(folder);
  EXPECT_FALSE(fs::exists(folder / "out"));
  ASSERT_EQ(names_in(folder / "").size(), 1U);  // the hidden folder
  EXPECT_TRUE(names_in(folder / "")[0].starts_with(".vha-"));
  write(folder, {bytes("a", 100)}, 100);  // a rerun succeeds
  EXPECT_EQ(data_of(ShardedTensors(folder / "out").at("a")), std::string(100, 'a'));
}

TEST(OutputFolder, LeavesTheEarlierFolderWhenItsProcessIsKilled) {
  const TemporaryFolder folder;
  write(folder, {bytes("a", 50), bytes("b", 50)}, 50);
  const auto old = contents(folder / "out");
  write_and_die(folder);
  EXPECT_EQ(contents(folder / "out"), old);
  write(folder, {bytes("c", 100)}, 100);
  EXPECT_EQ(data_of(ShardedTensors(folder / "out").at("c")), std::string(100, 'c'));
}

}  // namespace
