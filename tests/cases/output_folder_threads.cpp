// SPDX-License-Identifier: Apache-2.0
// Tensors written by several threads: the same files, and nothing of one that failed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>
#include <vha/checkpoint/output_folder.hpp>

#include "temporary_folder.hpp"
#include "tensor_bytes.hpp"

namespace {

using support::TemporaryFolder;
using vha::checkpoint::ByteSink;
using vha::checkpoint::Dtype;
using vha::checkpoint::OutputFolder;
using vha::checkpoint::StreamedTensor;

constexpr std::uint64_t max_shard_bytes = 1'000'000;

/// Sizes from none to more than a page cache's page, given in pieces of no round size.
std::vector<StreamedTensor> tensors() {
  std::vector<StreamedTensor> tensors;
  for (std::size_t i = 0; i < 16; ++i) {
    const std::string name(1, static_cast<char>('a' + i));
    const std::size_t size = i * 40'001;
    tensors.push_back(
        {name, Dtype::u8, {static_cast<std::int64_t>(size)}, [name, size](const ByteSink& sink) {
           const std::string piece(777, name[0]);
           for (std::size_t left = size; left > 0;) {
             const std::size_t now = std::min(left, piece.size());
             sink(reinterpret_cast<const std::byte*>(piece.data()), now);
             left -= now;
           }
         }});
  }
  return tensors;
}

std::map<std::string, std::string> contents(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const std::string& name : support::names_in(folder)) {
    files[name] = support::read_all(folder / name);
  }
  return files;
}

TEST(OutputFolder, IsTheSameForAnyNumberOfThreads) {
  const TemporaryFolder folder;
  OutputFolder alone(folder / "alone", false);
  alone.write_tensors(tensors(), {}, max_shard_bytes);
  const auto expected = contents(alone.path());
  ASSERT_GT(expected.size(), 3U);
  Eigen::ThreadPool pool(3);
  const Eigen::ThreadPoolDevice device(&pool, 4);
  for (int run = 0; run < 10; ++run) {
    OutputFolder together(folder / "together", false);
    together.write_tensors(tensors(), {}, max_shard_bytes, device);
    EXPECT_EQ(contents(together.path()), expected);
  }
}

TEST(OutputFolder, LeavesNothingWhenATensorThrowsOnAnyThread) {
  const TemporaryFolder folder;
  Eigen::ThreadPool pool(3);
  const Eigen::ThreadPoolDevice device(&pool, 4);
  for (std::size_t failing = 0; failing < 16; failing += 5) {
    auto all = tensors();
    all[failing].write = [](const ByteSink&) { throw std::runtime_error("no more"); };
    const auto write = [&] {
      OutputFolder out(folder / "out", false);
      out.write_tensors(all, {}, max_shard_bytes, device);
    };
    EXPECT_THROW(write(), std::runtime_error);
    EXPECT_TRUE(support::names_in(folder / "").empty());
  }
}

// A tensor that gives more than its size must not write over its neighbour.
TEST(OutputFolder, KeepsEachTensorToItsPlace) {
  const TemporaryFolder folder;
  auto all = tensors();
  all[0].write = [](const ByteSink& sink) {
    const std::string many(1000, 'x');
    sink(reinterpret_cast<const std::byte*>(many.data()), many.size());
  };
  OutputFolder out(folder / "out", false);
  EXPECT_THROW(out.write_tensors(all, {}, max_shard_bytes), vha::Error);
}

}  // namespace
