// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vha/attention/kv_cache.hpp>
#include <vha/cost/layer_kinds.hpp>
#include <vha/cost/model_cost.hpp>

// The figures are the paper's: S = 4096, training is 3 forwards, attention counted full.

namespace {

using vha::GvaSizes;
using vha::Index;
using vha::LayerForm;
using vha::LayerSizes;
using vha::MfaSizes;
using vha::MlaSizes;
using vha::MlpSizes;
using vha::ModelSizes;

constexpr MlpSizes mlp_1_7b = {.hidden = 2048, .width = 5504};
constexpr Index hidden = 2048;
constexpr Index tokens = 4096;

constexpr ModelSizes<LayerSizes> gqa_1_7b(Index query_heads, Index kv_heads) {
  return {.layers = 28,
          .attention = {.hidden = hidden,
                        .head_dim = 128,
                        .query_heads = query_heads,
                        .kv_heads = kv_heads},
          .mlp = mlp_1_7b,
          .forms = vha::without_maps};
}

constexpr ModelSizes<LayerSizes> vha_1_7b(vha::LayerForms forms) {
  auto model = gqa_1_7b(16, 2);
  model.attention.postmix_rank = 4;
  model.forms = forms;
  return model;
}

/// Hundredths of a GFLOP, rounded.
constexpr Index hundredths(Index flops) {
  constexpr Index unit = 10'000'000;
  return (flops + (flops < 0 ? -unit : unit) / 2) / unit;
}

// Training: GQA-8, the MHA matched to it, VHA, and their difference at 1.7B.
constexpr Index gqa_8 = vha::training_flops_per_token(gqa_1_7b(16, 8), tokens);
constexpr Index trained = vha::training_flops_per_token(vha_1_7b(vha::folded_to_serve), tokens);
static_assert(hundredths(gqa_8) == 1061);
static_assert(vha::matched_mha_heads(16, 8) == 12 && vha::matched_mha_heads(32, 8) == 20);
static_assert(hundredths(vha::training_flops_per_token(gqa_1_7b(12, 12), tokens)) == 991);
static_assert(vha::weight_count(gqa_1_7b(12, 12), LayerForm::folded) ==
              vha::weight_count(gqa_1_7b(16, 8), LayerForm::folded));
static_assert(hundredths(trained) == 978);
static_assert(hundredths(trained - gqa_8) == -83);

// Its parts: W_Q -0.35, W_K and W_V -0.53, maps +0.047.
constexpr auto gqa_layer =
    vha::layer_flops(gqa_1_7b(16, 8).attention, LayerForm::folded, {.tokens = 1, .pairs = tokens});
constexpr auto vha_layer =
    vha::layer_flops(vha_1_7b({}).attention, LayerForm::unfolded, {.tokens = 1, .pairs = tokens});
static_assert(hundredths(3 * 28 * (vha_layer.query - gqa_layer.query)) == -35);
static_assert(hundredths(3 * 28 * (vha_layer.key_value - gqa_layer.key_value)) == -53);
static_assert(hundredths(10 * 3 * 28 * (vha_layer.premix + vha_layer.postmix)) == 47);
static_assert(vha_layer.core == gqa_layer.core && vha_layer.output == gqa_layer.output);

// The forward of the folded layer against GQA-8: -0.18 of 3.54.
static_assert(hundredths(vha::prefill_flops_per_token(gqa_1_7b(16, 8), tokens)) == 354);
static_assert(hundredths(vha::prefill_flops_per_token(vha_1_7b(vha::folded_to_serve), tokens) -
                         vha::prefill_flops_per_token(gqa_1_7b(16, 8), tokens)) == -18);

// Prefill with Premix apart lacks Postmix's share of the layer as it is trained.
static_assert(vha::prefill_flops_per_token(vha_1_7b(vha::never_folded), tokens) -
                  vha::prefill_flops_per_token(vha_1_7b(vha::premix_apart_in_prefill), tokens) ==
              28 * vha_layer.postmix);
static_assert(3 * vha::prefill_flops_per_token(vha_1_7b(vha::never_folded), tokens) == trained);

// 4B.
constexpr MlpSizes mlp_4b = {.hidden = 2560, .width = 9728};
constexpr ModelSizes<LayerSizes> gqa_4b = {
    .layers = 36,
    .attention = {.hidden = 2560, .head_dim = 128, .query_heads = 32, .kv_heads = 8},
    .mlp = mlp_4b,
    .forms = vha::without_maps};
constexpr ModelSizes<LayerSizes> vha_4b = {.layers = 36,
                                           .attention = {.hidden = 2560,
                                                         .head_dim = 128,
                                                         .query_heads = 32,
                                                         .kv_heads = 2,
                                                         .postmix_rank = 8},
                                           .mlp = mlp_4b,
                                           .forms = vha::folded_to_serve};
static_assert(hundredths(vha::training_flops_per_token(vha_4b, tokens) -
                         vha::training_flops_per_token(gqa_4b, tokens)) == -185);

// One decoded token behind S - 1 cached ones sees the keys that a prefilled one counts.
static_assert(vha::decode_flops_per_token(gqa_1_7b(16, 8), tokens - 1) ==
              vha::prefill_flops_per_token(gqa_1_7b(16, 8), tokens));
// A window bounds what decode sees.
constexpr ModelSizes<LayerSizes> windowed = [] {
  auto model = gqa_1_7b(16, 8);
  model.attention.window = 10;
  return model;
}();
static_assert(vha::decode_flops_per_token(windowed, tokens) ==
              vha::decode_flops_per_token(windowed, 9));

// The query weights in training and in serving, and the parameters of a model.
static_assert(vha::query_weight_count(vha_4b.attention, LayerForm::folded) ==
              Index(2560) * 32 * 128);
static_assert(vha::query_weight_count(vha_1_7b({}).attention, LayerForm::unfolded) == 2129920);
static_assert(vha::query_weight_count(vha_1_7b({}).attention, LayerForm::folded) == 4194304);
static_assert(vha::weight_count(gqa_1_7b(16, 8), LayerForm::folded) ==
              Index(28) * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 5504));

// MLA: its cache, plain and absorbed.
constexpr MlaSizes mla = {.hidden = hidden,
                          .query_heads = 16,
                          .content_dim = 128,
                          .value_dim = 96,
                          .latent_dim = 512,
                          .rope_dim = 64};
static_assert(vha::cache_bytes_per_token(mla, 2) == 1152);
static_assert(vha::cache_bytes_per_token(mla, 4) == 2304);
static_assert(vha::query_weight_count(mla, LayerForm::folded) == hidden * 16 * 192);
static_assert(vha::weight_count(mla, LayerForm::folded) ==
              hidden * 16 * 192 + hidden * 576 + 512 * 16 * 224 + 16 * 96 * hidden);
static_assert(vha::weight_count(mla, LayerForm::folded) ==
              vha::weight_count(mla, LayerForm::unfolded));
static_assert(vha::layer_flops(mla, LayerForm::unfolded, {.tokens = 0, .pairs = 10}).total() ==
              Index(10) * 2 * 16 * (128 + 64 + 96));
static_assert(vha::layer_flops(mla, LayerForm::folded, {.tokens = 0, .pairs = 10}).total() ==
              Index(10) * 2 * 16 * (512 + 64 + 512));
static_assert(vha::layer_flops(mla, LayerForm::folded, {.tokens = 3, .pairs = 0}).total() ==
              3 * 2 * vha::weight_count(mla, LayerForm::folded));

// MFA: a shared factor and a map for each head, or their products.
constexpr MfaSizes mfa = {.hidden = hidden, .query_heads = 16, .head_dim = 256};
static_assert(vha::cache_bytes_per_token(mfa, 2) == 1024);
static_assert(vha::query_weight_count(mfa, LayerForm::unfolded) == hidden * 256 + 16 * 256 * 256);
static_assert(vha::query_weight_count(mfa, LayerForm::folded) == hidden * 16 * 256);
static_assert(vha::weight_count(mfa, LayerForm::folded) ==
              2 * hidden * 16 * 256 + 2 * hidden * 256);
static_assert(vha::layer_flops(mfa, LayerForm::folded, {.tokens = 0, .pairs = 10}).core ==
              Index(10) * 4 * 16 * 256);

// Folded, MFA is an MQA of wide heads.
constexpr LayerSizes wide_mqa = {
    .hidden = hidden, .head_dim = 256, .query_heads = 16, .kv_heads = 1};
static_assert(vha::weight_count(mfa, LayerForm::folded) ==
              vha::weight_count(wide_mqa, LayerForm::folded));
static_assert(vha::layer_flops(mfa, LayerForm::folded, {.tokens = 3, .pairs = 10}).total() ==
              vha::layer_flops(wide_mqa, LayerForm::folded, {.tokens = 3, .pairs = 10}).total());
static_assert(vha::layer_flops(mfa, LayerForm::unfolded, {.tokens = 3, .pairs = 0}).total() ==
              3 * 2 * vha::weight_count(mfa, LayerForm::unfolded));

// GVA: values and one small key, made into keys or absorbed.
constexpr GvaSizes gva = {.hidden = hidden,
                          .query_heads = 16,
                          .value_dim = 128,
                          .content_dim = 112,
                          .kv_heads = 2,
                          .rope_dim = 16};
static_assert(vha::cache_bytes_per_token(gva, 2) == 544);
static_assert(vha::query_weight_count(gva, LayerForm::folded) == hidden * 16 * 128);
static_assert(vha::weight_count(gva, LayerForm::unfolded) ==
              hidden * 16 * 128 + hidden * (256 + 16) + 16 * 128 * 112 + 16 * 128 * hidden);
static_assert(vha::weight_count(gva, LayerForm::folded) ==
              vha::weight_count(gva, LayerForm::unfolded));
static_assert(vha::layer_flops(gva, LayerForm::unfolded, {.tokens = 0, .pairs = 10}).total() ==
              Index(10) * 2 * 16 * (112 + 16 + 128));
static_assert(vha::layer_flops(gva, LayerForm::folded, {.tokens = 0, .pairs = 10}).total() ==
              Index(10) * 2 * 16 * (128 + 16 + 128));
static_assert(vha::layer_flops(gva, LayerForm::folded, {.tokens = 3, .pairs = 0}).total() ==
              3 * 2 * vha::weight_count(gva, LayerForm::folded));

// Its paper's share of the cache of as many groups: 45 to 47 % less, with RoPE keys of 24 and of 16.
constexpr Index saved_percent(Index rope_dim) {
  GvaSizes sizes = gva;
  sizes.rope_dim = rope_dim;
  const Index gqa_2 = vha::cache_bytes_per_token(gqa_1_7b(16, 2).attention, 2);
  return (100 * (gqa_2 - vha::cache_bytes_per_token(sizes, 2)) + gqa_2 / 2) / gqa_2;
}
static_assert(saved_percent(24) == 45 && saved_percent(16) == 47);

// Experts: all are stored, some compute, and a step reads those that its tokens use.
constexpr MlpSizes experts = {.hidden = 8, .width = 5, .experts = 10, .active_experts = 3};
static_assert(vha::weight_count(experts) == 8 * 10 + 10 * 3 * 8 * 5);
static_assert(vha::mlp_flops(experts, 2) == 2 * 2 * (8 * 10 + 3 * 3 * 8 * 5));
static_assert(vha::weights_read(experts, 1) == 8 * 10 + 3 * 3 * 8 * 5);
static_assert(vha::weights_read(experts, 3) == 8 * 10 + 9 * 3 * 8 * 5);
static_assert(vha::weights_read(experts, 4) == vha::weight_count(experts));
static_assert(vha::weight_count(mlp_1_7b) == 3 * 2048 * 5504);
static_assert(vha::weights_read(mlp_1_7b, 7) == vha::weight_count(mlp_1_7b));

TEST(ModelCost, CacheIsTheCachesOfItsLayers) {
  for (const Index kv_heads : {1, 2, 4, 8, 16}) {
    const auto model = gqa_1_7b(16, kv_heads);
    const vha::AttentionConfig config{
        .hidden = hidden, .head_dim = 128, .query_heads = 16, .kv_heads = kv_heads};
    EXPECT_EQ(vha::cache_bytes_per_token(model, 8),
              28 * vha::KvCache<double>(config, 1, 1).bytes_per_token());
    EXPECT_EQ(vha::cache_bytes_per_token(model, 4),
              28 * vha::KvCache<float>(config, 1, 1).bytes_per_token());
    EXPECT_EQ(vha::cache_bytes_per_token(model, 2),
              28 * vha::KvCache<vha::bfloat16>(config, 1, 1).bytes_per_token());
  }
}

}  // namespace
