// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>
#include <vha/attention/premix.hpp>

#include "error_of.hpp"

namespace {

using vha::Index;
using vha::Premix;
using vha::Weight;

using support::error_of;

template <class S>
std::vector<S> random_values(Index count, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-2, 2);
  std::vector<S> values(static_cast<std::size_t>(count));
  for (S& value : values) value = vha::convert<S>(uniform(bits));
  return values;
}

template <class S>
class PremixOf : public testing::Test {};
using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(PremixOf, Scalars);

/// Premix of `from` by the definition: head g·H' + i of a token is Q_i·P_g, then `activation`.
template <class S, class A>
void check(Index tokens, Index groups, Index heads, Index from, Index to, A activation) {
  using T = vha::Compute<S>;
  const auto maps = random_values<S>(groups * from * to, 1);
  const auto physical = random_values<T>(tokens * heads * from, 2);
  const Premix<S, A> premix{vha::view_premix_maps<S>(maps.data(), groups, from, to), activation};
  ASSERT_EQ(premix.kv_heads(), groups);
  ASSERT_EQ(premix.physical_head_dim(), from);

  std::vector<T> result(static_cast<std::size_t>(groups * tokens * heads * to),
                        std::numeric_limits<T>::quiet_NaN());
  const auto virtual_heads = vha::group_major_heads(result.data(), tokens, groups, heads, to);
  vha::ProductWorkspace<T> workspace;
  premix(physical.data(), virtual_heads, workspace);

  for (Index token = 0; token < tokens; ++token) {
    for (Index head = 0; head < groups * heads; ++head) {
      const Index group = head / heads, i = head % heads;
      for (Index c = 0; c < to; ++c) {
        long double sum = 0;
        for (Index k = 0; k < from; ++k) {
          const auto map = maps[static_cast<std::size_t>((group * from + k) * to + c)];
          sum += static_cast<long double>(
                     physical[static_cast<std::size_t>((token * heads + i) * from + k)]) *
                 vha::convert<double>(map);
        }
        const double expected = activation(static_cast<double>(sum));
        ASSERT_NEAR(virtual_heads.head(token, group, i)[c], expected,
                    8.0 * static_cast<double>(from + 1) * std::numeric_limits<T>::epsilon())
            << "token " << token << " head " << head << " channel " << c;
      }
    }
  }
}

TYPED_TEST(PremixOf, SquareMaps) {
  check<TypeParam>(5, 2, 3, 8, 8, vha::Identity{});
  check<TypeParam>(1, 1, 1, 2, 2, vha::Identity{});
}

TYPED_TEST(PremixOf, RectangularMapsOfEitherShape) {
  check<TypeParam>(3, 3, 2, 9, 4, vha::Identity{});
  check<TypeParam>(3, 3, 2, 1, 6, vha::Identity{});
}

TYPED_TEST(PremixOf, ActivationStandsAfterTheMap) {
  check<TypeParam>(4, 2, 3, 6, 4, vha::Silu{});
}

TEST(Premix, IdentityMapsRepeatTheHeads) {
  const Premix<float> premix{
      {Weight<float>(Eigen::Matrix4f::Identity()), Weight<float>(Eigen::Matrix4f::Identity())}};
  const auto physical = random_values<float>(2 * 3 * 4, 3);
  std::vector<float> result(2 * physical.size());
  vha::ProductWorkspace<float> workspace;
  premix(physical.data(), vha::group_major_heads(result.data(), 2, 2, 3, 4), workspace);
  EXPECT_TRUE(std::equal(physical.begin(), physical.end(), result.begin()));
  EXPECT_TRUE(std::equal(physical.begin(), physical.end(), result.begin() + 24));
}

TEST(Premix, MapsAreViewedInPlace) {
  auto tensor = random_values<float>(2 * 3 * 4, 4);
  const auto maps = vha::view_premix_maps<float>(tensor.data(), 2, 3, 4);
  tensor[3 * 4 + 2 * 4 + 1] = 77;
  EXPECT_EQ(maps[1](2, 1), 77);
  EXPECT_EQ(error_of([] { vha::view_premix_maps<float>(static_cast<float*>(nullptr), 2, 3, 4); }),
            "weight: expected [6, 4], got a null pointer");
  EXPECT_EQ(error_of([&] { vha::view_premix_maps<float>(tensor.data(), 2, -3, 4); }),
            "premix: expected sizes of 0 or more, got -3");
}

TEST(Premix, RefusesMapsThatDoNotFit) {
  Premix<float> premix{{Eigen::MatrixXf::Zero(6, 4), Eigen::MatrixXf::Zero(6, 4)}};
  EXPECT_NO_THROW(premix.require_shape(2, 4));
  EXPECT_EQ(error_of([&] { premix.require_shape(3, 4); }),
            "premix.maps.size() (one map for each of kv_heads): expected 3, got 2");
  EXPECT_EQ(error_of([&] { premix.require_shape(2, 8); }),
            "premix.maps[0]: expected [6, 8], got [6, 4]");
  premix.maps[1] = Eigen::MatrixXf::Zero(4, 6);
  EXPECT_EQ(error_of([&] { premix.require_shape(2, 4); }),
            "premix.maps[1]: expected [6, 4], got [4, 6]");
  premix.maps[1] = {};
  EXPECT_EQ(error_of([&] { premix.require_shape(2, 4); }),
            "premix.maps[1]: expected a matrix, got none");
  EXPECT_THROW(Premix<float>{}.require_shape(2, 4), vha::Error);
}

TEST(Premix, CastRoundsEachMap) {
  const Premix<double, vha::Silu> premix{
      {Eigen::MatrixXd::Constant(2, 2, 0.1), Eigen::MatrixXd::Constant(2, 2, 0.3)}};
  const Premix<float, vha::Silu> cast = premix.cast<float>();
  ASSERT_EQ(cast.kv_heads(), 2);
  EXPECT_EQ(cast.maps[0](1, 0), 0.1F);
  EXPECT_EQ(cast.maps[1](0, 1), 0.3F);
}

}  // namespace
