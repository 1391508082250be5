// SPDX-License-Identifier: Apache-2.0
// Layers split over ranks of MPI are the layers. Each rank runs all tests; those that this many ranks do
// not split are left out. tests/laws/parallel_test.cpp has other numbers of ranks, as threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>
#include <vha/parallel/mpi_communicator.hpp>

#include "error_of.hpp"
#include "parallel_checks.hpp"

namespace parallel {
namespace {

using support::error_of;
using vha::MpiCommunicator;

TEST(Mpi, SplitLayersAreTheLayers) {
  MpiCommunicator ranks;
  int checked = 0;
  for (const LayerShape& shape : shapes) {
    if (!fits(shape, ranks.size())) continue;
    SCOPED_TRACE(shape.name);
    check_shape(shape, ranks);
    ++checked;
  }
  EXPECT_GE(checked, 1);
}

TEST(Mpi, RanksOfAPartOfAllSplitALayerAmongThemselves) {
  MpiCommunicator all;
  MPI_Comm part = MPI_COMM_NULL;
  const auto color = static_cast<int>(all.rank() % 2);
  ASSERT_EQ(MPI_Comm_split(MPI_COMM_WORLD, color, static_cast<int>(all.rank()), &part),
            MPI_SUCCESS);
  {
    MpiCommunicator ranks(part);
    EXPECT_EQ(ranks.size(), (all.size() + 1 - color) / 2);
    EXPECT_EQ(ranks.rank(), all.rank() / 2);
    check_shape(shapes[0], ranks);
  }
  MPI_Comm_free(&part);
}

TEST(Mpi, TheReadmesExample) {
  const auto layer =
      vha::initialise_vha<float>({.hidden = 8, .head_dim = 4, .query_heads = 8, .kv_heads = 2});
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Ones(3, 8);
  const Index batch = 1, capacity = 3;
  vha::MpiCommunicator ranks;                                    // of MPI_COMM_WORLD
  const vha::ParallelAttention part(layer, ranks);               // this rank's heads, in place
  vha::KvCache<float> kv_cache(part.config(), batch, capacity);  // of its K/V heads
  const auto y = part.forward(x, kv_cache);                      // whole, on every rank
  EXPECT_LE(vha::compare_outputs(layer.forward(x), y).largest_difference, 1e-6);
}

template <class T>
void check_sums(MPI_Datatype type) {
  MpiCommunicator ranks;
  laws::Random random(static_cast<unsigned>(ranks.rank()) + 1);
  for (const std::size_t size : {0, 1, 7, 4096, 100001}) {
    std::vector<T> mine(size);
    for (T& value : mine) value = static_cast<T>(random());
    std::vector<T> sums = mine, again = mine;
    ranks.sum(std::span<T>(sums));
    ranks.sum(std::span<T>(again));
    EXPECT_EQ(again, sums) << "rank " << ranks.rank() << ", " << size << " values";
    std::vector<T> of_rank_0 = sums;
    MPI_Bcast(of_rank_0.data(), static_cast<int>(size), type, 0, ranks.mpi());
    EXPECT_EQ(sums, of_rank_0) << "rank " << ranks.rank() << ", " << size << " values";
    std::vector<T> gathered(size * static_cast<std::size_t>(ranks.size()));
    MPI_Allgather(mine.data(), static_cast<int>(size), type, gathered.data(),
                  static_cast<int>(size), type, ranks.mpi());
    for (std::size_t k = 0; k < size; ++k) {
      double expected = 0;
      for (std::size_t at = k; at < gathered.size(); at += size) {
        expected += static_cast<double>(gathered[at]);
      }
      ASSERT_NEAR(static_cast<double>(sums[k]), expected,
                  static_cast<double>(ranks.size()) * (sizeof(T) == 4 ? 1e-6 : 1e-15));
    }
  }
}

TEST(Mpi, SumsAreTheSameBitsOnEveryRankAndEveryTime) {
  check_sums<float>(MPI_FLOAT);
  check_sums<double>(MPI_DOUBLE);
}

TEST(Mpi, NoCommunicatorIsRefused) {
  EXPECT_EQ(error_of([] { const MpiCommunicator ranks(MPI_COMM_NULL); }),
            "ranks: expected a communicator of MPI, got MPI_COMM_NULL");
}

TEST(Mpi, ASecondSessionIsRefused) {
  EXPECT_EQ(error_of([] { const vha::MpiSession session; }),
            "MpiSession: expected MPI not yet started, got MPI started before");
}

/// Rank 0 prints as usual; the others what failed, and nothing else.
class FailurePrinter : public testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(vha::Index rank) : rank_(rank) {}
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) std::fprintf(stderr, "rank %td: %s\n", rank_, result.summary());
  }

 private:
  vha::Index rank_;
};

}  // namespace
}  // namespace parallel

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const vha::MpiSession session;
  const vha::Index rank = vha::MpiCommunicator().rank();
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new parallel::FailurePrinter(rank));
  }
  return RUN_ALL_TESTS();
}
