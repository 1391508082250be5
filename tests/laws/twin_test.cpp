// SPDX-License-Identifier: Apache-2.0
// The library computes what the naive twin does: outputs, every step on the way, folded weights.

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

/// Runs `Layer` and the twin on the same tokens and compares all they compute.
template <class Layer>
void expect_twin(const naive::Layer& twin, naive::Index tokens, Random& random) {
  using T = typename Layer::T;
  const auto layer = library_layer<Layer>(twin);
  const naive::Vector x = random_tokens<T>(tokens, twin, random);
  const naive::Trace expected = naive::forward(twin, x, counted_positions(tokens));

  vha::AttentionTrace<T> trace;
  const Array out = run(layer, matrix_of<T>(x, tokens), {}, &trace);
  const double allowed = tolerance<T>(longest_sum(twin, tokens));
  if constexpr (Layer::Weights::has_premix) {
    EXPECT_TRUE(close(array_of(trace.q_physical), expected.q_physical, allowed)) << "q_physical";
  }
  EXPECT_TRUE(close(array_of(trace.q_virtual), expected.q_virtual, allowed)) << "q_virtual";
  EXPECT_TRUE(close(array_of(trace.q_rotated), expected.q_rotated, allowed)) << "q_rotated";
  EXPECT_TRUE(close(array_of(trace.k_rotated), expected.k_rotated, allowed)) << "k_rotated";
  EXPECT_TRUE(close(array_of(trace.v), expected.v, allowed)) << "v";
  EXPECT_TRUE(close(array_of(trace.heads), expected.heads, allowed)) << "heads";
  EXPECT_TRUE(close(array_of(trace.heads_mixed), expected.heads_mixed, allowed)) << "heads_mixed";
  EXPECT_TRUE(close(out, expected.out, allowed)) << "out";
}

template <class Kind>
class Twin : public testing::Test {};
TYPED_TEST_SUITE(Twin, Kinds);

TYPED_TEST(Twin, ComputesTheSameAtEveryStep) {
  Random random(1);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index tokens) {
    using S = typename TypeParam::S;
    expect_twin<typename TypeParam::Vha>(random_layer<S>(shape, random), tokens, random);
  });
}

TYPED_TEST(Twin, ComputesTheSameWithAGate) {
  Random random(2);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index tokens) {
    using S = typename TypeParam::S;
    expect_twin<typename TypeParam::Gated>(random_gated_layer<S>(shape, random), tokens, random);
  });
}

TYPED_TEST(Twin, FoldsToTheSameWeights) {
  Random random(3);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index) {
    using S = typename TypeParam::S;
    const auto twin = random_layer<S>(shape, random);
    const naive::Layer expected = naive::fold(twin);
    const auto folded = vha::fold_vha(library_layer<typename TypeParam::Vha>(twin));
    const auto& weights = folded.weights();
    const double allowed = tolerance<S>(longest_sum(twin, 1));
    const auto array = [](const vha::Weight<S>& weight) {
      return array_of(weight.template to<double>());
    };
    EXPECT_TRUE(close(array(weights.query.weight), expected.wq, allowed)) << "query.weight";
    EXPECT_TRUE(close(array(weights.query.bias), expected.bq, allowed)) << "query.bias";
    EXPECT_TRUE(close(array(weights.value.weight), expected.wv, allowed)) << "value.weight";
    EXPECT_TRUE(close(array(weights.value.bias), expected.bv, allowed)) << "value.bias";
    EXPECT_TRUE(close(array(weights.output.weight), expected.wo, allowed)) << "output.weight";
    EXPECT_TRUE(close(array(weights.output.bias), expected.bo, 0)) << "output.bias";
    EXPECT_TRUE(close(array(weights.key.weight), expected.wk, 0)) << "key.weight";
    EXPECT_TRUE(close(array(weights.key.bias), expected.bk, 0)) << "key.bias";
    EXPECT_TRUE(close(array(weights.q_norm), expected.q_norm, 0)) << "q_norm";
    EXPECT_TRUE(close(array(weights.k_norm), expected.k_norm, 0)) << "k_norm";
    EXPECT_EQ(folded.config().value_scale, 1);
  });
}

TEST(Twin, ComputesTheSameWithSiluAfterPremix) {
  using Layer = vha::VhaAttention<double, vha::NoGate, vha::Silu>;
  Random random(4);
  for_each_shape<Kind<double>>([&](const LayerShape& shape, naive::Index tokens) {
    auto twin = random_layer<double>(shape, random);
    twin.premix_silu = true;
    expect_twin<Layer>(twin, tokens, random);
  });
}

TEST(Twin, ComputesTheSameAtAnyPositions) {
  Random random(5);
  for_each_shape<Kind<double>>([&](const LayerShape& shape, naive::Index tokens) {
    const auto twin = random_layer<double>(shape, random);
    const naive::Vector x = random_tokens<double>(tokens, twin, random);
    naive::Positions positions;  // with gaps, repeats, and not in order
    for (naive::Index t = 0; t < tokens; ++t) {
      positions.push_back(static_cast<long long>((t * 37) % (tokens + 3)) * 3 / 2);
    }
    const std::vector<vha::Position> given(positions.begin(), positions.end());
    const Array out = run(library_layer<vha::VhaAttention<double>>(twin),
                          matrix_of<double>(x, tokens), {.positions = given});
    EXPECT_TRUE(close(out, naive::forward(twin, x, positions).out,
                      tolerance<double>(longest_sum(twin, tokens))));
  });
}

}  // namespace
}  // namespace laws
