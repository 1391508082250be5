// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>
#include <vha/ops/mask.hpp>

namespace {

using vha::CausalMask;
using vha::Position;
using vha::Visibility;

bool visible(Position query, Position key, vha::Index window) {
  return query >= key && (window == 0 || query - key < window);
}

TEST(Mask, OneKeyIsVisibleOrHidden) {
  for (const vha::Index window : {0, 1, 2, 5, 100}) {
    for (Position query = 0; query < 9; ++query) {
      for (Position key = 0; key < 9; ++key) {
        const std::vector queries{query}, keys{key};
        EXPECT_EQ(CausalMask{window}.visibility(queries, keys),
                  visible(query, key, window) ? Visibility::all : Visibility::none)
            << query << ' ' << key << ' ' << window;
      }
    }
  }
}

TEST(Mask, BlocksAreJudgedByAllTheirPairs) {
  std::mt19937 bits(1);
  int seen[3] = {};
  for (int round = 0; round < 20000; ++round) {
    const auto positions = [&](Position from, Position count) {
      std::vector<Position> result(1 + bits() % 4);
      for (Position& p : result) p = from + static_cast<Position>(bits()) % count;
      return result;
    };
    const auto queries = positions(static_cast<Position>(bits() % 12), 5);
    const auto keys = positions(static_cast<Position>(bits() % 12), 5);
    const vha::Index window = bits() % 2 == 0 ? 0 : static_cast<vha::Index>(1 + bits() % 9);
    bool any = false, all = true;
    for (const Position query : queries) {
      for (const Position key : keys) {
        any = any || visible(query, key, window);
        all = all && visible(query, key, window);
      }
    }
    const auto judged = CausalMask{window}.visibility(queries, keys);
    ++seen[static_cast<int>(judged)];
    ASSERT_EQ(judged == Visibility::all, all);
    ASSERT_FALSE(judged == Visibility::none && any);
  }
  EXPECT_GT(*std::ranges::min_element(seen), 1000);  // each answer was put to the test
}

TEST(Mask, HidesWholeBlocks) {
  const std::vector<Position> early{0, 1, 2}, late{10, 11, 12};
  EXPECT_EQ(CausalMask{}.visibility(early, late), Visibility::none);
  EXPECT_EQ(CausalMask{}.visibility(late, early), Visibility::all);
  EXPECT_EQ(CausalMask{8}.visibility(late, early), Visibility::none);
  EXPECT_EQ(CausalMask{9}.visibility(late, early), Visibility::some);  // 10 sees 2
  EXPECT_EQ(CausalMask{12}.visibility(late, early), Visibility::some);
  EXPECT_EQ(CausalMask{13}.visibility(late, early), Visibility::all);
  EXPECT_EQ(CausalMask{}.visibility(late, late), Visibility::some);
}

TEST(Mask, FarPositionsDoNotOverflow) {
  const std::vector<Position> first{0}, last{2147483647};
  EXPECT_EQ(CausalMask{}.visibility(last, first), Visibility::all);
  EXPECT_EQ(CausalMask{2147483647}.visibility(last, first), Visibility::none);
  EXPECT_EQ(CausalMask{2147483648}.visibility(last, first), Visibility::all);
}

}  // namespace
