// SPDX-License-Identifier: Apache-2.0
// Fault: a full cache that overwrites its oldest or its neighbour's tokens, or is left half
// written.

#include "fault_support.hpp"

namespace faults {
namespace {

template <class S>
class Fault09CacheCapacity : public testing::Test {
 protected:
  using Cache = vha::KvCache<S>;

  /// All that the cache says of its sequences, to the bit.
  static std::vector<std::uint64_t> contents(const Cache& cache) {
    std::vector<std::uint64_t> all;
    for (Index row = 0; row < cache.batch(); ++row) {
      all.push_back(static_cast<std::uint64_t>(cache.length(row)));
      for (const Position p : cache.positions(row)) all.push_back(static_cast<std::uint64_t>(p));
      for (const auto& heads : {cache.keys(row), cache.values(row)}) {
        vha::for_each_head(heads, [&](Index, const S* head) {
          for (Index c = 0; c < heads.head_dim; ++c) all.push_back(bits(head[c]));
        });
      }
    }
    return all;
  }

  static void append(Cache& cache, Index row, Index tokens, Random& random) {
    const auto heads = random_matrix<S>(tokens, 2 * 6, random);
    const auto view = vha::token_major_heads(heads.data(), tokens, Index(2), Index(1), Index(6));
    cache.append(row, vha::HeadsView<const S>(view), vha::HeadsView<const S>(view),
                 counted(tokens, cache.length(row)));
  }
};
TYPED_TEST_SUITE(Fault09CacheCapacity, Scalars);

TYPED_TEST(Fault09CacheCapacity, AChunkThatDoesNotFitIsRefusedWhole) {
  Random random(1);
  for (const Index batch : {1, 3}) {
    typename TestFixture::Cache cache(
        {.batch = batch, .kv_heads = 2, .head_dim = 6, .capacity = 4});
    for (Index row = 0; row < batch; ++row) this->append(cache, row, 3, random);
    for (Index row = 0; row < batch; ++row) {
      const auto before = this->contents(cache);
      for (const Index tokens : {2, 5, 1000}) {
        EXPECT_TRUE(refuses([&] { this->append(cache, row, tokens, random); },
                            {"kv_cache", "at most 4", vha::text("got ", 3 + tokens)}));
        EXPECT_EQ(this->contents(cache), before);
      }
      EXPECT_EQ(cache.length(row), 3);
      this->append(cache, row, 1, random);
      EXPECT_EQ(cache.length(row), 4);
      EXPECT_TRUE(refuses([&] { this->append(cache, row, 1, random); },
                          {"kv_cache", "at most 4", "got 5"}));
    }
  }
}

TYPED_TEST(Fault09CacheCapacity, ALayerRefusesBeforeItWritesAnything) {
  using T = vha::Compute<TypeParam>;
  using Layer = vha::VhaAttention<TypeParam>;
  Random random(2);
  const auto layer =
      random_layer<Layer>({.hidden = 5, .head_dim = 6, .query_heads = 4, .kv_heads = 2}, random);
  const auto x = random_matrix<T>(6, 5, random);
  vha::KvCache<TypeParam> cache(layer.config(), 1, 4), enough(layer.config(), 1, 6);
  layer.forward(x.topRows(3), cache);
  const auto before = this->contents(cache);
  RowMajorMatrix<T> out = RowMajorMatrix<T>::Constant(2, 5, T(7));
  typename Layer::Workspace workspace;
  EXPECT_TRUE(refuses([&] { layer.forward_into(x.middleRows(3, 2), cache, out, workspace); },
                      {"kv_cache", "at most 4", "got 5"}));
  EXPECT_TRUE((out.array() == T(7)).all());
  EXPECT_EQ(this->contents(cache), before);
  layer.forward(x.topRows(3), enough);
  EXPECT_TRUE(same_bits(layer.forward(x.middleRows(3, 1), cache),
                        layer.forward(x.middleRows(3, 1), enough)));
  EXPECT_EQ(cache.length(), 4);

  // One row of a batch without room is enough, wherever it stands.
  for (const Index full : {0, 1, 2}) {
    vha::KvCache<TypeParam> batch_cache(layer.config(), 3, 4);
    this->append(batch_cache, full, 3, random);
    const auto batch_before = this->contents(batch_cache);
    vha::Tensor3<T> batch(3, 2, 5);
    batch.setZero();
    EXPECT_TRUE(refuses([&] { layer.forward(batch, batch_cache); },
                        {"kv_cache", "at most 4", "got 5", vha::text("sequence ", full)}));
    EXPECT_EQ(this->contents(batch_cache), batch_before);
    std::vector<Index> lengths = {2, 2, 2};
    lengths[static_cast<std::size_t>(full)] = 1;  // with one token less it fits
    layer.forward(batch, batch_cache, {.lengths = lengths});
    EXPECT_EQ(batch_cache.length(full), 4);
  }
}

TYPED_TEST(Fault09CacheCapacity, SizesThatCannotBe) {
  const auto error = [](Index batch, Index heads, Index key, Index value, Index capacity) {
    return error_of([&] {
      typename TestFixture::Cache cache({batch, heads, key, value, capacity});
    });
  };
  EXPECT_EQ(error(1, 2, 6, 0, 0), "capacity: expected 1 or more, got 0");
  EXPECT_EQ(error(1, 2, 6, 0, -4), "capacity: expected 1 or more, got -4");
  EXPECT_EQ(error(0, 2, 6, 0, 4), "batch: expected 1 or more, got 0");
  EXPECT_EQ(error(1, 0, 6, 0, 4), "kv_heads: expected 1 or more, got 0");
  EXPECT_EQ(error(1, 2, 0, 0, 4), "head_dim: expected 1 or more, got 0");
  EXPECT_EQ(error(1, 2, 6, -1, 4), "value_dim: expected 1 or more, got -1");
  const Index large = Index(1) << 32, half = Index(1) << 61;
  for (const auto& text :
       {error(large, 2, 6, 0, large), error(1, 2, 6, 0, half), error(1, half, 8, 0, 4),
        error(large, large, large, 0, large), error(1, 1, 2, half, 8)}) {
    EXPECT_NE(text.find("expected at most 9223372036854775807"), std::string::npos) << text;
  }
}

// Products that fit, but whose sum does not.
TEST(Fault09CacheSizes, KeysAndValuesTogether) {
  const Index half = Index(1) << 62;
  EXPECT_TRUE(refuses(
      [&] {
        vha::KvCache<float> cache({1, 1, half, half, 1});
      },
      {"cache", "at most 9223372036854775807"}));
}

TEST(Fault09CacheSizes, MoreTokensThanCanBeCounted) {
  vha::KvCache<float> cache({.batch = 1, .kv_heads = 1, .head_dim = 2, .capacity = 4});
  cache.commit(0, 3);
  EXPECT_TRUE(refuses([&] { cache.require_room(0, std::numeric_limits<Index>::max()); },
                      {"kv_cache", "at most 4"}));
  EXPECT_EQ(cache.length(), 3);
}

}  // namespace
}  // namespace faults
