// SPDX-License-Identifier: Apache-2.0
// Decoding through a cache, in chunks of any size, gives the rows of one prefill, to the bit.

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

using Chunks = std::vector<Eigen::Index>;

/// Ways to feed `tokens` to a cache.
std::vector<Chunks> chunkings(naive::Index tokens) {
  const auto count = static_cast<Eigen::Index>(tokens);
  std::vector<Chunks> result{{count}, Chunks(tokens, 1)};
  if (count < 9) return result;
  result.push_back({count - 1, 1});
  result.push_back({1, count - 1});
  result.push_back({5, 1, 1, count - 7});
  result.push_back({0, count - 8, 0, 3, 5});
  return result;
}

/// Everything in a cache.
template <class C>
Array contents(const vha::KvCache<C>& cache) {
  Array all{{cache.length(), cache.bytes_per_token() / static_cast<Eigen::Index>(sizeof(C)) + 1},
            {}};
  for (Eigen::Index t = 0; t < cache.length(); ++t) {
    for (const auto& heads : {cache.keys(0), cache.values(0)}) {
      vha::for_each_head(heads.slice(t, 1), [&](Eigen::Index, const C* head) {
        for (Eigen::Index c = 0; c < heads.head_dim; ++c) {
          all.values.push_back(static_cast<double>(head[c]));
        }
      });
    }
    all.values.push_back(static_cast<double>(cache.positions(0)[static_cast<std::size_t>(t)]));
  }
  return all;
}

template <class Kind>
class Cache : public testing::Test {
 protected:
  using S = typename Kind::S;
  using T = typename Kind::T;

  /// Calls `body(layer, x, allowed)`.
  template <class Layer, class Body>
  void for_each_layer(std::uint32_t seed, Body&& body) {
    Random random(seed);
    for_each_shape<Kind>([&](const LayerShape& shape, naive::Index tokens) {
      const auto twin = Layer::Weights::has_gate ? random_gated_layer<S>(shape, random)
                                                 : random_layer<S>(shape, random);
      const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
      body(library_layer<Layer>(twin), x, tolerance<T>(longest_sum(twin, tokens)));
    });
  }

  template <class C, class Layer>
  static vha::KvCache<C> cache_for(const Layer& layer, Eigen::Index capacity) {
    return {layer.config(), 1, capacity};
  }
};
TYPED_TEST_SUITE(Cache, Kinds);

TYPED_TEST(Cache, FedInAnyChunksGivesTheRowsOfOnePrefill) {
  using C = typename TypeParam::T;
  const auto law = [](const auto& layer, const auto& x, double) {
    const Array expected = run(layer, x);
    for (const Chunks& chunks : chunkings(static_cast<naive::Index>(x.rows()))) {
      auto cache = TestFixture::template cache_for<C>(layer, x.rows());
      EXPECT_TRUE(same_bits(run_in_chunks(layer, x, cache, chunks), expected))
          << testing::PrintToString(chunks);
    }
  };
  this->template for_each_layer<typename TypeParam::Vha>(1, law);
  this->template for_each_layer<typename TypeParam::Gated>(2, law);
}

TYPED_TEST(Cache, HoldsTheSameBitsWhateverTheChunks) {
  using C = typename TypeParam::S;
  this->template for_each_layer<typename TypeParam::Vha>(
      3, [](const auto& layer, const auto& x, double) {
        auto prefilled = TestFixture::template cache_for<C>(layer, x.rows());
        const Array expected = run(layer, x, prefilled);
        for (const Chunks& chunks : chunkings(static_cast<naive::Index>(x.rows()))) {
          auto cache = TestFixture::template cache_for<C>(layer, x.rows() + 3);
          EXPECT_TRUE(same_bits(run_in_chunks(layer, x, cache, chunks), expected))
              << testing::PrintToString(chunks);
          EXPECT_TRUE(same_bits(contents(cache), contents(prefilled)))
              << testing::PrintToString(chunks);
        }
      });
}

TYPED_TEST(Cache, StoredNarrowlyIsTheLayerUpToRounding) {
  this->template for_each_layer<typename TypeParam::Vha>(
      4, [](const auto& layer, const auto& x, double) {
        const Array expected = run(layer, x);
        auto narrow = TestFixture::template cache_for<vha::bfloat16>(layer, x.rows());
        EXPECT_TRUE(close(run(layer, x, narrow), expected, tolerance<vha::bfloat16>(1)));
        auto less_narrow = TestFixture::template cache_for<vha::half>(layer, x.rows());
        EXPECT_TRUE(close(run(layer, x, less_narrow), expected, tolerance<vha::half>(1)));
      });
}

TYPED_TEST(Cache, TruncatedAndRefilledGivesTheSameBits) {
  using C = typename TypeParam::T;
  this->template for_each_layer<typename TypeParam::Vha>(
      5, [](const auto& layer, const auto& x, double) {
        if (x.rows() == 1) return;
        const Eigen::Index kept = x.rows() / 2, rest = x.rows() - kept;
        auto fresh = TestFixture::template cache_for<C>(layer, x.rows());
        const Array expected = run_in_chunks(layer, x, fresh, {kept, rest});

        auto reused = TestFixture::template cache_for<C>(layer, x.rows());
        auto other = x;
        other.bottomRows(rest).setConstant(std::numeric_limits<C>::quiet_NaN());
        run(layer, other, reused);
        reused.truncate(0, kept);
        EXPECT_TRUE(same_bits(contents(reused.copy()), contents(reused)));
        const Array again = run(layer, x.bottomRows(rest), reused);
        const auto begin = expected.values.end() - static_cast<std::ptrdiff_t>(again.values.size());
        EXPECT_TRUE(same_bits(again, {again.shape, {begin, expected.values.end()}}));
      });
}

TYPED_TEST(Cache, ServesUnfoldedPrefillAndFoldedDecodeInTurns) {
  using Stored = typename TypeParam::S;
  using C = typename TypeParam::T;
  this->template for_each_layer<typename TypeParam::Vha>(
      6, [](const auto& layer, const auto& x, double allowed) {
        const Array expected = run(layer, x);
        allowed = std::max(allowed, tolerance<Stored>(1));  // the folded weights are rounded
        const auto served = vha::serve_unfolded_prefill(layer);
        for (const Chunks& chunks : chunkings(static_cast<naive::Index>(x.rows()))) {
          auto cache = TestFixture::template cache_for<C>(layer, x.rows());
          EXPECT_TRUE(close(run_in_chunks(served, x, cache, chunks), expected, allowed))
              << testing::PrintToString(chunks);
        }
        // Either form goes on in a cache that the other filled.
        if (x.rows() == 1) return;
        auto cache = TestFixture::template cache_for<C>(layer, x.rows());
        Array outputs = run(served.decode, x.topRows(x.rows() / 2), cache);
        const Array rest = run(served.prefill, x.bottomRows(x.rows() - x.rows() / 2), cache);
        outputs.values.insert(outputs.values.end(), rest.values.begin(), rest.values.end());
        outputs.shape[0] += rest.shape[0];
        EXPECT_TRUE(close(outputs, expected, allowed));
      });
}

}  // namespace
}  // namespace laws
