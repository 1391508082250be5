// SPDX-License-Identifier: Apache-2.0
// A row of a padded batch is the row alone, to the bit, wherever its padding stands and whatever is
// in it.

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

using vha::Index;
using vha::Padding;

/// Rows of uneven lengths, each with a cache of its own, and one batch of them with one cache.
template <class Layer>
class Rows {
 public:
  using T = typename Layer::T;

  Rows(const naive::Layer& twin, Index capacity, Index rows)
      : layer_(library_layer<Layer>(twin)), batch_cache_(layer_.config(), rows, capacity) {
    for (Index row = 0; row < rows; ++row) row_caches_.emplace_back(layer_.config(), 1, capacity);
  }

  /// Feeds `lengths[row]` new tokens to each row and expects the batch to give what the rows give.
  void feed(const std::vector<Index>& lengths, Padding padding, bool give_positions,
            Random& random) {
    const Index tokens = *std::max_element(lengths.begin(), lengths.end());
    const Index rows = static_cast<Index>(lengths.size()), hidden = layer_.config().hidden;
    vha::Tensor3<T> x(rows, tokens, hidden);
    x.setConstant(std::numeric_limits<T>::quiet_NaN());
    std::vector<vha::Position> positions(static_cast<std::size_t>(rows * tokens), -7);
    Array expected{{rows, tokens, hidden}, {}};
    expected.values.resize(static_cast<std::size_t>(x.size()), 0);  // zeros for padding
    for (Index row = 0; row < rows; ++row) {
      const Index length = lengths[static_cast<std::size_t>(row)];
      const Index first = padding == Padding::left ? tokens - length : 0;
      auto& cache = row_caches_[static_cast<std::size_t>(row)];
      vha::RowMajorMatrix<T> alone(length, hidden);
      for (Index t = 0; t < length; ++t) {
        positions[static_cast<std::size_t>(row * tokens + first + t)] = cache.next_position(0) + t;
        for (Index c = 0; c < hidden; ++c) {
          alone(t, c) = static_cast<T>(random());
          x(row, first + t, c) = alone(t, c);
        }
      }
      const Array outputs = run(layer_, alone, cache);
      std::copy(outputs.values.begin(), outputs.values.end(),
                expected.values.begin() + (row * tokens + first) * hidden);
    }
    vha::TokenLayout layout{.lengths = lengths, .padding = padding};
    if (give_positions) layout.positions = positions;
    EXPECT_TRUE(same_bits(run(layer_, x, batch_cache_, layout), expected));
    for (Index row = 0; row < rows; ++row) {
      EXPECT_EQ(batch_cache_.length(row), row_caches_[static_cast<std::size_t>(row)].length());
    }
  }

 private:
  Layer layer_;
  std::vector<vha::KvCache<T>> row_caches_;
  vha::KvCache<T> batch_cache_;
};

template <class Kind>
class Batch : public testing::Test {
 protected:
  using S = typename Kind::S;

  /// A prefill of uneven rows, three decoded tokens, and a chunk that some rows take no part in.
  template <class Layer>
  void expect_rows_alone(std::uint32_t seed, Padding padding, bool give_positions) {
    Random random(seed);
    for_each_shape<Kind>([&](const LayerShape& shape, naive::Index tokens) {
      const auto longest = static_cast<Index>(tokens);
      Rows<Layer> rows(random_gated_layer<S>(shape, random), longest + 9, 5);
      rows.feed({longest, 0, (longest + 1) / 2, 1, longest - 1}, padding, give_positions, random);
      for (int step = 0; step < 3; ++step) {
        rows.feed({1, 1, 1, 1, 1}, padding, give_positions, random);
      }
      rows.feed({0, 5, 2, 0, 4}, padding, give_positions, random);
    });
  }
};
TYPED_TEST_SUITE(Batch, Kinds);

TYPED_TEST(Batch, PaddedRightIsItsRowsAlone) {
  this->template expect_rows_alone<typename TypeParam::Vha>(1, Padding::right, false);
  this->template expect_rows_alone<typename TypeParam::Gated>(2, Padding::right, true);
}

TYPED_TEST(Batch, PaddedLeftIsItsRowsAlone) {
  this->template expect_rows_alone<typename TypeParam::Vha>(3, Padding::left, true);
  this->template expect_rows_alone<typename TypeParam::Gated>(4, Padding::left, false);
}

}  // namespace
}  // namespace laws
