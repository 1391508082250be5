// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vha/cost/roofline.hpp>

namespace {

using vha::Index;
using vha::LayerForm;
using vha::LayerSizes;
using vha::MlaSizes;
using vha::ModelSizes;

constexpr LayerSizes layer = {
    .hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .postmix_rank = 4};

// A step's bytes are the layer's, and its FLOPs those of every sequence's token.
constexpr auto step = vha::decode_step(layer, LayerForm::folded, 4096, 3, 4, 2);
static_assert(step.bytes.weights == 4 * vha::weight_count(layer, LayerForm::folded));
static_assert(step.bytes.cache == Index(3) * 4096 * 1024);
static_assert(step.flops == 3 * vha::decode_flops(layer, LayerForm::folded, 4096).total());

// The longer of reading and computing.
constexpr vha::DecodeStep work = {.flops = 600, .bytes = {.weights = 150, .cache = 50}};
static_assert(work.intensity() == 3);
static_assert(vha::roofline_seconds({.bandwidth = 100, .flops = 100}, work) == 6);
static_assert(vha::roofline_seconds({.bandwidth = 10, .flops = 100}, work) == 20);
static_assert(vha::roofline_seconds({.bandwidth = 100, .flops = 300}, work) == 2);  // the ridge

static_assert(vha::roofline_seconds({.flops = 100}, 600, 0) == 6);  // nothing to read

constexpr ModelSizes<LayerSizes> model = {.layers = 28,
                                          .attention = layer,
                                          .mlp = {.hidden = 2048, .width = 5504},
                                          .forms = vha::folded_to_serve};

// Of a model: all layers, attention and MLP.
constexpr auto model_step = vha::decode_step(model, 4096, 3, 2, 4);
static_assert(model_step.flops == 3 * vha::decode_flops_per_token(model, 4096));
static_assert(model_step.bytes.weights == 2 * vha::weight_count(model, LayerForm::folded));
static_assert(model_step.bytes.cache == 3 * 4096 * vha::cache_bytes_per_token(model, 4));

// On either side of the context from which the cache dominates.
constexpr bool cache_dominates(Index cached, Index batch) {
  const auto bytes = vha::decode_step(model, cached, batch, 2, 2).bytes;
  return bytes.cache > bytes.weights;
}
constexpr Index alone = vha::context_where_cache_dominates(model, 1, 2, 2);
constexpr Index batched = vha::context_where_cache_dominates(model, 7, 2, 2);
static_assert(cache_dominates(alone, 1) && !cache_dominates(alone - 1, 1));
static_assert(cache_dominates(batched, 7) && !cache_dominates(batched - 1, 7));

// A batch shares the weights: it computes more with each byte. The latent is read once for all heads.
constexpr MlaSizes mla = {.hidden = 2048,
                          .query_heads = 16,
                          .content_dim = 128,
                          .value_dim = 128,
                          .latent_dim = 512,
                          .rope_dim = 64};
static_assert(vha::decode_step(mla, LayerForm::folded, 4096, 8, 2, 2).bytes.cache ==
              Index(8) * 4096 * 1152);

TEST(Roofline, IntensityGrowsWithTheBatchTowardsTheCaches) {
  const double core =
      static_cast<double>(vha::core_flops(layer, 4097)) / static_cast<double>(4096 * 1024);
  double before = 0;
  for (const Index batch : {1, 2, 8, 64, 4096}) {
    const double intensity =
        vha::decode_step(layer, LayerForm::folded, 4096, batch, 2, 2).intensity();
    EXPECT_GT(intensity, before);
    before = intensity;
  }
  EXPECT_GT(before, core);
}

}  // namespace
