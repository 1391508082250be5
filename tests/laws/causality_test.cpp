// SPDX-License-Identifier: Apache-2.0
// A row depends on the tokens up to its own and on nothing else: neither on later ones, nor on what
// memory held before, nor on where positions start.

#include <memory>

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

template <class Kind>
class Causality : public testing::Test {
 protected:
  using S = typename Kind::S;
  using T = typename Kind::T;

  /// Calls `body(layer, x, allowed)` for plain and for gated layers.
  template <class Body>
  void for_each_layer(std::uint32_t seed, Body&& body) {
    Random random(seed);
    for_each_shape<Kind>([&](const LayerShape& shape, naive::Index tokens) {
      const auto twin = random_gated_layer<S>(shape, random);
      const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
      const double allowed = tolerance<T>(longest_sum(twin, tokens));
      body(library_layer<typename Kind::Vha>(twin), x, allowed);
      body(library_layer<typename Kind::Gated>(twin), x, allowed);
    });
  }
};
TYPED_TEST_SUITE(Causality, Kinds);

TYPED_TEST(Causality, ALaterTokenNeverChangesAnEarlierRow) {
  using Scalar = typename TypeParam::T;
  this->for_each_layer(1, [](const auto& layer, const auto& x, double) {
    const Array expected = run(layer, x);
    for (const Eigen::Index kept : {Eigen::Index(1), x.rows() / 2, x.rows() - 1}) {
      if (kept >= x.rows()) continue;
      for (const Scalar later : {Scalar(0), Scalar(-1e4), std::numeric_limits<Scalar>::quiet_NaN(),
                                 std::numeric_limits<Scalar>::infinity()}) {
        auto changed = x;
        changed.bottomRows(x.rows() - kept).setConstant(later);
        const Array actual = run(layer, changed);
        EXPECT_TRUE(same_bits(first_rows(actual, kept), first_rows(expected, kept)))
            << "tokens from " << kept << " on are " << later;
        EXPECT_FALSE(same_bits(actual, expected)) << "the change reached no row";
      }
    }
  });
}

TYPED_TEST(Causality, AMissingLaterTokenNeverChangesAnEarlierRow) {
  this->for_each_layer(2, [](const auto& layer, const auto& x, double) {
    const Array all = run(layer, x);
    for (const Eigen::Index kept : {Eigen::Index(1), x.rows() / 2, x.rows() - 1}) {
      if (kept == 0) continue;
      EXPECT_TRUE(same_bits(run(layer, x.topRows(kept)), first_rows(all, kept)));
    }
  });
}

TYPED_TEST(Causality, AUsedWorkspaceGivesTheSameBits) {
  using Scalar = typename TypeParam::T;
  this->for_each_layer(3, [](const auto& layer, const auto& x, double) {
    vha::AttentionWorkspace<Scalar> workspace;
    vha::RowMajorMatrix<Scalar> nan = vha::RowMajorMatrix<Scalar>::Constant(
        x.rows() + 20, x.cols(), std::numeric_limits<Scalar>::quiet_NaN());
    auto out = poisoned_like(nan);
    layer.forward_into(nan, out, workspace);
    auto again = poisoned_like(x);
    layer.forward_into(x, again, workspace);
    EXPECT_TRUE(same_bits(array_of(again), run(layer, x)));
    EXPECT_TRUE(same_bits(array_of(layer.forward(x)), run(layer, x)));
  });
}

TYPED_TEST(Causality, GivenPositionsThatAreTheCountedOnesGiveTheSameBits) {
  this->for_each_layer(4, [](const auto& layer, const auto& x, double) {
    std::vector<vha::Position> positions;
    for (Eigen::Index t = 0; t < x.rows(); ++t) positions.push_back(t);
    EXPECT_TRUE(same_bits(run(layer, x, {.positions = positions}), run(layer, x)));
  });
}

TYPED_TEST(Causality, OnlyDistancesBetweenPositionsCount) {
  using Scalar = typename TypeParam::T;
  this->for_each_layer(5, [](const auto& layer, const auto& x, double allowed) {
    std::vector<vha::Position> positions;
    for (Eigen::Index t = 0; t < x.rows(); ++t) positions.push_back(t + 1000);
    // An angle of 1000 rad, rounded to double.
    const double angle = std::is_same_v<Scalar, double> ? 1000 * 0x1p-52 : 0;
    EXPECT_TRUE(close(run(layer, x, {.positions = positions}), run(layer, x), allowed + angle));
  });
}

TYPED_TEST(Causality, CopiesAndMovedLayersGiveTheSameBits) {
  this->for_each_layer(6, [](const auto& layer, const auto& x, double) {
    using Layer = std::remove_cvref_t<decltype(layer)>;
    const Array expected = run(layer, x);
    std::vector<Layer> layers(3, layer);
    layers.emplace_back(std::move(layers[0]));
    layers[0] = layers[1];
    layers.erase(layers.begin() + 1);
    const auto on_heap = std::make_unique<Layer>(layers.back());
    Layer moved = std::move(layers.back());
    layers.pop_back();
    for (const Layer& copy : layers) EXPECT_TRUE(same_bits(run(copy, x), expected));
    EXPECT_TRUE(same_bits(run(moved, x), expected));
    EXPECT_TRUE(same_bits(run(*on_heap, x), expected));
  });
}

}  // namespace
}  // namespace laws
