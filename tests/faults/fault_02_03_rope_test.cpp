// SPDX-License-Identifier: Apache-2.0
// Faults: RoPE on interleaved pairs where the weights want half-rotated ones, and RoPE angles taken
// in a precision that loses them at late positions.

#include <cmath>
#include <numbers>

#include "fault_support.hpp"

namespace faults {
namespace {

template <class T>
class Fault02RopeLayout : public testing::Test {};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(Fault02RopeLayout, ComputeScalars);

template <class T>
std::vector<double> turned(const vha::Rope<T>& rope, const std::vector<double>& head,
                           Position position) {
  vha::Tensor4<T> heads(1, 1, 1, static_cast<Index>(head.size()));
  for (std::size_t c = 0; c < head.size(); ++c) heads.data()[c] = static_cast<T>(head[c]);
  const auto result = rope(heads, std::span<const Position>(&position, 1));
  return {result.data(), result.data() + result.size()};
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 double limit) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t c = 0; c < expected.size(); ++c) EXPECT_NEAR(actual[c], expected[c], limit);
}

TYPED_TEST(Fault02RopeLayout, AChannelTurnsWithTheOneHalfAWidthAway) {
  expect_near(turned(vha::Rope<TypeParam>(1e4, 4), {1, 2, 3, 4}, 1),
              {-1.984111, 1.959901, 2.462378, 4.019800}, 1e-6);
  expect_near(turned(vha::Rope<TypeParam>(1e4, 4), {1, 2, 3, 4}, 0), {1, 2, 3, 4}, 0);
  // Of a unit vector every pair shows where it turns to, in any width.
  for (const Index width : {2, 6, 64, 128}) {
    for (Index c = 0; c < width; ++c) {
      std::vector<double> unit(static_cast<std::size_t>(width)), expected = unit;
      unit[static_cast<std::size_t>(c)] = 1;
      const Index half = width / 2, pair = c % half;
      const double angle =
          5 * std::pow(500.0, -2.0 * static_cast<double>(pair) / static_cast<double>(width));
      expected[static_cast<std::size_t>(c)] = std::cos(angle);
      expected[static_cast<std::size_t>((c + half) % width)] =
          c < half ? std::sin(angle) : -std::sin(angle);
      expect_near(turned(vha::Rope<TypeParam>(500, width), unit, 5), expected, 1e-6);
    }
  }
}

TYPED_TEST(Fault02RopeLayout, PartOfAHeadIsAHeadOfThatWidth) {
  expect_near(turned(vha::Rope<TypeParam>(1e4, 4), {1, 2, 3, 4, 5, 6, 7}, 1),
              {-1.984111, 1.959901, 2.462378, 4.019800, 5, 6, 7}, 1e-6);
}

TYPED_TEST(Fault02RopeLayout, ALayerTurnsItsHeadsSo) {
  typename vha::GqaAttention<TypeParam>::Weights w;
  w.query.weight = weight<TypeParam>(1, 8, {1, 2, 3, 4, 1, 2, 3, 4});
  w.key.weight = weight<TypeParam>(1, 4, {1, 2, 3, 4});
  w.value.weight = w.key.weight;
  w.output.weight = weight<TypeParam>(8, 1, {1, 1, 1, 1, 1, 1, 1, 1});
  const vha::GqaAttention<TypeParam> layer(
      {.hidden = 1, .head_dim = 4, .query_heads = 2, .kv_heads = 1}, w);
  const auto x = matrix<TypeParam>(2, 1, {7, 1});  // the second stands at position 1
  RowMajorMatrix<TypeParam> out(2, 1);
  vha::AttentionWorkspace<TypeParam> workspace;
  vha::AttentionTrace<TypeParam> trace;
  layer.forward_into(x, out, workspace, {}, &trace);
  const std::vector<double> expected = {-1.984111, 1.959901, 2.462378, 4.019800};
  for (Index c = 0; c < 4; ++c) {
    const double channel = expected[static_cast<std::size_t>(c)];
    EXPECT_NEAR(trace.k_rotated(0, 1, 0, c), channel, 1e-6);
    for (const Index head : {0, 1}) EXPECT_NEAR(trace.q_rotated(0, 1, head, c), channel, 1e-6);
  }
}

template <class S>
class Fault02FoldLeavesTheRest : public testing::Test {};
TYPED_TEST_SUITE(Fault02FoldLeavesTheRest, Scalars);

// The fold has no business with what RoPE and the norms work on.
TYPED_TEST(Fault02FoldLeavesTheRest, ByteForByte) {
  using Layer = vha::VhaAttention<TypeParam>;
  Random random(1);
  const auto expect_untouched = [](const auto& before, const auto& after) {
    const auto same = [](const auto& a, const auto& b) {
      return same_bits(a.template to<TypeParam>(), b.template to<TypeParam>());
    };
    EXPECT_TRUE(same(after.key.weight, before.key.weight));
    EXPECT_TRUE(same(after.key.bias, before.key.bias));
    EXPECT_TRUE(same(after.value.weight, before.value.weight));
    EXPECT_TRUE(same(after.value.bias, before.value.bias));
    EXPECT_TRUE(same(after.output.bias, before.output.bias));
    EXPECT_TRUE(same(after.q_norm, before.q_norm));
    EXPECT_TRUE(same(after.k_norm, before.k_norm));
  };
  for (const bool qk_norm : {true, false}) {
    const auto layer = random_layer<Layer>(
        {.hidden = 7, .head_dim = 6, .query_heads = 6, .kv_heads = 3, .rotary_dim = 4}, random,
        qk_norm);
    expect_untouched(layer.weights(), vha::fold_vha(layer).weights());
    expect_untouched(layer.weights(), vha::fold_premix(layer).weights());
    expect_untouched(layer.weights(), vha::fold_postmix(layer).weights());
    EXPECT_EQ(vha::fold_vha(layer).config().rotary_dim, 4);
    EXPECT_EQ(vha::fold_vha(layer).weights().has_qk_norm(), qk_norm);
    // Folded to a wider scalar and back they are still the same.
    if constexpr (sizeof(TypeParam) < 8) {
      const auto there_and_back = vha::fold_vha<double>(layer).template cast<TypeParam>();
      expect_untouched(layer.weights(), there_and_back.weights());
    }
  }
}

TEST(Fault03RopePrecision, AnglesAtLatePositions) {
  const auto table = [](double theta, Index width, Position position) {
    std::vector<double> result(static_cast<std::size_t>(width));
    vha::Rope<double>(theta, width).angles(position, result.data());
    return result;
  };
  EXPECT_NEAR(table(1e4, 32, 1857)[1], 0.306693, 5e-7);
  EXPECT_NEAR(table(1e6, 128, 131071)[1], -0.585569, 5e-7);
  EXPECT_NEAR(table(1e6, 128, 131071)[64 + 1], 0.810622, 5e-7);
}

TEST(Fault03RopePrecision, EveryAngleOfEveryWidth) {
  for (const double theta : {1e4, 5e5, 1e6, 1e7}) {
    for (const Index width : {2, 32, 64, 128}) {
      const vha::Rope<double> in_double(theta, width);
      const vha::Rope<float> in_float(theta, width);
      const Index pairs = width / 2;
      std::vector<double> table(static_cast<std::size_t>(width));
      std::vector<float> float_table(table.size());
      for (const Position position :
           {Position(1), Position(1857), Position(131071), Position(1'048'575)}) {
        in_double.angles(position, table.data());
        in_float.angles(position, float_table.data());
        for (Index i = 0; i < pairs; ++i) {
          const long double angle =
              static_cast<long double>(position) *
              std::pow(static_cast<long double>(theta),
                       -2 * static_cast<long double>(i) / static_cast<long double>(width));
          const auto cosine = static_cast<std::size_t>(i);
          const auto sine = static_cast<std::size_t>(pairs + i);
          EXPECT_NEAR(table[cosine], static_cast<double>(std::cos(angle)), 1e-9);
          EXPECT_NEAR(table[sine], static_cast<double>(std::sin(angle)), 1e-9);
          // One rounding to float of what is right to 1e-9.
          EXPECT_NEAR(float_table[cosine], static_cast<double>(std::cos(angle)), 0x1p-25 + 1e-9);
          EXPECT_NEAR(float_table[sine], static_cast<double>(std::sin(angle)), 0x1p-25 + 1e-9);
        }
      }
    }
  }
}

/// A layer whose query and key heads are (1, 0): after RoPE they show its angles.
template <class S>
vha::GqaAttention<S> angle_layer(double theta, Index width) {
  std::vector<double> head(static_cast<std::size_t>(width), 0.0);
  std::fill_n(head.begin(), width / 2, 1.0);
  typename vha::GqaAttention<S>::Weights w;
  w.query.weight = w.key.weight = w.value.weight = weight<S>(1, width, head);
  w.output.weight = weight<S>(width, 1, head);
  return {{.hidden = 1, .head_dim = width, .query_heads = 1, .kv_heads = 1, .rope_theta = theta},
          w};
}

template <class S>
class Fault03RopePrecisionOf : public testing::Test {};
TYPED_TEST_SUITE(Fault03RopePrecisionOf, Scalars);

TYPED_TEST(Fault03RopePrecisionOf, ALayersAngles) {
  using T = vha::Compute<TypeParam>;
  const double limit = sizeof(T) == 8 ? 1e-9 : 1e-5;
  for (const double theta : {1e4, 1e6}) {
    for (const Position position : {Position(1857), Position(131071), Position(2'000'000'000)}) {
      const auto layer = angle_layer<TypeParam>(theta, 64);
      const auto x = matrix<T>(1, 1, {1});
      RowMajorMatrix<T> out(1, 1);
      vha::AttentionWorkspace<T> workspace;
      vha::AttentionTrace<T> trace;
      const std::vector<Position> positions = {position};
      layer.forward_into(x, out, workspace, {.positions = positions}, &trace);
      for (Index i = 0; i < 32; ++i) {
        const auto expected = static_cast<double>(
            std::remainder(static_cast<long double>(position) *
                               std::pow(static_cast<long double>(theta), -i / 32.0L),
                           2 * std::numbers::pi_v<long double>));
        for (const auto* heads : {&trace.q_rotated, &trace.k_rotated}) {
          const double angle = std::atan2(static_cast<double>((*heads)(0, 0, 0, 32 + i)),
                                          static_cast<double>((*heads)(0, 0, 0, i)));
          const double error = std::remainder(angle - expected, 2 * std::numbers::pi);
          // Beyond 2^20 the product of position and frequency itself is rounded by more than 1e-9.
          EXPECT_LE(std::abs(error), position > (1 << 20) ? 1e-5 : limit) << "pair " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace faults
