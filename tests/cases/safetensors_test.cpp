// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/checkpoint/safetensors.hpp>
#include <vha/checkpoint/safetensors_writer.hpp>
#include <vha/core/error.hpp>

#include "sanitized.hpp"
#include "temporary_folder.hpp"
#include "tensor_bytes.hpp"

namespace {

using support::data_of;
using support::read_all;
using support::TemporaryFolder;
using vha::checkpoint::Dtype;
using vha::checkpoint::Metadata;
using vha::checkpoint::SafetensorsFile;
using vha::checkpoint::TensorView;
using vha::checkpoint::write_safetensors;
namespace fs = std::filesystem;

static_assert(!std::is_copy_constructible_v<SafetensorsFile>);
static_assert(!std::is_copy_assignable_v<SafetensorsFile>);
static_assert(std::is_nothrow_move_constructible_v<SafetensorsFile>);
static_assert(std::is_move_assignable_v<SafetensorsFile>);

std::string length_prefix(std::uint64_t length) {
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes;
}

/// A file with this header, as it is, and these data.
std::string file_bytes(std::string_view header, std::string_view data) {
  return length_prefix(header.size()).append(header).append(data);
}

std::string header_of(const std::string& bytes) {
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  return bytes.substr(sizeof(length), length);
}

/// A view of `data`, which must outlive it.
TensorView view(std::string name, Dtype dtype, std::vector<std::int64_t> shape,
                std::string_view data) {
  return {std::move(name), dtype, std::move(shape), reinterpret_cast<const std::byte*>(data.data()),
          data.size()};
}

/// Sets a resource limit and puts the old one back.
class LimitGuard {
 public:
  LimitGuard(decltype(RLIMIT_AS) resource, rlim_t value) : resource_(resource) {
    if (::getrlimit(resource_, &old_) != 0) std::abort();
    rlimit now = old_;
    now.rlim_cur = value;
    if (::setrlimit(resource_, &now) != 0) std::abort();
  }
  LimitGuard(const LimitGuard&) = delete;
  LimitGuard& operator=(const LimitGuard&) = delete;
  ~LimitGuard() { ::setrlimit(resource_, &old_); }

 private:
  decltype(RLIMIT_AS) resource_;
  rlimit old_ = {};
};

/// Lets the process map at most `bytes` more, so that a larger allocation throws std::bad_alloc,
/// which is no vha::Error. Does nothing where a sanitizer needs the address space.
class AllocationGuard {
 public:
  explicit AllocationGuard(std::uint64_t bytes) {
    if (support::sanitized) return;
    std::uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    if (pages != 0) {
      limit_.emplace(RLIMIT_AS,
                     pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + bytes);
    }
  }

 private:
  std::optional<LimitGuard> limit_;
};

/// The text of the vha::Error that `action` throws; fails the test if it throws none.
template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const vha::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// ---------------------------------------------------------------------------------- refused files

struct Hostile {
  std::string name;               // of the test
  std::string bytes;              // of the file
  std::vector<std::string> says;  // parts of the message beside the file
};

std::ostream& operator<<(std::ostream& out, const Hostile& hostile) {
  return out << hostile.name;
}

const std::string in_tensor_t = "tensor \"t\"";

/// A file whose only tensor "t" has this JSON value.
std::string tensor_file(const std::string& value, std::size_t data_bytes) {
  return file_bytes("{\"t\":" + value + "}", std::string(data_bytes, 'x'));
}

std::vector<Hostile> hostile_files() {
  const std::string a04 = R"("a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  const std::string b04 = R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  const std::string b26 = R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]})";
  const std::string b59 = R"("b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]})";
  const std::string b48 = R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})";
  const auto file_of = [](const std::string& entries, std::size_t data_bytes) {
    return file_bytes("{" + entries + "}", std::string(data_bytes, 'x'));
  };
  const auto nested = [](const std::string& open, const std::string& close) {
    std::string out;
    for (int i = 0; i < 100'000; ++i) out += open;
    for (int i = 0; i < 100'000; ++i) out += close;
    return out;
  };
  const auto with_dtype = [](const std::string& dtype) {
    return R"({"dtype":)" + dtype + R"(,"shape":[4],"data_offsets":[0,4]})";
  };
  const auto with_shape = [](const std::string& shape) {
    return R"({"dtype":"U8","shape":)" + shape + R"(,"data_offsets":[0,4]})";
  };
  const auto with_offsets = [](const std::string& offsets) {
    return R"({"dtype":"U8","shape":[4],"data_offsets":)" + offsets + "}";
  };
  const std::string long_name(1'000'000, 'n');

  return {
      // Length of the header.
      {"Empty", "", {"at least 8 bytes", "got 0"}},
      {"SevenBytes", std::string(7, '\0'), {"at least 8 bytes", "got 7"}},
      {"LengthAllOnes", std::string(8, '\xFF'), {"at most 100000000", "18446744073709551615"}},
      {"LengthOverCap", length_prefix(100'000'001) + "{}", {"at most 100000000", "100000001"}},
      // The greatest length allowed is judged by the file, not by the cap.
      {"LengthAtCap", length_prefix(100'000'000) + "{}", {"the 2 bytes that follow", "100000000"}},
      {"HeaderLongerThanFile", length_prefix(3) + "{}", {"the 2 bytes that follow", "got 3"}},
      {"LengthZero", file_bytes("", ""), {"starts with '{'"}},

      // JSON.
      {"Array", file_bytes("[]", ""), {"starts with '{'"}},
      {"LeadingSpace", file_bytes(" {}", ""), {"starts with '{'"}},
      {"ByteOrderMark", file_bytes("\xEF\xBB\xBF{}", ""), {"starts with '{'"}},
      {"NotClosed", file_bytes("{" + a04, "xxxx"), {"valid JSON"}},
      {"TextAfterObject", file_bytes("{}{}", ""), {"valid JSON"}},
      {"NulPadding", file_bytes(std::string("{}\0\0", 4), ""), {"NUL"}},
      {"NulThenMore", file_bytes(std::string("{}\0}{", 5), ""), {"NUL"}},
      {"Comment", file_bytes("{/**/}", ""), {"valid JSON"}},
      {"InvalidUtf8Name", file_of("\"\xC3\x28\":{}", 0), {"header", "UTF-8"}},
      {"OverlongUtf8Name", file_of("\"\xC0\xAF\":{}", 0), {"header", "UTF-8"}},
      {"Utf8Surrogate", file_of("\"\xED\xA0\x80\":{}", 0), {"header", "UTF-8"}},
      {"LoneSurrogateEscape", file_of(R"("\ud800":{})", 0), {"header", "surrogate"}},
      {"InvalidUtf8InTensor", tensor_file(with_dtype("\"\xFF\""), 4), {in_tensor_t, "UTF-8"}},
      {"NumberTooLarge", tensor_file(with_shape("[1e999]"), 4), {in_tensor_t, "valid JSON"}},
      {"LongToken", tensor_file("\"" + long_name + "\xFF\"", 4), {in_tensor_t, "UTF-8"}},
      {"NestedArrays", tensor_file(nested("[", "]"), 0), {in_tensor_t, "an array"}},
      {"NestedObjects", tensor_file(nested("{\"k\":", "}"), 0), {in_tensor_t, "\"k\""}},
      {"NestedInShape", tensor_file(with_shape(nested("[", "]")), 4), {in_tensor_t, "shape"}},
      {"NestedInOffsets", tensor_file(with_offsets(nested("[", "]")), 4), {in_tensor_t, "offsets"}},
      {"NestedInMetadata",
       file_of(R"("__metadata__":{"k":)" + nested("[", "]") + "}", 0),
       {"__metadata__", "\"k\"", "a string"}},

      // Keys.
      {"TwinTensors", file_of(a04 + "," + b48 + "," + a04, 8), {"tensor \"a\"", "two"}},
      {"TwinTensorsApart",
       file_of(a04 + R"(,"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})", 8),
       {"tensor \"a\"", "two"}},
      {"TwinByEscape",
       file_of(a04 + R"(,"\u0061":{"dtype":"U8","shape":[4],"data_offsets":[4,8]})", 8),
       {"tensor \"a\"", "two"}},
      {"TwinDtype",
       tensor_file(R"({"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]})", 4),
       {in_tensor_t, "dtype", "two"}},
      {"TwinShape",
       tensor_file(R"({"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]})", 4),
       {in_tensor_t, "shape", "two"}},
      {"TwinOffsets",
       tensor_file(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]})", 4),
       {in_tensor_t, "data_offsets", "two"}},
      {"TwinMetadata",
       file_of(R"("__metadata__":{},"__metadata__":{})", 0),
       {"__metadata__", "two"}},
      {"TwinMetadataKey",
       file_of(R"("__metadata__":{"k":"1","k":"1"})", 0),
       {"__metadata__", "\"k\"", "two"}},
      {"UnknownKey",
       tensor_file(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"scale":1})", 4),
       {in_tensor_t, "\"scale\""}},
      {"NoDtype",
       tensor_file(R"({"shape":[4],"data_offsets":[0,4]})", 4),
       {in_tensor_t, "no dtype"}},
      {"NoShape",
       tensor_file(R"({"dtype":"U8","data_offsets":[0,4]})", 4),
       {in_tensor_t, "no shape"}},
      {"NoOffsets",
       tensor_file(R"({"dtype":"U8","shape":[4]})", 4),
       {in_tensor_t, "no data_offsets"}},
      // What one tensor gives must not serve the next.
      {"NoDtypeInSecond",
       file_of(a04 + R"(,"b":{"shape":[4],"data_offsets":[4,8]})", 8),
       {"tensor \"b\"", "no dtype"}},
      {"NoShapeInSecond",
       file_of(a04 + R"(,"b":{"dtype":"U8","data_offsets":[4,8]})", 8),
       {"tensor \"b\"", "no shape"}},
      {"NoOffsetsInSecond",
       file_of(a04 + R"(,"b":{"dtype":"U8","shape":[4]})", 8),
       {"tensor \"b\"", "no data_offsets"}},

      // Types of values.
      {"TensorIsNull", tensor_file("null", 0), {in_tensor_t, "null"}},
      {"TensorIsString", tensor_file("\"U8\"", 0), {in_tensor_t, "U8"}},
      {"TensorIsNumber", tensor_file("4", 0), {in_tensor_t, "4"}},
      {"TensorIsBool", tensor_file("true", 0), {in_tensor_t, "true"}},
      {"MetadataIsNull", file_of(R"("__metadata__":null)", 0), {"__metadata__", "null"}},
      {"MetadataIsString", file_of(R"("__metadata__":"pt")", 0), {"__metadata__", "pt"}},
      {"MetadataNumber", file_of(R"("__metadata__":{"k":1})", 0), {"__metadata__", "\"k\""}},
      {"MetadataObject", file_of(R"("__metadata__":{"k":{}})", 0), {"__metadata__", "\"k\""}},
      {"DtypeNumber", tensor_file(with_dtype("4"), 4), {in_tensor_t, "dtype", "a string"}},
      {"DtypeNull", tensor_file(with_dtype("null"), 4), {in_tensor_t, "dtype", "null"}},
      {"DtypeUnknown", tensor_file(with_dtype("\"F4\""), 4), {in_tensor_t, "dtype", "\"F4\""}},
      {"DtypeLowerCase", tensor_file(with_dtype("\"u8\""), 4), {in_tensor_t, "dtype", "\"u8\""}},
      {"DtypeEmpty", tensor_file(with_dtype("\"\""), 4), {in_tensor_t, "dtype", "\"\""}},
      {"ShapeNumber", tensor_file(with_shape("4"), 4), {in_tensor_t, "shape", "4"}},
      {"ShapeString", tensor_file(with_shape("\"4\""), 4), {in_tensor_t, "shape", "4"}},
      {"ShapeOfStrings", tensor_file(with_shape("[\"4\"]"), 4), {in_tensor_t, "shape", "4"}},
      {"ShapeNegative", tensor_file(with_shape("[-4]"), 4), {in_tensor_t, "shape", "-4"}},
      {"ShapeTwoNegatives", tensor_file(with_shape("[-2,-2]"), 4), {in_tensor_t, "shape", "-2"}},
      {"ShapeFraction", tensor_file(with_shape("[4.0]"), 4), {in_tensor_t, "shape", "4.0"}},
      {"ShapeBool", tensor_file(with_shape("[true,4]"), 4), {in_tensor_t, "shape", "true"}},
      {"Shape63Bits",
       tensor_file(with_shape("[0,9223372036854775808]"), 0),
       {in_tensor_t, "shape", "9223372036854775808"}},
      {"OffsetsNumber", tensor_file(with_offsets("4"), 4), {in_tensor_t, "data_offsets", "4"}},
      {"OffsetsObject",
       tensor_file(with_offsets("{}"), 4),
       {in_tensor_t, "data_offsets", "object"}},
      {"OffsetsNone",
       tensor_file(with_offsets("[]"), 4),
       {in_tensor_t, "data_offsets", "0 of them"}},
      {"OffsetsOne",
       tensor_file(with_offsets("[4]"), 4),
       {in_tensor_t, "data_offsets", "1 of them"}},
      {"OffsetsThree",
       tensor_file(with_offsets("[0,4,4]"), 4),
       {in_tensor_t, "data_offsets", "more than two"}},
      {"OffsetsReversed",
       tensor_file(with_offsets("[4,0]"), 4),
       {in_tensor_t, "data_offsets", "[4, 0]"}},
      {"OffsetsNegative",
       tensor_file(with_offsets("[-4,0]"), 4),
       {in_tensor_t, "data_offsets", "-4"}},
      {"OffsetsFraction",
       tensor_file(with_offsets("[0,4.0]"), 4),
       {in_tensor_t, "data_offsets", "4.0"}},
      {"OffsetsExponent",
       tensor_file(with_offsets("[0,4e0]"), 4),
       {in_tensor_t, "data_offsets", "4e0"}},
      {"OffsetsPast64Bits",
       tensor_file(with_offsets("[0,18446744073709551620]"), 4),
       {in_tensor_t, "data_offsets", "18446744073709551620"}},

      // Sizes.
      {"SizeTooLarge",
       tensor_file(with_shape("[5]"), 4),
       {in_tensor_t, "5 bytes for U8 [5]", "4 bytes"}},
      {"SizeTooSmall",
       tensor_file(with_shape("[3]"), 4),
       {in_tensor_t, "3 bytes for U8 [3]", "4 bytes"}},
      {"SizeOfDtype",
       tensor_file(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4),
       {in_tensor_t, "8 bytes for F32 [2]", "4 bytes"}},
      {"SizeOfScalar",
       tensor_file(R"({"dtype":"F32","shape":[],"data_offsets":[0,0]})", 0),
       {in_tensor_t, "4 bytes for F32 []", "0 bytes"}},
      {"SizeOverflow",
       tensor_file(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0),
       {in_tensor_t, "63 bits", "[4294967296, 4294967296]"}},
      {"SizeOverflowByDtype",
       tensor_file(R"({"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]})", 0),
       {in_tensor_t, "63 bits", "2305843009213693952"}},
      {"SizeOverflowThenZero",
       tensor_file(R"({"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]})", 0),
       {in_tensor_t, "63 bits"}},
      {"SizeOverflowAfterZero",
       tensor_file(R"({"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]})", 0),
       {in_tensor_t, "63 bits"}},
      {"OffsetsFarPastFile",
       tensor_file(R"({"dtype":"U8","shape":[9223372036854775807],)"
                   R"("data_offsets":[0,9223372036854775807]})",
                   4),
       {in_tensor_t, "4 bytes after the header", "9223372036854775807"}},
      {"OffsetsNear64Bits",
       tensor_file(R"({"dtype":"U8","shape":[4],)"
                   R"("data_offsets":[18446744073709551608,18446744073709551612]})",
                   4),
       {in_tensor_t, "a hole"}},

      // Tiling.
      {"SameBytes", file_of(a04 + "," + b04, 4), {"tensor \"b\"", "an overlap"}},
      {"Overlap", file_of(a04 + "," + b26, 6), {"tensor \"b\"", "an overlap"}},
      {"OverlapOutOfOrder", file_of(b26 + "," + a04, 6), {"tensor \"b\"", "an overlap"}},
      {"EmptyInsideAnother",
       file_of(a04 + R"(,"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]})", 4),
       {"tensor \"e\"", "an overlap"}},
      {"Hole", file_of(a04 + "," + b59, 9), {"tensor \"b\"", "a hole", "byte 4"}},
      {"HoleAtStart", file_of(b48, 8), {"tensor \"b\"", "a hole", "byte 0"}},
      {"EmptyPastTheEnd",
       file_of(a04 + R"(,"e":{"dtype":"U8","shape":[0],"data_offsets":[5,5]})", 4),
       {"tensor \"e\"", "a hole"}},
      {"TrailingByte", file_of(a04 + "," + b48, 9), {"tensor \"b\"", "trailing", "got 9 bytes"}},
      {"TrailingByteAlone", file_bytes("{}", "x"), {"trailing", "got 1 bytes"}},
      {"ShortByOne", file_of(a04 + "," + b48, 7), {"tensor \"b\"", "the 7 bytes after the header"}},
  };
}

class HostileFile : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileFile, IsRefusedNamingFileAndPlaceWithoutLargeAllocation) {
  const TemporaryFolder folder;
  const fs::path path = folder.add("hostile.safetensors", GetParam().bytes);
  const std::string message = error_of([&] {
    const AllocationGuard guard(std::uint64_t{8} << 20U);
    const SafetensorsFile file(path);
  });
  EXPECT_EQ(message.find(path.string() + ": "), 0U) << message;
  for (const std::string& part : GetParam().says) {
    EXPECT_NE(message.find(part), std::string::npos) << "no " << part << " in: " << message;
  }
  EXPECT_LT(message.size(), 1000 + path.string().size());
  // Neither the bytes that are not UTF-8 nor control characters are passed on.
  EXPECT_TRUE(std::all_of(message.begin() + static_cast<std::ptrdiff_t>(path.string().size()),
                          message.end(), [](char c) { return c >= 0x20 && c < 0x7F; }))
      << message;
}

INSTANTIATE_TEST_SUITE_P(Safetensors, HostileFile, ::testing::ValuesIn(hostile_files()),
                         [](const auto& param_info) { return param_info.param.name; });

TEST(SafetensorsFile, NamesInMessagesAreShortAndPrintable) {
  const TemporaryFolder folder;
  const std::string name = "a\\u0000b\\u001b[2J" + std::string(1'000'000, 'n');
  const fs::path path = folder.add("m", file_bytes("{\"" + name + "\":null}", ""));
  const std::string message = error_of([&] { const SafetensorsFile file(path); });
  EXPECT_NE(message.find(R"(tensor "a\x00b\x1b[2Jnnn)"), std::string::npos) << message;
  EXPECT_NE(message.find("null"), std::string::npos) << message;
  EXPECT_LT(message.size(), 1000 + path.string().size());
}

TEST(SafetensorsFile, RefusesWhatIsNoRegularFile) {
  const TemporaryFolder folder;
  const fs::path missing = folder.path() / "missing";
  EXPECT_NE(error_of([&] { const SafetensorsFile file(missing); }).find(missing.string()),
            std::string::npos);
  EXPECT_NE(error_of([&] { const SafetensorsFile file(folder.path()); }).find("regular file"),
            std::string::npos);
  const fs::path fifo = folder.path() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { const SafetensorsFile file(fifo); }).find("regular file"),
            std::string::npos);
}

// ----------------------------------------------------------------------------- odd but valid files

TEST(SafetensorsFile, ListsTensorsByOffsetWhateverTheOrderOfTheHeader) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      folder.add("m", file_bytes(R"({"z":{"dtype":"U8","shape":[3],"data_offsets":[6,9]},)"
                                 R"("__metadata__":{"format":"pt","empty":""},)"
                                 R"("a":{"data_offsets":[2,6],"shape":[1,4],"dtype":"I8"},)"
                                 R"("m":{"shape":[2],"dtype":"BOOL","data_offsets":[0,2]}})",
                                 "mmaaaazzz")));
  ASSERT_EQ(file.tensors().size(), 3U);
  EXPECT_EQ(file.tensors()[0].name, "m");
  EXPECT_EQ(file.tensors()[1].name, "a");
  EXPECT_EQ(file.tensors()[2].name, "z");
  EXPECT_EQ(data_of(file.at("m")), "mm");
  EXPECT_EQ(data_of(file.at("a")), "aaaa");
  EXPECT_EQ(data_of(file.at("z")), "zzz");
  EXPECT_EQ(file.at("a").dtype, Dtype::i8);
  EXPECT_EQ(file.at("a").shape, (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"empty", ""}}));
}

TEST(SafetensorsFile, ReadsMisalignedData) {
  std::string header = R"({"t":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}})";
  while (header.size() % 8 != 2) header += ' ';
  const double values[] = {0.1, -3e300};
  std::string data(sizeof(values), '\0');
  std::memcpy(data.data(), values, sizeof(values));

  const TemporaryFolder folder;
  const SafetensorsFile file(folder.add("m", file_bytes(header, data)));
  const TensorView& tensor = file.at("t");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % 8, 2U);
  double read[2] = {};
  ASSERT_EQ(tensor.bytes, sizeof(read));
  std::memcpy(read, tensor.data, sizeof(read));
  EXPECT_EQ(read[0], values[0]);
  EXPECT_EQ(read[1], values[1]);
}

TEST(SafetensorsFile, AcceptsEmptyTensorsAtAnyBoundary) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      folder.add("m", file_bytes(R"({"end":{"dtype":"F32","shape":[2,0],"data_offsets":[4,4]},)"
                                 R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},)"
                                 R"("middle":{"dtype":"I64","shape":[0],"data_offsets":[2,2]},)"
                                 R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                                 R"("first":{"dtype":"F16","shape":[0,5],"data_offsets":[0,0]},)"
                                 R"("second":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}})",
                                 "aabb")));
  std::string names;
  for (const TensorView& tensor : file.tensors()) names += tensor.name + " ";
  EXPECT_EQ(names, "first second a middle b end ");
  for (const char* name : {"first", "second", "middle", "end"}) {
    EXPECT_EQ(file.at(name).bytes, 0U);
    EXPECT_NE(file.at(name).data, nullptr);
  }
  EXPECT_EQ(file.at("first").shape, (std::vector<std::int64_t>{0, 5}));
  EXPECT_EQ(data_of(file.at("a")), "aa");
  EXPECT_EQ(data_of(file.at("b")), "bb");
}

TEST(SafetensorsFile, AcceptsOnlyEmptyTensorsAndNoData) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      folder.add("m", file_bytes(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                                 R"("b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
                                 "")));
  EXPECT_EQ(file.tensors().size(), 2U);
  EXPECT_EQ(file.at("a").bytes + file.at("b").bytes, 0U);
}

TEST(SafetensorsFile, AcceptsAFileWithoutTensors) {
  const TemporaryFolder folder;
  const SafetensorsFile empty(folder.add("m", file_bytes("{}", "")));
  EXPECT_TRUE(empty.tensors().empty());
  EXPECT_TRUE(empty.metadata().empty());
  EXPECT_EQ(empty.find(""), nullptr);
}

TEST(SafetensorsFile, AcceptsScalarsPaddingAndWhitespace) {
  const TemporaryFolder folder;
  const SafetensorsFile file(folder.add(
      "m",
      file_bytes("{ \"t\" :\n\t{\"dtype\":\"U16\", \"shape\":[ ], \"data_offsets\":[0 ,2]}\r\n} "
                 "                         ",
                 "xy")));
  EXPECT_TRUE(file.at("t").shape.empty());
  EXPECT_EQ(data_of(file.at("t")), "xy");
}

TEST(SafetensorsFile, PaddingCostsNoMemory) {
  const TemporaryFolder folder;
  const std::uint64_t length = std::uint64_t{32} << 20U;
  std::string header = "{}";
  header.resize(length, ' ');
  const fs::path path = folder.add("m", file_bytes(header, ""));
  // The mapping itself takes the length once.
  const AllocationGuard guard(length + (std::uint64_t{8} << 20U));
  const SafetensorsFile file(path);
  EXPECT_TRUE(file.tensors().empty());
}

TEST(SafetensorsFile, ReadsEscapedAndUnusualNames) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      folder.add("m", file_bytes(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                 R"("\u00fc\n\"":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                                 R"("dtype":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                                 "xyz")));
  EXPECT_EQ(data_of(file.at("")), "x");
  EXPECT_EQ(data_of(file.at("\xC3\xBC\n\"")), "y");
  EXPECT_EQ(data_of(file.at("dtype")), "z");
}

TEST(SafetensorsFile, KnowsEveryElementType) {
  const std::vector<std::pair<std::string, std::size_t>> types = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8}};
  const TemporaryFolder folder;
  for (const auto& [name, size] : types) {
    SCOPED_TRACE(name);
    const SafetensorsFile file(folder.add(
        name, file_bytes(R"({"t":{"dtype":")" + name + R"(","shape":[3],"data_offsets":[0,)" +
                             std::to_string(3 * size) + "]}}",
                         std::string(3 * size, 'x'))));
    EXPECT_EQ(vha::checkpoint::dtype_name(file.at("t").dtype), name);
    EXPECT_EQ(vha::checkpoint::dtype_size(file.at("t").dtype), size);
  }
  EXPECT_EQ(vha::checkpoint::parse_dtype("BF16"), Dtype::bf16);
  EXPECT_EQ(vha::checkpoint::parse_dtype("F8_E4M3"), Dtype::f8_e4m3);
  EXPECT_EQ(vha::checkpoint::parse_dtype("F64"), Dtype::f64);
  EXPECT_EQ(vha::checkpoint::parse_dtype("F"), std::nullopt);
}

TEST(SafetensorsFile, FindsByNameAndNamesWhatIsMissing) {
  std::string header = "{";
  std::string data;
  for (int i = 0; i < 100; ++i) {
    header += vha::text(i == 0 ? "" : ",", "\"t", i, R"(":{"dtype":"U8","shape":[1],)",
                        R"("data_offsets":[)", i, ",", i + 1, "]}");
    data += static_cast<char>(i);
  }
  const TemporaryFolder folder;
  const fs::path path = folder.add("m", file_bytes(header + "}", data));
  const SafetensorsFile file(path);
  EXPECT_EQ(file.path(), path);
  for (int i = 0; i < 100; ++i) {
    const TensorView* const tensor = file.find("t" + std::to_string(i));
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(data_of(*tensor), std::string(1, static_cast<char>(i)));
  }
  for (const char* absent : {"", "t", "t00", "t100", "u", "__metadata__"}) {
    EXPECT_EQ(file.find(absent), nullptr) << absent;
  }
  const std::string message = error_of([&] { file.at("absent"); });
  EXPECT_NE(message.find(path.string()), std::string::npos) << message;
  EXPECT_NE(message.find("\"absent\""), std::string::npos) << message;
}

TEST(SafetensorsFile, ViewsSurviveMoves) {
  const TemporaryFolder folder;
  const auto bytes_with = [](const std::string& value) {
    return file_bytes(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", value);
  };
  SafetensorsFile first(folder.add("first", bytes_with("1111")));
  const TensorView& tensor = first.at("t");
  SafetensorsFile second(std::move(first));
  EXPECT_EQ(&second.at("t"), &tensor);
  EXPECT_EQ(data_of(tensor), "1111");

  SafetensorsFile third(folder.add("third", bytes_with("3333")));
  third = std::move(second);
  EXPECT_EQ(&third.at("t"), &tensor);
  EXPECT_EQ(data_of(tensor), "1111");
  EXPECT_EQ(third.path().filename(), "first");

  std::vector<SafetensorsFile> files;
  files.push_back(std::move(third));
  files.emplace_back(folder.path() / "third");
  EXPECT_EQ(data_of(files[0].at("t")), "1111");
  EXPECT_EQ(data_of(files[1].at("t")), "3333");
}

// ----------------------------------------------------------------------------------------- writer

TEST(WriteSafetensors, WritesTheseBytes) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "m.safetensors";
  write_safetensors(
      path, std::vector{view("b", Dtype::u8, {1, 3}, "bbb"), view("a", Dtype::bf16, {}, "aa")},
      {{"format", "pt"}, {"a", "\""}});
  std::string header = R"({"__metadata__":{"a":"\"","format":"pt"},)"
                       R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},)"
                       R"("b":{"dtype":"U8","shape":[1,3],"data_offsets":[2,5]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(read_all(path), file_bytes(header, "aabbb"));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"m.safetensors"});
}

TEST(WriteSafetensors, RoundTrips) {
  const TemporaryFolder folder;
  // Every length of name, so that every amount of padding occurs.
  for (std::size_t extra = 0; extra < 8; ++extra) {
    const std::string odd = "\xC3\xBC\"\\\n" + std::string(1, '\0') + std::string(extra, 'n');
    const std::vector<TensorView> tensors = {
        view("wide", Dtype::f64, {1, 2}, "0123456789abcdef"), view(odd, Dtype::f32, {1}, "wxyz"),
        view("empty", Dtype::f32, {3, 0, 2}, {}), view("", Dtype::i16, {}, "ij"),
        view("flags", Dtype::boolean, {3}, std::string_view("\0\1\0", 3))};
    const Metadata metadata = {{"format", "pt"}, {odd, odd}, {"", ""}};
    const fs::path path = folder.path() / "m";
    write_safetensors(path, tensors, metadata);

    const SafetensorsFile file(path);
    const std::string header = header_of(read_all(path));
    EXPECT_EQ(header.size() % 8, 0U);
    EXPECT_LT(header.size() - header.find_last_of('}') - 1, 8U) << header;
    EXPECT_EQ(file.metadata(), metadata);
    ASSERT_EQ(file.tensors().size(), tensors.size());
    for (const TensorView& tensor : tensors) {
      SCOPED_TRACE(tensor.name);
      const TensorView& read = file.at(tensor.name);
      EXPECT_EQ(read.dtype, tensor.dtype);
      EXPECT_EQ(read.shape, tensor.shape);
      EXPECT_EQ(data_of(read), data_of(tensor));
    }
    // What was read is written back as it was.
    const fs::path copy = folder.path() / "copy";
    write_safetensors(copy, file.tensors(), file.metadata());
    EXPECT_EQ(data_of(SafetensorsFile(copy).at(odd)), "wxyz");
    EXPECT_EQ(SafetensorsFile(copy).metadata(), metadata);
  }
}

TEST(WriteSafetensors, AlignsEveryTensorForItsType) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "m";
  write_safetensors(
      path, std::vector{view("a", Dtype::u8, {3}, "aaa"), view("b", Dtype::f32, {1}, "bbbb"),
                        view("c", Dtype::bf16, {1}, "cc"), view("d", Dtype::f64, {1}, "dddddddd"),
                        view("e", Dtype::i32, {1}, "eeee")});
  const SafetensorsFile file(path);
  std::string names;
  for (const TensorView& tensor : file.tensors()) {
    names += tensor.name;
    const std::size_t size = vha::checkpoint::dtype_size(tensor.dtype);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % size, 0U) << tensor.name;
    EXPECT_EQ(data_of(tensor), std::string(tensor.bytes, tensor.name[0]));
  }
  EXPECT_EQ(names, "dbeca");
}

TEST(WriteSafetensors, WritesNoTensorsAtAll) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "m";
  write_safetensors(path, {});
  EXPECT_EQ(read_all(path), file_bytes("{}      ", ""));
  write_safetensors(path, {}, {{"k", "v"}});
  EXPECT_EQ(SafetensorsFile(path).metadata(), (Metadata{{"k", "v"}}));
}

TEST(WriteSafetensors, ReplacesAFileThatItReadsFrom) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "m";
  write_safetensors(path, std::vector{view("t", Dtype::u8, {4}, "1111")});
  const SafetensorsFile old(path);
  write_safetensors(path, std::vector{old.at("t"), view("u", Dtype::u8, {4}, "2222")});
  EXPECT_EQ(data_of(old.at("t")), "1111");
  EXPECT_EQ(old.find("u"), nullptr);
  const SafetensorsFile now(path);
  EXPECT_EQ(data_of(now.at("t")), "1111");
  EXPECT_EQ(data_of(now.at("u")), "2222");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"m"});
}

TEST(WriteSafetensors, GivesTheFileTheModeOfTheUmask) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "m";
  const ::mode_t old = ::umask(0027);
  write_safetensors(path, {});
  ::umask(old);
  struct stat status = {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0640U);
}

TEST(WriteSafetensors, GetsPastATemporaryFileLeftByAKilledProcess) {
  const TemporaryFolder folder;
  // Whatever number this process has come to, one of these is the next that it takes.
  std::vector<std::string> names = {"m"};
  for (int i = 0; i < 200; ++i) {
    names.push_back(".vha-" + std::to_string(::getpid()) + "-" + std::to_string(i) + ".tmp");
    folder.add(names.back(), "left");
  }
  std::sort(names.begin(), names.end());
  write_safetensors(folder.path() / "m", std::vector{view("t", Dtype::u8, {4}, "1111")});
  EXPECT_EQ(data_of(SafetensorsFile(folder.path() / "m").at("t")), "1111");
  EXPECT_EQ(folder.names(), names);
  for (const std::string& name : names) {
    EXPECT_EQ(read_all(folder.path() / name) == "left", name != "m") << name;
  }
}

TEST(WriteSafetensors, WritesANameOfTheGreatestLength) {
  const TemporaryFolder folder;
  const std::string name(255, 'm');
  write_safetensors(folder.path() / name, {});
  EXPECT_EQ(folder.names(), std::vector<std::string>{name});
}

TEST(WriteSafetensors, RefusesBadTensorsAndLeavesTheEarlierFile) {
  struct Bad {
    std::string says;
    std::vector<TensorView> tensors;
    Metadata metadata;
  };
  const std::string not_utf8 = "\xC3\x28";
  TensorView null_data = view("t", Dtype::u8, {4}, "1111");
  null_data.data = nullptr;
  const std::vector<Bad> table = {
      {"tensor \"t\": expected a name of its own, got two",
       {view("t", Dtype::u8, {1}, "1"), view("s", Dtype::u8, {1}, "1"),
        view("t", Dtype::f32, {1}, "1111")},
       {}},
      {"tensor \"__metadata__\": expected a name of its own, got a reserved one",
       {view("__metadata__", Dtype::u8, {1}, "1")},
       {}},
      {"tensor \"t\": expected 8 bytes for F32 [2], got 7",
       {view("t", Dtype::f32, {2}, "1234567")},
       {}},
      {"tensor \"t\": expected 8 bytes for F32 [2], got 9",
       {view("t", Dtype::f32, {2}, "123456789")},
       {}},
      {"U8 [-2, -2]", {view("t", Dtype::u8, {-2, -2}, "1111")}, {}},
      {"U8 [4294967296, 4294967296]", {view("t", Dtype::u8, {4294967296, 4294967296}, {})}, {}},
      {"tensor \"t\": expected data, got a null pointer", {null_data}, {}},
      {"expected valid UTF-8", {view(not_utf8, Dtype::u8, {1}, "1")}, {}},
      {"__metadata__: expected valid UTF-8", {}, {{"k", not_utf8}}},
      {"__metadata__: expected valid UTF-8", {}, {{not_utf8, "v"}}},
  };
  const TemporaryFolder folder;
  const fs::path path = folder.add("m", "earlier");
  for (const Bad& bad : table) {
    SCOPED_TRACE(bad.says);
    const std::string message =
        error_of([&] { write_safetensors(path, bad.tensors, bad.metadata); });
    EXPECT_EQ(message.find(path.string() + ": "), 0U) << message;
    EXPECT_NE(message.find(bad.says), std::string::npos) << message;
    EXPECT_EQ(read_all(path), "earlier");
    EXPECT_EQ(folder.names(), std::vector<std::string>{"m"});
  }
}

TEST(WriteSafetensors, FailsMidwayWithoutATrace) {
  const TemporaryFolder folder;
  const fs::path path = folder.add("m", "earlier");
  const std::string data(1 << 16, 'x');
  const std::vector<TensorView> tensors = {view("t", Dtype::u8, {1 << 16}, data)};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  std::string message;
  {
    const LimitGuard limit(RLIMIT_FSIZE, 20'000);
    message = error_of([&] { write_safetensors(path, tensors); });
  }
  std::signal(SIGXFSZ, old_handler);
  EXPECT_NE(message.find(path.string()), std::string::npos) << message;
  EXPECT_EQ(read_all(path), "earlier");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"m"});

  write_safetensors(path, tensors);  // a rerun succeeds
  EXPECT_EQ(data_of(SafetensorsFile(path).at("t")), data);
}

TEST(WriteSafetensors, FailsInAFolderThatCannotBeWritten) {
  const TemporaryFolder folder;
  const fs::path path = folder.add("m", "earlier");
  const uid_t user = ::geteuid();
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  // Permissions do not bind root, so be somebody else for a moment.
  if (user == 0) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string message = error_of([&] { write_safetensors(path, {}); });
  ASSERT_EQ(::seteuid(user), 0);
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  EXPECT_NE(message.find(path.string()), std::string::npos) << message;
  EXPECT_EQ(read_all(path), "earlier");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"m"});
}

TEST(WriteSafetensors, FailsWhereNoFileCanStand) {
  const TemporaryFolder folder;
  const fs::path absent = folder.path() / "absent" / "m";
  EXPECT_NE(error_of([&] { write_safetensors(absent, {}); }).find(absent.string()),
            std::string::npos);
  // A folder under the target's name lets the whole file be written and then refuses the rename.
  const fs::path taken = folder.path() / "taken";
  ASSERT_TRUE(fs::create_directory(taken));
  EXPECT_NE(error_of([&] { write_safetensors(taken, {}); }).find(taken.string()),
            std::string::npos);
  EXPECT_NE(error_of([&] { write_safetensors("", {}); }).find("path"), std::string::npos);
  EXPECT_NE(error_of([&] { write_safetensors(folder.path() / "", {}); }).find("path"),
            std::string::npos);
  // Nor takes a device's or a pipe's place.
  const fs::path pipe = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { write_safetensors(pipe, {}); }).find("regular file"), std::string::npos);
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"pipe", "taken"}));
}

TEST(WriteSafetensors, WritesBesideABareName) {
  const TemporaryFolder folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  write_safetensors("m", std::vector{view("t", Dtype::u8, {1}, "1")});
  fs::current_path(before);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"m"});
  EXPECT_EQ(data_of(SafetensorsFile(folder.path() / "m").at("t")), "1");
}

}  // namespace
