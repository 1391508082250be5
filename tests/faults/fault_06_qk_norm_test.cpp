// SPDX-License-Identifier: Apache-2.0
// Fault: QK-norm after RoPE, over all heads at once, or with another model's eps.

#include <cmath>

#include "fault_support.hpp"

namespace faults {
namespace {

template <class S>
class Fault06QkNorm : public testing::Test {
 protected:
  using Number = vha::Compute<S>;

  static vha::Tensor4<Number> heads(const std::vector<double>& channels, Index head_dim) {
    const auto count = static_cast<Index>(channels.size()) / head_dim;
    vha::Tensor4<Number> result(1, 1, count, head_dim);
    for (Index k = 0; k < result.size(); ++k) {
      result.data()[k] = static_cast<Number>(channels[static_cast<std::size_t>(k)]);
    }
    return result;
  }
};
TYPED_TEST_SUITE(Fault06QkNorm, Scalars);

const std::vector<double> norm_then_rope = {-1.984111, 1.959901, 2.462378, 4.0198};

TYPED_TEST(Fault06QkNorm, NormThenRope) {
  const vha::RmsNorm<TypeParam> norm{weight<TypeParam>(1, 4, {1, 2, 3, 4}), 0};
  const vha::Rope<typename TestFixture::Number> rope(1e4, 4);
  const std::vector<Position> position = {1};
  const auto result = rope(norm(this->heads({1, 1, 1, 1}, 4)), position);
  for (Index c = 0; c < 4; ++c) {
    EXPECT_NEAR(result.data()[c], norm_then_rope[static_cast<std::size_t>(c)], 1e-6);
  }
}

TYPED_TEST(Fault06QkNorm, ALayerNormsThenTurns) {
  using T = typename TestFixture::Number;
  typename vha::GqaAttention<TypeParam>::Weights w;
  w.query.weight = weight<TypeParam>(1, 8, {1, 1, 1, 1, 0.25, 0.25, 0.25, 0.25});
  w.key.weight = weight<TypeParam>(1, 4, {8, 8, 8, 8});
  w.value.weight = w.key.weight;
  w.output.weight = weight<TypeParam>(8, 1, {1, 1, 1, 1, 1, 1, 1, 1});
  w.q_norm = w.k_norm = weight<TypeParam>(1, 4, {1, 2, 3, 4});
  const vha::GqaAttention<TypeParam> layer(
      {.hidden = 1, .head_dim = 4, .query_heads = 2, .kv_heads = 1, .rms_norm_eps = 0}, w);
  const auto x = matrix<T>(2, 1, {3, 1});
  RowMajorMatrix<T> out(2, 1);
  vha::AttentionWorkspace<T> workspace;
  vha::AttentionTrace<T> trace;
  layer.forward_into(x, out, workspace, {}, &trace);
  for (Index c = 0; c < 4; ++c) {
    const double expected = norm_then_rope[static_cast<std::size_t>(c)];
    // Head 1 is a quarter of head 0: a norm of each head by itself makes them the same.
    for (const Index head : {0, 1}) EXPECT_NEAR(trace.q_rotated(0, 1, head, c), expected, 1e-6);
    EXPECT_NEAR(trace.k_rotated(0, 1, 0, c), expected, 1e-6);
  }
}

TYPED_TEST(Fault06QkNorm, EpsStandsBesideTheMeanSquare) {
  for (const Index width : {2, 4, 128}) {
    const std::vector<double> small(static_cast<std::size_t>(width), 1e-3);
    const std::vector<double> ones(static_cast<std::size_t>(width), 1.0);
    const auto normed = [&](double eps) {
      const vha::RmsNorm<TypeParam> norm{weight<TypeParam>(1, width, ones), eps};
      const auto result = norm(this->heads(small, width));
      return std::vector<double>(result.data(), result.data() + width);
    };
    for (const double channel : normed(1e-6)) EXPECT_NEAR(channel, 0.7071068, 1e-6);
    for (const double channel : normed(1e-5)) EXPECT_NEAR(channel, 0.3015113, 1e-6);
    for (const double channel : normed(0)) EXPECT_NEAR(channel, 1, 1e-6);
  }
}

/// The layer with every P_g times `factor`.
template <class S>
vha::VhaAttention<S> scaled_premix(const vha::VhaAttention<S>& layer, double factor, double eps) {
  auto config = layer.config();
  auto w = layer.weights();
  config.rms_norm_eps = eps;
  for (auto& map : w.premix.maps) {
    map = Weight<double>::own(map.template to<double>() * factor).template cast<S>();
  }
  return {config, w};
}

// The norm takes the scale of Premix out again, but for eps.
TEST(Fault06QkNormOfPremix, AScaleOfPremixIsNormedAway) {
  Random random(1);
  const vha::AttentionConfig config{.hidden = 9, .head_dim = 8, .query_heads = 6, .kv_heads = 2};
  const auto with_biases = random_layer<vha::VhaAttention<double>>(config, random);
  const auto x = random_matrix<double>(9, 9, random);
  const auto difference = [&](const auto& layer, double factor, double eps) {
    const auto outputs = [&](double by) { return scaled_premix(layer, by, eps).forward(x); };
    return largest_difference(outputs(factor), outputs(1));
  };
  EXPECT_LE(difference(with_biases, 3, 0), 1e-12);
  EXPECT_LE(difference(with_biases, 4, 0), 0);
  EXPECT_LE(difference(with_biases, 3, 1e-6), 1e-4);
  EXPECT_GT(difference(with_biases, 3, 1e-6), 1e-9);  // at the level of eps, not below
  EXPECT_GT(difference(with_biases, 3, 0.1), 1e-3);

  const auto without_norm = random_layer<vha::VhaAttention<double>>(config, random, false);
  EXPECT_GT(difference(without_norm, 3, 0), 1e-2);
}

}  // namespace
}  // namespace faults
