// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>
#include <vha/ops/rope.hpp>

#include "error_of.hpp"

namespace {

using vha::Index;
using vha::Position;
using vha::Rope;

using support::error_of;

template <class T>
std::vector<T> random_values(Index count, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) value = static_cast<T>(uniform(bits));
  return values;
}

/// The angle of a pair, in long double.
long double angle(double theta, Index rotary_dim, Position position, Index pair) {
  const auto exponent =
      -2.0L * static_cast<long double>(pair) / static_cast<long double>(rotary_dim);
  return static_cast<long double>(position) * std::pow(static_cast<long double>(theta), exponent);
}

/// How far an angle taken in double may be off, and with it a cosine rounded to `T`.
template <class T>
double tolerance(Position position) {
  return 2.0 * std::numeric_limits<T>::epsilon() +
         2.0 * std::numeric_limits<double>::epsilon() * static_cast<double>(position);
}

template <class T>
class RopeIn : public testing::Test {};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(RopeIn, ComputeScalars);

TYPED_TEST(RopeIn, TurnsHalvesTogetherAndLeavesTheRest) {
  using T = TypeParam;
  constexpr Index width = 18;
  constexpr Position positions[] = {0, 1, 7, 4095, 1000000, 2147483647};
  for (const Index rotary : {2, 6, 18}) {
    for (const double theta : {10000.0, 1e6, 1.5}) {
      const Rope<T> rope(theta, rotary);
      ASSERT_EQ(rope.rotary_dim(), rotary);
      const auto values = random_values<T>(6 * 2 * width, 1);
      auto turned = values;
      vha::Buffer<T> scratch;
      rope(vha::token_major_heads(turned.data(), 6, 1, 2, width), positions, scratch);
      for (Index row = 0; row < 12; ++row) {
        const Position position = positions[row / 2];
        const T* const from = values.data() + row * width;
        const T* const to = turned.data() + row * width;
        for (Index i = 0; i < rotary / 2; ++i) {
          const long double phi = angle(theta, rotary, position, i);
          const long double first = from[i], second = from[i + rotary / 2];
          const auto low = static_cast<double>(first * std::cos(phi) - second * std::sin(phi));
          const auto high = static_cast<double>(second * std::cos(phi) + first * std::sin(phi));
          ASSERT_NEAR(to[i], low, 2 * tolerance<T>(position)) << position << ' ' << i;
          ASSERT_NEAR(to[i + rotary / 2], high, 2 * tolerance<T>(position)) << position << ' ' << i;
        }
        for (Index c = rotary; c < width; ++c) ASSERT_EQ(to[c], from[c]);
      }
    }
  }
}

TYPED_TEST(RopeIn, PositionZeroChangesNothing) {
  auto values = random_values<TypeParam>(24, 2);
  const auto before = values;
  vha::Buffer<TypeParam> scratch;
  const std::vector<Position> positions(2, 0);
  Rope<TypeParam>(10000, 12)(vha::token_major_heads(values.data(), 2, 1, 1, 12), positions,
                             scratch);
  EXPECT_EQ(values, before);
}

TYPED_TEST(RopeIn, LogitsDependOnTheDistanceAlone) {
  using T = TypeParam;
  const auto query = random_values<T>(16, 3), key = random_values<T>(16, 4);
  const Rope<T> rope(10000, 16);
  const auto logit = [&](Position query_position, Position key_position) {
    auto q = query, k = key;
    vha::Buffer<T> scratch;
    rope(vha::token_major_heads(q.data(), 1, 1, 1, 16), std::vector{query_position}, scratch);
    rope(vha::token_major_heads(k.data(), 1, 1, 1, 16), std::vector{key_position}, scratch);
    double sum = 0;
    for (std::size_t c = 0; c < 16; ++c)
      sum += static_cast<double>(q[c]) * static_cast<double>(k[c]);
    return sum;
  };
  EXPECT_NEAR(logit(5, 2), logit(1003, 1000), 32 * tolerance<T>(1003));
  EXPECT_GT(std::abs(logit(5, 2) - logit(5, 3)), 1e-3);
}

TYPED_TEST(RopeIn, GroupsMayStandApart) {
  using T = TypeParam;
  auto by_group = random_values<T>(3 * 2 * 4, 5);  // groups, tokens, head_dim
  std::vector<T> by_token(by_group.size());
  const auto from = vha::group_major_heads(by_group.data(), 2, 3, 1, 4);
  const auto to = vha::token_major_heads(by_token.data(), 2, 3, 1, 4);
  const auto copy = [&] {
    for (Index token = 0; token < 2; ++token) {
      for (Index group = 0; group < 3; ++group) {
        std::copy_n(from.head(token, group, 0), 4, to.head(token, group, 0));
      }
    }
  };
  copy();
  const Rope<T> rope(100, 4);
  const std::vector<Position> positions{9, 2};
  vha::Buffer<T> scratch;
  rope(to, positions, scratch);
  const auto expected = by_token;
  rope(from, positions, scratch);
  copy();
  EXPECT_EQ(by_token, expected);
}

TEST(Rope, TableHoldsCosinesThenSines) {
  const Rope<float> rope(10000, 4);
  EXPECT_EQ(rope.pairs(), 2);
  float table[4];
  rope.angles(1000000, table);
  EXPECT_NEAR(table[0], std::cos(1e6), 1e-6);  // an angle in float would be off by 0.03
  EXPECT_NEAR(table[1], std::cos(1e4), 1e-6);
  EXPECT_NEAR(table[2], std::sin(1e6), 1e-6);
  EXPECT_NEAR(table[3], std::sin(1e4), 1e-6);
}

TEST(Rope, RefusesWhatCannotBe) {
  EXPECT_EQ(error_of([] { Rope<float>(10000, 3); }),
            "rotary_dim: expected an even number of 2 or more (it must be even), got 3");
  EXPECT_THROW(Rope<float>(10000, 0), vha::Error);
  EXPECT_THROW(Rope<float>(10000, -2), vha::Error);
  EXPECT_EQ(error_of([] { Rope<float>(0, 4); }), "theta: expected a positive number, got 0");
  EXPECT_THROW(Rope<float>(-1, 4), vha::Error);
  EXPECT_THROW(Rope<float>(std::numeric_limits<double>::quiet_NaN(), 4), vha::Error);
}

}  // namespace
