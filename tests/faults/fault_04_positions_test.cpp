// SPDX-License-Identifier: Apache-2.0
// Fault: one count of positions for all rows of a batch, so that a padded row is rotated and masked
// as if its padding were text.

#include "fault_support.hpp"

namespace faults {
namespace {

template <class S>
class Fault04PositionsPerRow : public testing::Test {
 protected:
  using Number = vha::Compute<S>;
  using Layer = vha::VhaAttention<S>;
  static constexpr vha::AttentionConfig configs[3] = {
      {.hidden = 7, .head_dim = 6, .query_heads = 6, .kv_heads = 3},
      {.hidden = 5, .head_dim = 8, .query_heads = 4, .kv_heads = 2, .window = 4},
      {.hidden = 4, .head_dim = 10, .query_heads = 3, .kv_heads = 1, .rotary_dim = 4}};
};
TYPED_TEST_SUITE(Fault04PositionsPerRow, Scalars);

/// Rows `[tokens, hidden]` of several lengths in one batch, NaN elsewhere.
template <class T>
vha::Tensor3<T> padded(const std::vector<RowMajorMatrix<T>>& rows, Index tokens,
                       vha::Padding padding) {
  vha::Tensor3<T> x(static_cast<Index>(rows.size()), tokens, rows.front().cols());
  x.setConstant(nan_of<T>);
  for (Index row = 0; row < x.dimension(0); ++row) {
    const auto& alone = rows[static_cast<std::size_t>(row)];
    const Index first = padding == vha::Padding::left ? tokens - alone.rows() : 0;
    for (Index t = 0; t < alone.rows(); ++t) {
      for (Index c = 0; c < alone.cols(); ++c) x(row, first + t, c) = alone(t, c);
    }
  }
  return x;
}

TYPED_TEST(Fault04PositionsPerRow, APaddedRowIsTheRowAlone) {
  using Matrix = RowMajorMatrix<typename TestFixture::Number>;
  Random random(1);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    const auto folded = vha::fold_vha(layer);
    const std::vector<Index> lengths = {9, 2, 6, 0};
    for (const auto padding : {vha::Padding::left, vha::Padding::right}) {
      const auto expect_rows_alone = [&](const auto& any_layer) {
        std::vector<vha::KvCache<TypeParam>> caches;
        vha::KvCache<TypeParam> batch_cache(config, 4, 16);
        const auto feed = [&](const std::vector<Index>& counts, Index tokens) {
          std::vector<Matrix> rows, expected;
          for (std::size_t row = 0; row < counts.size(); ++row) {
            rows.push_back(
                random_matrix<typename TestFixture::Number>(counts[row], config.hidden, random));
            expected.push_back(any_layer.forward(rows.back(), caches[row]));
          }
          const auto out = any_layer.forward(padded(rows, tokens, padding), batch_cache,
                                             {.lengths = counts, .padding = padding});
          for (Index row = 0; row < 4; ++row) {
            const auto& alone = expected[static_cast<std::size_t>(row)];
            Matrix all = Matrix::Zero(tokens, config.hidden);  // padding gives zeros
            all.middleRows(padding == vha::Padding::left ? tokens - alone.rows() : 0,
                           alone.rows()) = alone;
            const Eigen::Map<const Matrix> batched(&out(row, 0, 0), tokens, config.hidden);
            EXPECT_TRUE(same_bits(batched, all)) << "row " << row;
          }
        };
        for (int row = 0; row < 4; ++row) caches.emplace_back(config, 1, 16);
        feed(lengths, 9);
        for (int step = 0; step < 3; ++step) feed({1, 1, 1, 1}, 1);
      };
      expect_rows_alone(layer);
      expect_rows_alone(folded);
    }
  }
}

// RoPE depends on differences of positions alone.
TYPED_TEST(Fault04PositionsPerRow, AThousandMoreChangesNothing) {
  using Matrix = RowMajorMatrix<typename TestFixture::Number>;
  const double limit = sizeof(typename TestFixture::Number) == 8 ? 1e-9 : 1e-3;
  Random random(2);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    const Matrix x = random_matrix<typename TestFixture::Number>(9, config.hidden, random);
    const auto shifted = counted(9, 1000);
    EXPECT_LE(largest_difference(layer.forward(x, {.positions = shifted}), layer.forward(x)),
              limit);

    // Given to the prefill alone, decoding goes on from there; a cache in double adds no rounding.
    vha::KvCache<double> cache(config, 1, 9);
    Matrix outputs(9, config.hidden);
    outputs.topRows(6) =
        layer.forward(Matrix(x.topRows(6)), cache, {.positions = std::span(shifted).first(6)});
    for (Index t = 6; t < 9; ++t) outputs.row(t) = layer.forward(x.middleRows(t, 1), cache);
    EXPECT_EQ(cache.next_position(0), 1009);
    EXPECT_LE(largest_difference(outputs, layer.forward(x)), limit);

    // Rows of one batch may stand anywhere.
    vha::Tensor3<typename TestFixture::Number> batch(2, 9, config.hidden);
    std::copy_n(x.data(), x.size(), batch.data());
    std::copy_n(x.data(), x.size(), batch.data() + x.size());
    auto positions = counted(9);
    positions.insert(positions.end(), shifted.begin(), shifted.end());
    const auto both = layer.forward(batch, {.positions = positions});
    EXPECT_TRUE(
        same_bits(Eigen::Map<const Matrix>(both.data(), 9, config.hidden), layer.forward(x)));
    EXPECT_TRUE(same_bits(Eigen::Map<const Matrix>(both.data() + x.size(), 9, config.hidden),
                          layer.forward(x, {.positions = shifted})));
  }
}

// And yet they are looked at: gaps between tokens change what a layer computes.
TYPED_TEST(Fault04PositionsPerRow, DifferencesOfPositionsDoMatter) {
  Random random(3);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    const auto x = random_matrix<typename TestFixture::Number>(4, config.hidden, random);
    const std::vector<Position> gaps = {0, 1, 2, 9};
    EXPECT_GT(largest_difference(layer.forward(x, {.positions = gaps}), layer.forward(x)), 1e-2);
  }
}

}  // namespace
}  // namespace faults
