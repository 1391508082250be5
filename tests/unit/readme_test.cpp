// SPDX-License-Identifier: Apache-2.0
// The fragments of the README, which readme.quickstart looks for in this file.
#include <gtest/gtest.h>

#include <vector>
#include <vha/vha.hpp>

namespace {

TEST(Readme, ViewsOfTheSameMatrixInBothLayouts) {
  const vha::Index in = 2, out = 3;
  const std::vector<std::uint16_t> rows{0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0};
  const auto* bytes = rows.data();
  auto paddle = vha::Weight<vha::bfloat16>::view_in_out(bytes, in, out);  // row-major [in, out]
  auto hugging_face =
      vha::Weight<vha::bfloat16>::view_out_in(bytes, in, out);  // row-major [out, in]
  EXPECT_EQ(static_cast<float>(paddle(1, 0)), 4.0F);
  EXPECT_EQ(static_cast<float>(hugging_face(1, 0)), 2.0F);
}

TEST(Readme, PaddedBatch) {
  const auto layer =
      vha::initialise_vha<float>({.hidden = 8, .head_dim = 4, .query_heads = 4, .kv_heads = 2});
  vha::KvCache<float> kv_cache(layer.config(), 2, 5);
  vha::Tensor3<float> x(2, 3, 8);
  x.setConstant(1);
  const std::vector<vha::Index> lengths{3, 1};
  const std::vector<vha::Position> positions{4, 5, 6, 0, 0, 9};
  const auto y = layer.forward(
      x, kv_cache, {.lengths = lengths, .padding = vha::Padding::left, .positions = positions});
  EXPECT_EQ(kv_cache.length(1), 1);
  EXPECT_EQ(kv_cache.positions(1)[0], 9);
  EXPECT_EQ(y(1, 0, 0), 0);
  EXPECT_NE(y(1, 2, 0), 0);
}

TEST(Readme, Gradients) {
  const auto layer =
      vha::initialise_vha<float>({.hidden = 8, .head_dim = 4, .query_heads = 4, .kv_heads = 2});
  vha::Tensor3<float> x(2, 3, 8), out(2, 3, 8), upstream(2, 3, 8), dx(2, 3, 8);
  x.setRandom();
  upstream.setConstant(1);
  const vha::TokenLayout layout;
  vha::AttentionWorkspace<float> forward_workspace;
  vha::AttentionBackwardWorkspace<float> workspace;
  vha::AttentionTrace<float> trace;
  layer.forward_into(x, out, forward_workspace, layout, &trace);
  auto gradients = vha::AttentionGradients<float>::zeros_like(layer);
  gradients.premix.clear();  // frozen maps cost nothing
  vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace, layout);
  EXPECT_GT(gradients.query.weight.norm(), 0);
  EXPECT_GT(gradients.postmix_b.norm(), 0);
  EXPECT_EQ(gradients.premix[0].size(), 0);
}

}  // namespace
