// SPDX-License-Identifier: Apache-2.0
// The laws again where a sequence is longer than the blocks that the library takes it in: 256 keys,
// 512 tokens, 512 query rows of a group.

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

using vha::Index;

constexpr naive::Index tokens = 700;
constexpr LayerShape shapes[] = {
    {"full attention", 5, 4, 3, 2},
    {.name = "window beyond a block of keys",
     .hidden = 5,
     .head_dim = 4,
     .physical_heads = 3,
     .kv_heads = 2,
     .window = 300},
};

template <class T>
class LongSequence : public testing::Test {
 protected:
  using Layer = vha::VhaAttention<T>;

  /// Calls `body(layer, x, twin, allowed)`.
  template <class Body>
  void for_each_layer(Body&& body) {
    Random random(1);
    for (const LayerShape& shape : shapes) {
      SCOPED_TRACE(shape.name);
      const auto twin = random_layer<T>(shape, random);
      const auto x = random_tokens<T>(tokens, twin, random);
      body(library_layer<Layer>(twin), matrix_of<T>(x, tokens), twin, tolerance<T>(tokens));
    }
  }
};
using Scalars = testing::Types<double, float>;
TYPED_TEST_SUITE(LongSequence, Scalars);

TYPED_TEST(LongSequence, IsTheTwins) {
  this->for_each_layer([](const auto& layer, const auto& x, const auto& twin, double allowed) {
    const naive::Vector values(x.data(), x.data() + x.size());
    const auto expected = naive::forward(twin, values, counted_positions(tokens)).out;
    EXPECT_TRUE(close(run(layer, x), expected, allowed));
    EXPECT_TRUE(close(run(vha::fold_vha(layer), x), expected, allowed));
  });
}

TYPED_TEST(LongSequence, FedInChunksGivesTheRowsOfOnePrefill) {
  this->for_each_layer([](const auto& layer, const auto& x, const auto&, double) {
    const Array expected = run(layer, x);
    for (const std::vector<Index>& chunks :
         {std::vector<Index>{513, 187}, {255, 1, 1, 1, 254, 1, 187}, {1, 699}, {699, 1}}) {
      vha::KvCache<TypeParam> cache(layer.config(), 1, x.rows());
      EXPECT_TRUE(same_bits(run_in_chunks(layer, x, cache, chunks), expected))
          << testing::PrintToString(chunks);
    }
  });
}

TYPED_TEST(LongSequence, KeepsLaterTokensFromEarlierRows) {
  this->for_each_layer([](const auto& layer, const auto& x, const auto&, double) {
    const Array all = run(layer, x);
    for (const Index kept : {1, 255, 256, 512, 513, 699}) {
      auto changed = x;
      changed.bottomRows(x.rows() - kept).setConstant(std::numeric_limits<TypeParam>::quiet_NaN());
      EXPECT_TRUE(same_bits(first_rows(run(layer, changed), kept), first_rows(all, kept)))
          << "tokens from " << kept << " on are NaN";
    }
  });
}

TYPED_TEST(LongSequence, InAPaddedBatchIsItsRowsAlone) {
  this->for_each_layer([](const auto& layer, const auto& x, const auto&, double) {
    const std::vector<Index> lengths{100, 300, 700, 1, 600};
    const Index rows = static_cast<Index>(lengths.size()), hidden = x.cols();
    for (const auto padding : {vha::Padding::left, vha::Padding::right}) {
      vha::Tensor3<TypeParam> batch(rows, x.rows(), hidden);
      batch.setConstant(std::numeric_limits<TypeParam>::quiet_NaN());
      Array expected{{rows, x.rows(), hidden}, {}};
      expected.values.resize(static_cast<std::size_t>(batch.size()), 0);
      const vha::TokenLayout layout{.lengths = lengths, .padding = padding};
      for (Index row = 0; row < rows; ++row) {
        const auto alone = x.bottomRows(layout.length(row, x.rows())).eval();
        const auto first = (row * x.rows() + layout.first(row, x.rows())) * hidden;
        std::copy_n(alone.data(), alone.size(), batch.data() + first);
        const Array outputs = run(layer, alone);
        std::copy(outputs.values.begin(), outputs.values.end(), expected.values.begin() + first);
      }
      EXPECT_TRUE(same_bits(run(layer, batch, layout), expected));
    }
  });
}

}  // namespace
}  // namespace laws
