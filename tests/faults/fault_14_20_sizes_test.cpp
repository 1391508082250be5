// SPDX-License-Identifier: Apache-2.0
// Faults: a head width taken to be hidden / heads; and sizes that a layer cannot have, which crash
// it or are computed with all the same.

#include <cmath>

#include "fault_support.hpp"

namespace faults {
namespace {

TEST(Fault14HeadDim, IsNotHiddenByHeads) {
  const vha::AttentionConfig wide{
      .hidden = 2560, .head_dim = 128, .query_heads = 32, .kv_heads = 8};
  EXPECT_DOUBLE_EQ(wide.softmax_scale(), 1 / std::sqrt(128.0));
  EXPECT_EQ(wide.query_width(), 4096);
  EXPECT_EQ(wide.kv_width(), 1024);
  const vha::KvCache<vha::bfloat16> cache(wide, 1, 3);
  EXPECT_EQ(cache.bytes_per_token() * 32768 * 36, 4831838208);
}

TEST(Fault14HeadDim, OfAFoldedLayer) {
  const auto folded = vha::fold_vha(
      vha::initialise_vha<float>({.hidden = 64, .head_dim = 16, .query_heads = 8, .kv_heads = 2}));
  EXPECT_EQ(folded.weights().query.in(), 64);
  EXPECT_EQ(folded.weights().query.out(), 128);
  EXPECT_EQ(folded.weights().output.in(), 128);
  EXPECT_EQ(folded.weights().output.out(), 64);
  EXPECT_EQ(folded.config().query_heads, 8);
  EXPECT_EQ(folded.config().head_dim, 16);
}

/// The error of every way to a layer of this configuration.
std::string config_error(const vha::AttentionConfig& config) {
  const auto error = error_of([&] { config.validate(); });
  EXPECT_EQ(error_of([&] { vha::initialise_vha<float>(config); }), error);
  EXPECT_EQ(error_of([&] { vha::VhaAttention<double>(config, {}); }), error);
  EXPECT_EQ(error_of([&] { vha::GqaAttention<vha::bfloat16>(config, {}); }), error);
  return error;
}

TEST(Fault20Sizes, OfAConfiguration) {
  const vha::AttentionConfig good{.hidden = 8, .head_dim = 4, .query_heads = 6, .kv_heads = 2};
  const auto with = [&](Index vha::AttentionConfig::*field, Index value) {
    auto config = good;
    config.*field = value;
    return config_error(config);
  };
  using Config = vha::AttentionConfig;
  for (const Index odd : {65, 1, 127}) {
    const auto error = with(&Config::head_dim, odd);
    for (const auto& part :
         {std::string("head_dim"), std::string("must be even"), vha::text("got ", odd)}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
  }
  EXPECT_EQ(with(&Config::query_heads, 7),
            "query_heads: expected a multiple of kv_heads = 2, got 7");
  EXPECT_EQ(with(&Config::query_heads, 1),
            "query_heads: expected a multiple of kv_heads = 2, got 1");
  EXPECT_EQ(with(&Config::kv_heads, 12),
            "query_heads: expected a multiple of kv_heads = 12, got 6");
  for (const Index none : {Index(0), Index(-2), std::numeric_limits<Index>::min()}) {
    const std::string rest = vha::text(": expected 1 or more, got ", none);
    EXPECT_EQ(with(&Config::query_heads, none), "query_heads" + rest);
    EXPECT_EQ(with(&Config::kv_heads, none), "kv_heads" + rest);
    EXPECT_EQ(with(&Config::head_dim, none), "head_dim" + rest);
    EXPECT_EQ(with(&Config::hidden, none), "hidden" + rest);
  }
  EXPECT_NE(with(&Config::hidden, Index(1) << 62).find("hidden * query_heads * head_dim"),
            std::string::npos);
}

TEST(Fault20Sizes, OfPremix) {
  const vha::AttentionConfig config{.hidden = 8, .head_dim = 4, .query_heads = 6, .kv_heads = 2};
  Random random(1);
  const auto good = random_layer<vha::VhaAttention<float>>(config, random).weights();
  const auto error = [&](std::vector<Weight<float>> maps) {
    auto w = good;
    w.premix.maps = std::move(maps);
    return error_of([&] { vha::VhaAttention<float>(config, w); });
  };
  const auto map = [](Index rows, Index cols) {
    return Weight<float>(Eigen::MatrixXf::Ones(rows, cols));
  };
  EXPECT_EQ(error({map(4, 4), map(4, 4)}), "no vha::Error");
  EXPECT_EQ(error({map(4, 5), map(4, 5)}), "premix.maps[0]: expected [4, 4], got [4, 5]");
  EXPECT_EQ(error({map(4, 4), map(4, 5)}), "premix.maps[1]: expected [4, 4], got [4, 5]");
  EXPECT_EQ(error({map(4, 4), map(5, 4)}), "premix.maps[1]: expected [4, 4], got [5, 4]");
  EXPECT_EQ(error({map(4, 4), {}}), "premix.maps[1]: expected a matrix, got none");
  for (const std::size_t count : {0U, 1U, 3U, 6U}) {
    EXPECT_EQ(
        error({count, map(4, 4)}),
        vha::text("premix.maps.size() (one map for each of kv_heads): expected 2, got ", count));
  }
  // A map of another height is a rectangular Premix, for which the query projection is too wide.
  EXPECT_EQ(error({map(5, 4), map(5, 4)}), "query.weight: expected [8, 15], got [8, 12]");
  EXPECT_EQ(error_of([&] {
              vha::fold_premix<float>(good.query, vha::Premix<float>{{map(5, 4), map(5, 4)}});
            }),
            "query.weight: expected a positive multiple of 5 (Premix's input width) columns, got "
            "[8, 12]");
}

TEST(Fault20Sizes, OfTheCoresOperands) {
  using Heads = vha::Tensor4<float>;
  const auto error = [](const Heads& query, const Heads& key, const Heads& value) {
    return error_of([&] { vha::causal_attention(query, key, value); });
  };
  const auto zeros = [](Index batch, Index tokens, Index heads, Index width) {
    Heads result(batch, tokens, heads, width);
    result.setZero();
    return result;
  };
  EXPECT_EQ(error(zeros(1, 1, 7, 4), zeros(1, 3, 2, 4), zeros(1, 3, 2, 4)),
            "query.dimension(2): expected a positive multiple of kv_heads = 2, got 7");
  EXPECT_EQ(error(zeros(1, 1, 0, 4), zeros(1, 3, 2, 4), zeros(1, 3, 2, 4)),
            "query.dimension(2): expected a positive multiple of kv_heads = 2, got 0");
  EXPECT_EQ(error(zeros(1, 1, 4, 4), zeros(1, 3, 0, 4), zeros(1, 3, 0, 4)),
            "query.dimension(2): expected a positive multiple of kv_heads = 0, got 4");
  EXPECT_EQ(error(zeros(1, 1, 4, 4), zeros(1, 3, 2, 5), zeros(1, 3, 2, 4)),
            "query.dimension(3) (head_dim): expected 5, got 4");
  EXPECT_TRUE(refuses(
      [&] { vha::causal_attention(zeros(1, 1, 4, 0), zeros(1, 3, 2, 0), zeros(1, 3, 2, 4)); },
      {"head_dim", "got 0"}));
}

TEST(Fault20Sizes, NothingGivesNothing) {
  Random random(2);
  const vha::AttentionConfig config{.hidden = 8, .head_dim = 4, .query_heads = 6, .kv_heads = 2};
  const auto layer = random_layer<vha::VhaAttention<float>>(config, random);
  const auto folded = vha::fold_vha(layer);
  const auto expect_empty = [&](const auto& any_layer) {
    const auto matrix_out = any_layer.forward(RowMajorMatrix<float>(0, 8));
    EXPECT_EQ(matrix_out.rows(), 0);
    EXPECT_EQ(matrix_out.cols(), 8);
    for (const auto& [batch, tokens] : {std::pair<Index, Index>{0, 5}, {3, 0}, {0, 0}}) {
      const auto out = any_layer.forward(vha::Tensor3<float>(batch, tokens, Index(8)));
      EXPECT_EQ(out.dimension(0), batch);
      EXPECT_EQ(out.dimension(1), tokens);
      EXPECT_EQ(out.dimension(2), 8);
    }
    // No tokens leave a cache as it was.
    vha::KvCache<float> cache(config, 3, 4);
    vha::Tensor3<float> x(3, 2, 8);
    x.setRandom();
    any_layer.forward(x, cache);
    EXPECT_EQ(any_layer.forward(vha::Tensor3<float>(3, 0, 8), cache).size(), 0);
    for (Index row = 0; row < 3; ++row) EXPECT_EQ(cache.length(row), 2);
  };
  expect_empty(layer);
  expect_empty(folded);
  EXPECT_EQ(vha::causal_attention(vha::Tensor4<float>(0, 2, 6, 4), vha::Tensor4<float>(0, 2, 2, 4),
                                  vha::Tensor4<float>(0, 2, 2, 4))
                .size(),
            0);
  EXPECT_EQ(vha::causal_attention(vha::Tensor4<float>(2, 0, 6, 4), vha::Tensor4<float>(2, 3, 2, 4),
                                  vha::Tensor4<float>(2, 3, 2, 4))
                .size(),
            0);
  EXPECT_EQ(layer.weights().premix(vha::Tensor4<float>(2, 0, 3, 4)).dimension(2), 6);
  EXPECT_EQ(layer.weights().postmix(vha::Tensor4<float>(0, 2, 6, 4)).size(), 0);
  EXPECT_EQ(layer.weights().key(Eigen::MatrixXf(0, 8)).cols(), 8);
}

// A batch of which no row has a token is nothing but padding.
TEST(Fault20Sizes, NothingButPadding) {
  Random random(3);
  const vha::AttentionConfig config{.hidden = 8, .head_dim = 4, .query_heads = 6, .kv_heads = 2};
  const auto layer = random_layer<vha::VhaAttention<float>>(config, random);
  vha::Tensor3<float> x(2, 3, 8);
  x.setConstant(nan_of<float>);
  const std::vector<Index> lengths = {0, 0};
  const auto out = layer.forward(x, {.lengths = lengths});
  EXPECT_TRUE(same_bits(out, std::vector<float>(48, 0.0F)));
}

}  // namespace
}  // namespace faults
