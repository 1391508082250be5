// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>
#include <vha/ops/matrix_tiles.hpp>

namespace {

using vha::Index;
using vha::detail::BFloat16Pair;
using vha::detail::SumInto;
using vha::detail::tile_side;

float term(BFloat16Pair pair, Index which) {
  return std::bit_cast<float>(which == 0 ? pair.bits << 16 : pair.bits & 0xFFFF0000U);
}

std::vector<BFloat16Pair> random_pairs(Index count, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> number(-1, 1);
  std::vector<BFloat16Pair> result(static_cast<std::size_t>(count));
  const auto bits = [&] { return std::bit_cast<std::uint32_t>(number(generator)); };
  for (auto& pair : result) pair.bits = bits() >> 16 | (bits() & 0xFFFF0000U);
  return result;
}

/// One product: C `[rows, cols]` of tiles of `tile_rows` rows.
template <int RowTiles, int ColTiles>
void check(Index tile_rows, Index rows, Index chunks, Index cols, SumInto into) {
  SCOPED_TRACE(testing::Message() << rows << 'x' << chunks << 'x' << cols << " in tiles of "
                                  << tile_rows << " rows, " << static_cast<int>(into));
  constexpr Index width = ColTiles * tile_side;
  const Index lines = RowTiles * tile_rows, stride = width + 5;
  const auto a = random_pairs(chunks * lines * tile_side, 1);
  const auto b = random_pairs(chunks * tile_side * width, 2);
  const auto rows_of_a = vha::detail::packed_tile_rows(a.data(), lines);
  const vha::detail::TileColumnsOfB columns_of_b{b.data(), width};
  const std::vector<float> before(static_cast<std::size_t>(rows * stride), 3);

  std::vector<float> c = before;
  const vha::detail::TileRegisters registers(tile_rows);
  Index seen = 0;
  vha::detail::multiply_tiles<RowTiles, ColTiles>(registers, chunks, rows_of_a, columns_of_b,
                                                  c.data(), stride, rows, cols, into,
                                                  [&](Index chunk) { EXPECT_EQ(chunk, seen++); });
  EXPECT_EQ(seen, chunks);

  for (Index row = 0; row < rows; ++row) {
    for (Index col = 0; col < stride; ++col) {
      double expected = into == SumInto::replace && col < cols ? 0 : 3;
      for (Index step = 0; col < cols && step < chunks * tile_side; ++step) {
        const Index at = (step / tile_side * lines + row) * tile_side + step % tile_side;
        const auto left = a[static_cast<std::size_t>(at)];
        const auto right = b[static_cast<std::size_t>(step * width + col)];
        for (const Index which : {0, 1}) expected += double(term(left, which)) * term(right, which);
      }
      ASSERT_NEAR(c[static_cast<std::size_t>(row * stride + col)], expected, 1e-6 * double(chunks))
          << row << ' ' << col;
    }
  }

  std::vector<float> by_software = before;
  vha::detail::multiply_by<RowTiles, ColTiles>(vha::detail::SoftwareTiles(tile_rows), tile_rows,
                                               chunks, rows_of_a, columns_of_b, by_software.data(),
                                               stride, rows, cols, into, [](Index) {});
  EXPECT_EQ(c, by_software);
}

TEST(MatrixTiles, MultiplyAsPlainLoopsDoAndSoftwareToTheBit) {
  for (const auto into : {SumInto::replace, SumInto::go_on, SumInto::add}) {
    for (const Index chunks : {0, 1, 2, 7}) {
      check<2, 2>(16, 32, chunks, 32, into);
      check<2, 2>(16, 31, chunks, 32, into);
      check<2, 2>(16, 17, chunks, 9, into);
      check<2, 1>(16, 32, chunks, 16, into);
      check<1, 2>(16, 16, chunks, 32, into);
      check<1, 1>(16, 1, chunks, 1, into);
      check<1, 4>(16, 16, chunks, 64, into);
      for (const Index tile_rows : {1, 3, 8}) check<1, 4>(tile_rows, tile_rows, chunks, 64, into);
    }
  }
}

// The processor's own order: even terms, odd terms, both together, then what the sum was.
TEST(MatrixTiles, SumEvenAndOddTermsApart) {
  const auto pair = [](float even, float odd) {
    return BFloat16Pair{std::bit_cast<std::uint32_t>(even) >> 16 |
                        (std::bit_cast<std::uint32_t>(odd) & 0xFFFF0000U)};
  };
  const float big = 0x1p30F;
  // In the order of the terms, or with C first, 1 would be lost.
  std::vector<BFloat16Pair> a(16, pair(1, 1)), b(16 * 16);
  for (std::size_t col = 0; col < 16; ++col) {
    b[col] = pair(big, 1);
    b[16 + col] = pair(-big, 0);
  }
  float c[16] = {};
  const vha::detail::TileRegisters registers(1);
  vha::detail::multiply_tiles<1, 1>(registers, 1, vha::detail::packed_tile_rows(a.data(), 1),
                                    {b.data(), 16}, c, 16, 1, 16, SumInto::replace, [](Index) {});
  for (const float sum : c) EXPECT_EQ(sum, 1.0F);
}

TEST(MatrixTiles, KeepInfinitiesAndNaNInTheirColumns) {
  const auto one = std::bit_cast<std::uint32_t>(1.0F) >> 16;
  const auto nan = std::bit_cast<std::uint32_t>(std::numeric_limits<float>::quiet_NaN()) >> 16;
  std::vector<BFloat16Pair> a(16, BFloat16Pair{one}), b(16 * 16, BFloat16Pair{one});
  b[3].bits = nan;
  float c[16] = {};
  const vha::detail::TileRegisters registers(1);
  vha::detail::multiply_tiles<1, 1>(registers, 1, vha::detail::packed_tile_rows(a.data(), 1),
                                    {b.data(), 16}, c, 16, 1, 16, SumInto::replace, [](Index) {});
  for (std::size_t col = 0; col < 16; ++col) {
    if (col == 3) {
      EXPECT_TRUE(std::isnan(c[col]));
    } else {
      EXPECT_EQ(c[col], 16.0F) << col;
    }
  }
}

}  // namespace
