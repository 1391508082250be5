// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vha/attention/kv_cache.hpp>
#include <vha/cost/bytes.hpp>
#include <vha/cost/flops.hpp>
#include <vha/cost/layer_sizes.hpp>

// The figures are the paper's, of a layer of the 1.7B model; model_cost_test.cpp has whole models'.

namespace {

using vha::Index;
using vha::LayerForm;
using vha::LayerSizes;

constexpr LayerSizes vha_1_7b = {
    .hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .postmix_rank = 4};
constexpr LayerSizes gqa_8 = {.hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 8};

// Cache per token and layer, in bf16.
static_assert(vha::cache_bytes_per_token(vha_1_7b, 2) == 1024);
static_assert(vha::cache_bytes_per_token(gqa_8, 2) == 4096);
static_assert(vha::cache_bytes_per_token(LayerSizes{.head_dim = 128, .kv_heads = 1}, 2) == 512);

// The query projection grows from 2,129,920 to 4,194,304 weights.
constexpr Index other_weights = 2 * 2048 * 256 + 2048 * 2048;
static_assert(vha::weight_count(vha_1_7b, LayerForm::unfolded_premix) == 2129920 + other_weights);
static_assert(vha::weight_count(vha_1_7b, LayerForm::folded) == 4194304 + other_weights);
static_assert(vha::weight_count(vha_1_7b, LayerForm::unfolded) ==
              2129920 + other_weights + 2 * 16 * 4);

// Pairs: all before, a window, and both forms of a window that the cached tokens have reached.
static_assert(vha::visible_pairs(4) == 10);
static_assert(vha::visible_pairs(1, 4096) == 4097);
static_assert(vha::visible_pairs(4, 0, 2) == 1 + 2 + 2 + 2);
static_assert(vha::visible_pairs(2, 5, 3) == 6);
static_assert(vha::visible_pairs(4, 2, 4) == 3 + 4 + 4 + 4);
static_assert(vha::visible_pairs(0) == 0);

constexpr auto prefill = vha::prefill_flops(vha_1_7b, LayerForm::unfolded, 2048);
static_assert(prefill.query == Index(2) * 2048 * 2048 * 1024);
static_assert(prefill.premix == Index(2) * 2048 * 16 * 128 * 128);
static_assert(prefill.postmix == Index(2) * 2048 * 2 * 16 * 4 * 128);
static_assert(prefill.core == Index(4) * 16 * 128 * (2048 * 2049 / 2));
static_assert(prefill.total() == prefill.query + prefill.premix + prefill.key_value + prefill.core +
                                     prefill.postmix + prefill.output);
static_assert(vha::decode_flops(vha_1_7b, LayerForm::folded, 4096).core ==
              Index(4) * 16 * 128 * 4097);

// A layer costs the same whether its tokens come at once or in chunks.
static_assert(vha::layer_flops(vha_1_7b, LayerForm::folded, 100).total() ==
              vha::layer_flops(vha_1_7b, LayerForm::folded, 60).total() +
                  vha::layer_flops(vha_1_7b, LayerForm::folded, 40, 60).total());

static_assert(vha::fold_flops(vha_1_7b) ==
              Index(2) * 2048 * 2048 * 128 + Index(2) * 2048 * 2048 * 16);

// 2·h·(Hv - H')·d saved against 2·Hv·d·d spent. With one group there is nothing to save.
static_assert(vha::unfolded_prefill_is_cheaper(vha_1_7b));
static_assert(!vha::unfolded_prefill_is_cheaper(
    {.hidden = 2048, .head_dim = 128, .query_heads = 8, .kv_heads = 1}));
static_assert(!vha::unfolded_prefill_is_cheaper(
    {.hidden = 64, .head_dim = 128, .query_heads = 16, .kv_heads = 2}));

static_assert(vha::decode_bytes(vha_1_7b, LayerForm::folded, 4096, 2, 2).cache == 4096 * 1024);
static_assert(vha::decode_bytes(vha_1_7b, LayerForm::folded, 4096, 4, 2, 4).cache ==
              Index(4) * 4096 * 1024);
static_assert(vha::decode_bytes(vha_1_7b, LayerForm::folded, 4096, 4, 2, 4).weights ==
              4 * vha::weight_count(vha_1_7b, LayerForm::folded));
static_assert(vha::head_bytes(vha_1_7b, 3, 4) == 3 * 16 * 128 * 4);
static_assert(vha::full_pairs(4) == 16 && vha::full_pairs(2, 5) == 14);
constexpr LayerSizes windowed = {.head_dim = 128, .query_heads = 16, .kv_heads = 2, .window = 10};
static_assert(vha::decode_bytes(windowed, LayerForm::folded, 4096, 2, 2).cache == 9 * 1024);

TEST(Cost, PairsAreThoseOfTheMask) {
  for (const Index cached : {0, 1, 5, 9}) {
    for (const Index tokens : {0, 1, 4, 11}) {
      for (const Index window : {0, 1, 3, 8, 30}) {
        Index pairs = 0;
        for (Index query = cached; query < cached + tokens; ++query) {
          pairs += window == 0 ? query + 1 : std::min(query + 1, window);
        }
        EXPECT_EQ(vha::visible_pairs(tokens, cached, window), pairs)
            << tokens << " tokens behind " << cached << ", window " << window;
      }
    }
  }
}

TEST(Cost, SizesComeFromTheConfiguration) {
  const vha::AttentionConfig config{
      .hidden = 64, .head_dim = 8, .query_heads = 6, .kv_heads = 3, .window = 5};
  const auto sizes = LayerSizes::of(config, 2);
  EXPECT_EQ(sizes.query_width(), config.query_width());
  EXPECT_EQ(sizes.kv_width(), config.kv_width());
  EXPECT_EQ(sizes.physical_width(), 16);
  EXPECT_EQ(sizes.window, 5);
  EXPECT_EQ(sizes.postmix_rank, 2);
  EXPECT_EQ(vha::cache_bytes_per_token(sizes, sizeof(vha::half)),
            vha::KvCache<vha::half>(config, 1, 1).bytes_per_token());
}

}  // namespace
