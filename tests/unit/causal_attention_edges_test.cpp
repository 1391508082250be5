// SPDX-License-Identifier: Apache-2.0
// The attention core where arithmetic runs out: zeros with signs, logits beyond their range, nothing to
// attend with, positions as far apart as can be.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>
#include <vha/attention/batched_causal_attention.hpp>

namespace {

using vha::Index;
using vha::Position;

/// One query of one channel with the value 1, at `position`.
float attend(const std::vector<float>& keys, const std::vector<float>& values,
             const std::vector<Position>& key_positions, Position position, double scale = 1,
             Index window = 0) {
  const float query = 1;
  float out = std::numeric_limits<float>::quiet_NaN();
  const auto count = static_cast<Index>(keys.size());
  vha::CausalAttentionWorkspace<float> workspace;
  vha::causal_attention(vha::token_major_heads(&query, 1, 1, 1, 1),
                        vha::token_major_heads(keys.data(), count, 1, 1, 1),
                        vha::token_major_heads(values.data(), count, 1, 1, 1), {&position, 1},
                        std::span<const Position>(key_positions), {scale, {window}},
                        vha::token_major_heads(&out, 1, 1, 1, 1), workspace);
  return out;
}

TEST(CausalAttentionEdges, KeysThatAreHiddenChangeNoSignOfAZero) {
  for (const std::size_t hidden : {0UL, 1UL, 900UL, 2000UL}) {
    std::vector<float> keys(129 + hidden, -60), values(129 + hidden, -0.0F);
    keys[128] = 30;
    values[0] = -1e-38F;
    std::vector<Position> positions(keys.size());
    std::iota(positions.begin(), positions.end(), 0);
    const float out = attend(keys, values, positions, 128);
    EXPECT_EQ(out, 0);
    EXPECT_TRUE(std::signbit(out)) << hidden;
  }
}

TEST(CausalAttentionEdges, ALogitIsJudgedAfterItsScale) {
  EXPECT_NEAR(attend({-1e38F, -1.0001e38F}, {1, 1.4F}, {0, 1}, 1, 2e-38), 1.2, 1e-3);
  EXPECT_EQ(attend({-1e38F, -1e38F}, {1, 1}, {0, 1}, 1, 10), 0);
  EXPECT_EQ(attend({-1e38F, 1}, {1, 3}, {0, 1}, 1, 10), 3);
}

TEST(CausalAttentionEdges, PositionsMayBeAsFarApartAsCanBe) {
  constexpr Position first = std::numeric_limits<Position>::min();
  constexpr Position last = std::numeric_limits<Position>::max();
  EXPECT_EQ(attend({0, 0}, {1, 3}, {first, 4}, 5, 1, 4), 3);
  EXPECT_EQ(attend({0, 0}, {1, 3}, {first, last}, last, 1, 4), 3);
  EXPECT_EQ(attend({0, 0}, {1, 3}, {first, last}, 5, 1, 0), 1);
  EXPECT_EQ(attend({0, 0}, {1, 3}, {last, last}, first, 1, 4), 0);
}

TEST(CausalAttentionEdges, NothingToAttendWithIsNoError) {
  for (const Index keys : {0, 5, 2000}) {
    vha::Tensor4<float> query(1, 0, 2, 8), key(1, keys, 2, 8), value(1, keys, 2, 8);
    key.setZero();
    value.setZero();
    EXPECT_EQ(vha::causal_attention(query, key, value).size(), 0);

    vha::CausalAttentionWorkspace<float> workspace;
    std::vector<Position> positions(static_cast<std::size_t>(keys));
    const Position at = 0;
    float out = 7;
    const auto run = [&](Index groups, Index head_dim) {
      vha::causal_attention(
          vha::token_major_heads<const float>(key.data(), 1, groups, 1, head_dim),
          vha::token_major_heads<const float>(key.data(), keys, groups, 1, head_dim),
          vha::token_major_heads<const float>(value.data(), keys, groups, 1, 1), {&at, 1},
          std::span<const Position>(positions), {}, vha::token_major_heads(&out, 1, groups, 1, 1),
          workspace);
    };
    run(0, 8);
    EXPECT_EQ(out, 7);
    if (keys == 0) continue;
    run(1, 0);  // all logits are 0
    EXPECT_EQ(out, 0);
  }
}

}  // namespace
