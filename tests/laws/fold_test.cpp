// SPDX-License-Identifier: Apache-2.0
// A fold computes what its layer does.

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

template <class Kind>
class Fold : public testing::Test {
 protected:
  using S = typename Kind::S;
  using T = typename Kind::T;

  /// Calls `body(layer, folded_equals_layer)`, where the latter runs a fold whose weights are
  /// stored as the type of its second argument and holds it against the layer.
  template <class Layer, class Body>
  void for_each_layer(std::uint32_t seed, Body&& body) {
    Random random(seed);
    for_each_shape<Kind>([&](const LayerShape& shape, naive::Index tokens) {
      const auto twin = Layer::Weights::has_gate ? random_gated_layer<S>(shape, random)
                                                 : random_layer<S>(shape, random);
      const auto layer = library_layer<Layer>(twin);
      const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
      const Array expected = run(layer, x);
      body(layer, [&](const auto& folded) {
        using Stored = typename std::remove_cvref_t<decltype(folded)>::Scalar;
        const auto input = x.template cast<vha::Compute<Stored>>().eval();
        const double allowed = std::max(tolerance<Stored>(longest_sum(twin, tokens)),
                                        tolerance<T>(longest_sum(twin, tokens)));
        return close(run(folded, input), expected, allowed);
      });
    });
  }
};
TYPED_TEST_SUITE(Fold, Kinds);

TYPED_TEST(Fold, OfBothMapsIsTheLayer) {
  this->template for_each_layer<typename TypeParam::Vha>(1, [](const auto& layer, auto is_layer) {
    const auto folded = vha::fold_vha(layer);
    EXPECT_TRUE((std::is_same_v<std::remove_cv_t<decltype(folded)>, typename TypeParam::Gqa>));
    EXPECT_TRUE(is_layer(folded));
  });
}

TYPED_TEST(Fold, OfEitherMapIsTheLayer) {
  this->template for_each_layer<typename TypeParam::Vha>(2, [](const auto& layer, auto is_layer) {
    EXPECT_TRUE(is_layer(vha::fold_premix(layer)));
    EXPECT_TRUE(is_layer(vha::fold_postmix(layer)));
  });
}

TYPED_TEST(Fold, OfPremixIsTheGatedLayer) {
  this->template for_each_layer<typename TypeParam::Gated>(
      3, [](const auto& layer, auto is_layer) { EXPECT_TRUE(is_layer(vha::fold_premix(layer))); });
}

TYPED_TEST(Fold, OneMapAtATimeIsTheFoldOfBoth) {
  this->template for_each_layer<typename TypeParam::Vha>(4, [](const auto& layer, auto) {
    const auto both = vha::fold_vha(layer);
    const auto one_by_one = vha::fold_postmix(vha::fold_premix(layer));
    for (const auto& part : {&TypeParam::Gqa::Weights::query, &TypeParam::Gqa::Weights::output}) {
      EXPECT_TRUE(same_bits(array_of((one_by_one.weights().*part).weight.template to<double>()),
                            array_of((both.weights().*part).weight.template to<double>())));
    }
  });
}

using Unfixed = Fold<Kind<double>>;

TEST_F(Unfixed, ToNarrowerScalarsIsTheLayerUpToRounding) {
  for_each_layer<vha::VhaAttention<double>>(5, [](const auto& layer, auto is_layer) {
    EXPECT_TRUE(is_layer(vha::fold_vha<float>(layer)));
    EXPECT_TRUE(is_layer(vha::fold_vha<vha::half>(layer)));
    EXPECT_TRUE(is_layer(vha::fold_vha<vha::bfloat16>(layer)));
  });
}

TEST_F(Unfixed, OfPostmixIsTheLayerWithSiluAfterPremix) {
  using Layer = vha::VhaAttention<double, vha::NoGate, vha::Silu>;
  for_each_layer<Layer>(
      6, [](const auto& layer, auto is_layer) { EXPECT_TRUE(is_layer(vha::fold_postmix(layer))); });
}

TEST_F(Unfixed, OfALayerWithOneMapIsTheLayer) {
  for_each_layer<vha::VhaAttention<double>>(7, [](const auto& layer, auto is_layer) {
    EXPECT_TRUE(is_layer(vha::fold_vha(vha::fold_premix(layer))));
    EXPECT_TRUE(is_layer(vha::fold_vha(vha::fold_postmix(layer))));
  });
}

TEST_F(Unfixed, OfADensePostmixIsTheFoldOfTheSameLowRankOne) {
  for_each_layer<vha::VhaAttention<double>>(8, [](const auto& layer, auto is_layer) {
    auto weights = layer.weights();
    weights.postmix = vha::Postmix<double>::from_dense(weights.postmix.dense());
    const vha::VhaAttention<double> dense(layer.config(), weights);
    EXPECT_TRUE(is_layer(dense));
    EXPECT_TRUE(is_layer(vha::fold_vha(dense)));
    EXPECT_TRUE(is_layer(vha::fold_postmix(dense)));
  });
}

}  // namespace
}  // namespace laws
