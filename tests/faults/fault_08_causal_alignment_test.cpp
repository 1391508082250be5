// SPDX-License-Identifier: Apache-2.0
// Fault: a causal mask aligned to the first key where queries continue a cache, so that decoded
// tokens see only the beginning of their text; and a window that is there though it was off.

#include "fault_support.hpp"

namespace faults {
namespace {

template <class S>
class Fault08CausalAlignment : public testing::Test {
 protected:
  /// Means of the values 1, 2, … `keys` that queries of zeros see.
  static std::vector<double> means(std::vector<Position> queries, Index keys, Index window = 0) {
    Core<S> core;
    core.query_positions = std::move(queries);
    core.key_positions = counted(keys);
    core.window = window;
    core.query.assign(core.query_positions.size(), vha::convert<S>(0.0));
    core.key.assign(static_cast<std::size_t>(keys), vha::convert<S>(0.75));
    for (Index k = 1; k <= keys; ++k) core.value.push_back(vha::convert<S>(static_cast<double>(k)));
    const auto out = core.run();
    return {out.begin(), out.end()};
  }
};
TYPED_TEST_SUITE(Fault08CausalAlignment, Scalars);

TYPED_TEST(Fault08CausalAlignment, QueriesAreTheLastOfTheKeys) {
  const std::vector<double> expected = {2.5, 3.0};
  EXPECT_EQ(this->means({3, 4}, 5), expected);

  vha::Tensor4<TypeParam> query(1, 2, 1, 2), key(1, 5, 1, 2), value(1, 5, 1, 1);
  query.setZero();
  key.setConstant(vha::convert<TypeParam>(0.75));
  value.setValues(
      {{{{TypeParam(1)}}, {{TypeParam(2)}}, {{TypeParam(3)}}, {{TypeParam(4)}}, {{TypeParam(5)}}}});
  const auto out = vha::causal_attention(query, key, value);
  EXPECT_EQ(std::vector<double>(out.data(), out.data() + 2), expected);
}

TYPED_TEST(Fault08CausalAlignment, ADecodedTokenSeesEveryKey) {
  for (const Index keys : {1, 2, 5, 63}) {
    EXPECT_EQ(this->means({keys - 1}, keys), std::vector<double>{0.5 + 0.5 * double(keys)});
  }
  EXPECT_EQ(this->means({0, 2, 1}, 3), (std::vector<double>{1, 2, 1.5}));
}

TYPED_TEST(Fault08CausalAlignment, AWindowHoldsTheNewestKeys) {
  EXPECT_EQ(this->means({3, 4}, 5, 1), (std::vector<double>{4, 5}));
  EXPECT_EQ(this->means({3, 4}, 5, 4), (std::vector<double>{2.5, 3.5}));
  EXPECT_EQ(this->means({3, 4}, 5, 5), (std::vector<double>{2.5, 3}));
  EXPECT_EQ(this->means({3, 4}, 5, 0), (std::vector<double>{2.5, 3}));  // 0 is off
}

// A layer whose queries and keys are 0: each output is the mean of the inputs that it sees.
TYPED_TEST(Fault08CausalAlignment, ALayerOverItsCache) {
  using T = vha::Compute<TypeParam>;
  const auto mean_layer = [](Index window) {
    typename vha::GqaAttention<TypeParam>::Weights w;
    w.query.weight = w.key.weight = weight<TypeParam>(1, 2, {0, 0});
    w.value.weight = weight<TypeParam>(1, 2, {1, 0});
    w.output.weight = weight<TypeParam>(2, 1, {1, 0});
    return vha::GqaAttention<TypeParam>(
        {.hidden = 1, .head_dim = 2, .query_heads = 1, .kv_heads = 1, .window = window}, w);
  };
  const auto x = matrix<T>(6, 1, {1, 2, 3, 4, 5, 6});
  const auto expect_means = [&](Index window, const std::vector<double>& expected) {
    for (const Index chunk : {1, 2, 3, 6}) {
      vha::KvCache<TypeParam> cache(mean_layer(window).config(), 1, 6);
      for (Index t = 0; t < 6; t += chunk) {
        const auto out = mean_layer(window).forward(x.middleRows(t, chunk), cache);
        for (Index k = 0; k < chunk; ++k) {
          EXPECT_NEAR(out(k, 0), expected[static_cast<std::size_t>(t + k)], 1e-6)
              << "window " << window << " chunk " << chunk;
        }
      }
    }
  };
  expect_means(0, {1, 1.5, 2, 2.5, 3, 3.5});
  expect_means(4, {1, 1.5, 2, 2.5, 3.5, 4.5});
  expect_means(6, {1, 1.5, 2, 2.5, 3, 3.5});
  expect_means(1, {1, 2, 3, 4, 5, 6});
}

}  // namespace
}  // namespace faults
