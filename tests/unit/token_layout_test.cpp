// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>
#include <vha/attention/token_layout.hpp>

namespace {

using vha::Index;
using vha::Padding;
using vha::Position;
using vha::TokenLayout;

std::string error_of(const TokenLayout& layout, Index batch, Index tokens) {
  try {
    layout.validate(batch, tokens);
  } catch (const vha::Error& error) {
    return error.what();
  }
  return "no vha::Error";
}

TEST(TokenLayout, IsWholeWhereNothingIsSaid) {
  const TokenLayout layout;
  EXPECT_NO_THROW(layout.validate(2, 5));
  EXPECT_EQ(layout.length(1, 5), 5);
  EXPECT_EQ(layout.first(1, 5), 0);
  EXPECT_TRUE(layout.row_positions(1, 5).empty());
}

TEST(TokenLayout, PaddingStandsAtEitherEnd) {
  const std::vector<Index> lengths{4, 0, 1};
  const std::vector<Position> positions{10, 11, 12, 13, -1, -1, -1, -1, 23, 24, 25, 26};
  TokenLayout layout{.lengths = lengths, .positions = positions};
  EXPECT_NO_THROW((TokenLayout{.lengths = lengths}.validate(3, 4)));
  EXPECT_EQ(layout.first(2, 4), 0);
  ASSERT_EQ(layout.row_positions(2, 4).size(), 1U);
  EXPECT_EQ(layout.row_positions(2, 4)[0], 23);
  EXPECT_TRUE(layout.row_positions(1, 4).empty());
  EXPECT_EQ(layout.row_positions(0, 4)[3], 13);

  layout.padding = Padding::left;
  EXPECT_EQ(layout.first(0, 4), 0);
  EXPECT_EQ(layout.first(1, 4), 4);
  EXPECT_EQ(layout.first(2, 4), 3);
  EXPECT_EQ(layout.row_positions(2, 4)[0], 26);
}

TEST(TokenLayout, RefusesLengthsThatDoNotFit) {
  const std::vector<Index> lengths{3, 5};
  EXPECT_EQ(error_of({.lengths = lengths}, 2, 5), "no vha::Error");
  EXPECT_EQ(error_of({.lengths = lengths}, 3, 5), "lengths.size() (batch): expected 3, got 2");
  EXPECT_EQ(error_of({.lengths = lengths}, 2, 4), "lengths: expected 0 to 4, got 5");
  const std::vector<Index> negative{3, -1};
  EXPECT_EQ(error_of({.lengths = negative}, 2, 4), "lengths: expected 0 to 4, got -1");
}

TEST(TokenLayout, RefusesPositionsThatDoNotFit) {
  const std::vector<Position> positions{0, 2147483647, 5, 5};
  EXPECT_EQ(error_of({.positions = positions}, 2, 2), "no vha::Error");
  EXPECT_EQ(error_of({.positions = positions}, 1, 2),
            "positions.size() (batch * tokens): expected 2, got 4");
  const std::vector<Position> negative{0, 1, -7, 3};
  EXPECT_EQ(error_of({.positions = negative}, 2, 2), "positions: expected 0 to 2^31 - 1, got -7");
  const std::vector<Position> beyond{0, 1, 2, 2147483648};
  EXPECT_EQ(error_of({.positions = beyond}, 1, 4),
            "positions: expected 0 to 2^31 - 1, got 2147483648");
}

TEST(TokenLayout, PositionsOfPaddingAreNotLookedAt) {
  const std::vector<Position> positions{4, -9, -9, 5};
  const std::vector<Index> lengths{1, 1};
  EXPECT_EQ(error_of({.lengths = lengths, .positions = positions}, 2, 2),
            "positions: expected 0 to 2^31 - 1, got -9");  // the first of the second row
  const std::vector<Index> uneven{1, 0};
  EXPECT_EQ(error_of({.lengths = uneven, .positions = positions}, 2, 2), "no vha::Error");
  const std::vector<Index> last{0, 1};
  EXPECT_EQ(error_of({.lengths = last, .padding = Padding::left, .positions = positions}, 2, 2),
            "no vha::Error");
}

}  // namespace
