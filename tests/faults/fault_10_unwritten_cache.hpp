// SPDX-License-Identifier: Apache-2.0
#pragma once

// Fault: what stands in memory that was never written, or written and forgotten, reaches a result,
// as 0 · NaN does. Compiled as usual and with -ffast-math.

#include <optional>

#include "fault_support.hpp"

namespace faults {
namespace {

template <class S>
class Fault10UnwrittenCache : public testing::Test {
 protected:
  using T = vha::Compute<S>;
  using Layer = vha::VhaAttention<S>;

  /// A cache whose whole storage was filled with `filler`, and whose positions with `position`.
  static vha::KvCache<S> filled_cache(const vha::AttentionConfig& config, Index batch,
                                      Index capacity, S filler, Position position) {
    vha::KvCache<S> cache(config, batch, capacity);
    const std::vector<S> heads(static_cast<std::size_t>(capacity * config.kv_width()), filler);
    const auto view =
        vha::token_major_heads(heads.data(), capacity, config.kv_heads, Index(1), config.head_dim);
    const std::vector<Position> positions(static_cast<std::size_t>(capacity), position);
    for (Index row = 0; row < batch; ++row) {
      cache.append(row, view, view, positions);
      cache.truncate(row, 0);
    }
    return cache;
  }

  static std::vector<S> fillers() {
    const S infinity = std::numeric_limits<S>::infinity();
    return {nan_of<S>, infinity, vha::convert<S>(-std::numeric_limits<double>::infinity())};
  }

  /// Calls `body(cache)`, which returns outputs, for every filler and expects those of zeros.
  template <class Body>
  static void expect_the_same(const vha::AttentionConfig& config, Index batch, Index capacity,
                              Body&& body) {
    const auto run = [&](S filler, Position position) {
      auto cache = filled_cache(config, batch, capacity, filler, position);
      return body(cache);
    };
    const std::vector<T> expected = run(vha::convert<S>(0.0), 0);
    for (const T value : expected) ASSERT_TRUE(vha::is_finite(value));
    for (const S filler : fillers()) {
      for (const Position position : {0, 12345, std::numeric_limits<std::int32_t>::max()}) {
        EXPECT_TRUE(same_bits(run(filler, position), expected))
            << filler << " at position " << position;
      }
    }
  }

  static void append(std::vector<T>& all, const auto& part) {
    all.insert(all.end(), part.data(), part.data() + part.size());
  }

  static vha::Tensor3<T> random_batch(Index batch, Index tokens, Index hidden, Random& random) {
    vha::Tensor3<T> x(batch, tokens, hidden);
    for (Index k = 0; k < x.size(); ++k) x.data()[k] = static_cast<T>(random());
    return x;
  }

  static constexpr vha::AttentionConfig configs[3] = {
      {.hidden = 9, .head_dim = 6, .query_heads = 6, .kv_heads = 3},
      {.hidden = 5, .head_dim = 34, .query_heads = 2, .kv_heads = 2, .window = 3},
      {.hidden = 3, .head_dim = 2, .query_heads = 5, .kv_heads = 1}};
};
TYPED_TEST_SUITE(Fault10UnwrittenCache, Scalars);

TYPED_TEST(Fault10UnwrittenCache, BehindTheLength) {
  Random random(1);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    for (const Index capacity : {9, 40}) {
      const auto x = random_matrix<typename TestFixture::T>(9, config.hidden, random);
      this->expect_the_same(config, 1, capacity, [&](auto& cache) {
        std::vector<typename TestFixture::T> outputs;
        this->append(outputs, layer.forward(x.topRows(5), cache));
        for (Index token = 5; token < 9; ++token) {
          this->append(outputs, layer.forward(x.middleRows(token, 1), cache));
        }
        return outputs;
      });
    }
  }
}

TYPED_TEST(Fault10UnwrittenCache, InRowsOfUnevenLength) {
  Random random(2);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    const auto prompt = this->random_batch(3, 6, config.hidden, random);
    const auto next = this->random_batch(3, 1, config.hidden, random);
    for (const auto padding : {vha::Padding::left, vha::Padding::right}) {
      this->expect_the_same(config, 3, 20, [&](auto& cache) {
        const std::vector<Index> lengths = {6, 1, 4}, some = {1, 0, 1};
        std::vector<typename TestFixture::T> outputs;
        this->append(outputs,
                     layer.forward(prompt, cache, {.lengths = lengths, .padding = padding}));
        this->append(outputs, layer.forward(next, cache));
        this->append(outputs, layer.forward(next, cache, {.lengths = some, .padding = padding}));
        return outputs;
      });
    }
  }
}

TYPED_TEST(Fault10UnwrittenCache, AfterTruncateAndReuse) {
  Random random(3);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    const auto x = random_matrix<typename TestFixture::T>(8, config.hidden, random);
    const std::vector<typename TestFixture::T> never_forgot = [&] {
      vha::KvCache<TypeParam> cache(config, 1, 8);
      std::vector<typename TestFixture::T> outputs;
      layer.forward(x.topRows(2), cache);
      this->append(outputs, layer.forward(x.middleRows(5, 3), cache));
      return outputs;
    }();
    this->expect_the_same(config, 1, 8, [&](auto& cache) {
      layer.forward(x, cache);  // the whole capacity
      cache.truncate(0, 2);
      std::vector<typename TestFixture::T> outputs;
      this->append(outputs, layer.forward(x.middleRows(5, 3), cache));
      EXPECT_TRUE(same_bits(outputs, never_forgot));
      cache.reset();
      this->append(outputs, layer.forward(x, cache));
      return outputs;
    });
  }
}

// Memory between and behind the heads of a view, which the core is given but not told of.
TYPED_TEST(Fault10UnwrittenCache, BetweenTheHeadsOfAView) {
  using S = TypeParam;
  Random random(4);
  Core<S> core{.groups = 2, .group_size = 2, .head_dim = 5, .value_dim = 5};
  core.query_positions = counted(7, 4);
  core.key_positions = counted(11);
  core.fill(random);
  const auto expected = core.run();
  for (const S filler : this->fillers()) {
    // [groups, 30 tokens, 9 channels], of which 11 tokens and 5 channels are in use.
    std::vector<S> keys(2 * 30 * 9, filler), values = keys;
    for (std::size_t token = 0; token < 11; ++token) {
      for (std::size_t group = 0; group < 2; ++group) {
        const auto from = static_cast<std::ptrdiff_t>((token * 2 + group) * 5);
        const auto to = static_cast<std::ptrdiff_t>((group * 30 + token) * 9);
        std::copy_n(core.key.begin() + from, 5, keys.begin() + to);
        std::copy_n(core.value.begin() + from, 5, values.begin() + to);
      }
    }
    const auto view = [](const std::vector<S>& heads) {
      return vha::HeadsView<const S>{heads.data(), 11, 2, 1, 5, 9, 30 * 9, 9};
    };
    std::vector<S> out(expected.size(), filler);
    vha::CausalAttentionWorkspace<vha::Compute<S>> workspace;
    vha::causal_attention(vha::token_major_heads<const S>(core.query.data(), 7, 2, 2, 5),
                          view(keys), view(values), std::span<const Position>(core.query_positions),
                          std::span<const Position>(core.key_positions), {},
                          vha::token_major_heads(out.data(), 7, 2, 2, 5), workspace);
    EXPECT_TRUE(same_bits(out, expected));
  }
}

// A workspace keeps its memory from call to call, whatever was computed in it.
TYPED_TEST(Fault10UnwrittenCache, InAWorkspaceThatSawNaN) {
  using Number = typename TestFixture::T;
  Random random(5);
  for (const auto& config : this->configs) {
    const auto layer = random_layer<typename TestFixture::Layer>(config, random);
    const auto x = random_matrix<Number>(7, config.hidden, random);
    const auto expected = layer.forward(x);
    for (const Number filler : {nan_of<Number>, std::numeric_limits<Number>::infinity()}) {
      for (const Index tokens : {3, 7, 31}) {
        typename TestFixture::Layer::Workspace workspace;
        RowMajorMatrix<Number> poison =
            RowMajorMatrix<Number>::Constant(tokens, config.hidden, filler);
        RowMajorMatrix<Number> out = poison;
        layer.forward_into(poison, out, workspace);
        out.resize(7, config.hidden);
        out.setConstant(filler);
        layer.forward_into(x, out, workspace);
        EXPECT_TRUE(same_bits(out, expected));
      }
    }
  }
}

}  // namespace
}  // namespace faults
