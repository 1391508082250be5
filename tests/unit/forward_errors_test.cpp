// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>
#include <vha/attention/initialise.hpp>

#include "error_of.hpp"

namespace {

using vha::Index;
using vha::KvCache;
using vha::Position;
using vha::Tensor3;
using vha::TokenLayout;

constexpr vha::AttentionConfig config = {
    .hidden = 12, .head_dim = 4, .query_heads = 4, .kv_heads = 2};

using support::error_of;

Tensor3<float> tokens(Index batch, Index count, Index channels = 12) {
  std::mt19937 bits(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Tensor3<float> x(batch, count, channels);
  std::generate_n(x.data(), x.size(), [&] { return uniform(bits); });
  return x;
}

/// All that a cache holds.
std::vector<float> contents(const KvCache<float>& cache) {
  std::vector<float> all;
  for (Index row = 0; row < cache.batch(); ++row) {
    for (const Position position : cache.positions(row))
      all.push_back(static_cast<float>(position));
    for (const auto& heads : {cache.keys(row), cache.values(row)}) {
      vha::for_each_head(heads, [&](Index, const float* head) {
        all.insert(all.end(), head, head + heads.head_dim);
      });
    }
  }
  return all;
}

class ForwardErrors : public testing::Test {
 protected:
  vha::VhaAttention<float> layer = vha::initialise_vha<float>(config, {.seed = 1});
};

TEST_F(ForwardErrors, ActivationsMustBeAsWideAsTheModel) {
  EXPECT_EQ(error_of([&] { layer.forward(tokens(2, 3, 13)); }),
            "x: expected [batch, tokens, 12], got [2, 3, 13]");
  EXPECT_EQ(error_of([&] { layer.forward(Eigen::MatrixXf(Eigen::MatrixXf::Zero(12, 5))); }),
            "x: expected [batch, tokens, 12], got [1, 12, 5]");
}

TEST_F(ForwardErrors, TheOutputMustHaveTheShapeOfTheInput) {
  vha::VhaAttention<float>::Workspace workspace;
  const auto error = [&](Index batch, Index count, Index channels) {
    Tensor3<float> out(batch, count, channels);
    out.setConstant(77);
    const auto text = error_of([&] { layer.forward_into(tokens(2, 3), out, workspace); });
    const bool untouched =
        std::all_of(out.data(), out.data() + out.size(), [](float value) { return value == 77; });
    EXPECT_EQ(untouched, text != "no vha::Error");
    return text;
  };
  EXPECT_EQ(error(2, 3, 12), "no vha::Error");
  EXPECT_EQ(error(2, 3, 11), "out: expected [2, 3, 12], got [2, 3, 11]");
  EXPECT_EQ(error(2, 4, 12), "out: expected [2, 3, 12], got [2, 4, 12]");
  EXPECT_EQ(error(1, 3, 12), "out: expected [2, 3, 12], got [1, 3, 12]");
}

TEST_F(ForwardErrors, TheLayoutMustFitTheBatch) {
  const std::vector<Index> lengths{3, 2, 1};
  EXPECT_EQ(error_of([&] { layer.forward(tokens(2, 3), TokenLayout{.lengths = lengths}); }),
            "lengths.size() (batch): expected 2, got 3");
  const std::vector<Position> positions{0, 1, 2, 3, -4, 5};
  EXPECT_EQ(error_of([&] { layer.forward(tokens(2, 3), TokenLayout{.positions = positions}); }),
            "positions: expected 0 to 2^31 - 1, got -4");
  EXPECT_EQ(error_of([&] { layer.forward(tokens(2, 2), TokenLayout{.positions = positions}); }),
            "positions.size() (batch * tokens): expected 4, got 6");
}

TEST_F(ForwardErrors, TheCacheMustBeTheLayers) {
  const auto error = [&](const KvCache<float>::Shape& shape) {
    KvCache<float> cache(shape);
    const auto text = error_of([&] { layer.forward(tokens(2, 3), cache); });
    EXPECT_EQ(cache.bytes_used() == 0, text != "no vha::Error");
    return text;
  };
  EXPECT_EQ(error({2, 2, 4, 4, 3}), "no vha::Error");
  EXPECT_EQ(error({2, 1, 4, 4, 3}), "kv_cache.kv_heads: expected 2, got 1");
  EXPECT_EQ(error({2, 2, 6, 4, 3}), "kv_cache.head_dim: expected 4, got 6");
  EXPECT_EQ(error({2, 2, 4, 6, 3}), "kv_cache.value_dim: expected 4, got 6");
  EXPECT_EQ(error({2, 2, 4, 4, 3, true}), "kv_cache.values_in_keys: expected false, got true");
  EXPECT_EQ(error({3, 2, 4, 4, 3}), "kv_cache.batch: expected 2, got 3");
  EXPECT_EQ(error({2, 2, 4, 4, 2}),
            "kv_cache: expected at most 2 tokens (its capacity), got 3 in sequence 0");
}

TEST_F(ForwardErrors, ARefusedCallLeavesTheCacheAsItWas) {
  KvCache<float> cache(config, 2, 5);
  const std::vector<Index> uneven{1, 3};
  layer.forward(tokens(2, 3), cache, {.lengths = uneven});
  const auto before = contents(cache);

  // Only the second sequence has no room; neither may grow.
  EXPECT_EQ(error_of([&] { layer.forward(tokens(2, 3), cache); }),
            "kv_cache: expected at most 5 tokens (its capacity), got 6 in sequence 1");
  EXPECT_THROW(layer.forward(tokens(2, 1, 11), cache), vha::Error);
  EXPECT_THROW(layer.forward(tokens(1, 1), cache), vha::Error);
  const std::vector<Position> positions{0, -1};
  EXPECT_THROW(layer.forward(tokens(2, 1), cache, {.positions = positions}), vha::Error);
  EXPECT_EQ(contents(cache), before);
  EXPECT_EQ(cache.length(0), 1);
  EXPECT_EQ(cache.length(1), 3);

  // Padding needs no room: 4 and 2 real tokens of 4.
  const std::vector<Index> fitting{4, 2};
  EXPECT_NO_THROW(layer.forward(tokens(2, 4), cache, {.lengths = fitting}));
  EXPECT_EQ(cache.length(0), 5);
  EXPECT_EQ(cache.length(1), 5);
}

TEST_F(ForwardErrors, NoTokensAreNoError) {
  EXPECT_EQ(layer.forward(tokens(2, 0)).dimension(1), 0);
  EXPECT_EQ(layer.forward(tokens(0, 3)).dimension(0), 0);
  EXPECT_EQ(layer.forward(Eigen::MatrixXf(0, 12)).rows(), 0);
}

}  // namespace
