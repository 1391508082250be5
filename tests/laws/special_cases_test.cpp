// SPDX-License-Identifier: Apache-2.0
// With identity maps the layer is a GQA layer; with equal head counts that is multi-head attention,
// with one K/V head multi-query attention.

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

/// Multi-head attention in loops, every head with keys and values of its own: RoPE, a causal
/// softmax, no norm, bias or window. `wq`, `wk` and `wv` are [h, heads·d].
naive::Vector multi_head_attention(const naive::Layer& l, const naive::Vector& x,
                                   const naive::Vector& wk, const naive::Vector& wv,
                                   naive::Index tokens) {
  const auto heads = l.query_heads(), d = l.head_dim, width = heads * d;
  const auto positions = counted_positions(tokens);
  const auto project = [&](const naive::Vector& w) {
    return naive::linear(x, tokens, l.hidden, w, {}, width);
  };
  const auto q = naive::rope(project(l.wq), heads, d, positions, l.theta, 0);
  const auto k = naive::rope(project(wk), heads, d, positions, l.theta, 0);
  const auto v = project(wv);
  naive::Vector y(tokens * width);
  for (naive::Index head = 0; head < heads; ++head) {
    for (naive::Index s = 0; s < tokens; ++s) {
      std::vector<long double> weights;
      long double total = 0;
      for (naive::Index t = 0; t <= s; ++t) {
        long double dot = 0;
        for (naive::Index c = 0; c < d; ++c) {
          dot +=
              static_cast<long double>(q[s * width + head * d + c]) * k[t * width + head * d + c];
        }
        weights.push_back(std::exp(dot / std::sqrt(static_cast<long double>(d))));
        total += weights.back();
      }
      for (naive::Index c = 0; c < d; ++c) {
        long double sum = 0;
        for (naive::Index t = 0; t <= s; ++t) sum += weights[t] * v[t * width + head * d + c];
        y[s * width + head * d + c] = static_cast<double>(sum / total);
      }
    }
  }
  return naive::linear(y, tokens, width, l.wo, {}, l.hidden);
}

/// W [h, groups·d] with the columns of each group repeated for each of its heads, [h, heads·d].
naive::Vector repeated_heads(const naive::Layer& l, const naive::Vector& w) {
  const auto heads = l.query_heads(), d = l.head_dim;
  naive::Vector result;
  for (naive::Index row = 0; row < l.hidden; ++row) {
    for (naive::Index head = 0; head < heads; ++head) {
      const auto start =
          w.begin() + static_cast<std::ptrdiff_t>((row * l.kv_heads + head / l.physical_heads) * d);
      result.insert(result.end(), start, start + static_cast<std::ptrdiff_t>(d));
    }
  }
  return result;
}

/// A plain GQA layer without norm, bias or window.
template <class S>
naive::Layer random_gqa_layer(const LayerShape& sizes, Random& random) {
  LayerShape shape{sizes.name, sizes.hidden, sizes.head_dim, sizes.physical_heads, sizes.kv_heads};
  shape.qk_norm = false;
  naive::Layer layer = random_layer<S>(shape, random);
  const auto width = layer.query_heads() * layer.head_dim;
  layer.wq =
      random.values<S>(layer.hidden * width, std::sqrt(3.0 / static_cast<double>(layer.hidden)));
  for (auto* map : {&layer.premix, &layer.postmix_a, &layer.postmix_b}) map->clear();
  return layer;
}

template <class Kind>
class SpecialCase : public testing::Test {};
TYPED_TEST_SUITE(SpecialCase, Kinds);

TYPED_TEST(SpecialCase, IdentityMapsMakeTheLayerGqa) {
  using S = typename TypeParam::S;
  using T = typename TypeParam::T;
  Random random(1);
  for_each_shape<TypeParam>([&](LayerShape shape, naive::Index tokens) {
    shape.physical_head_dim = 0;
    naive::Layer twin = random_layer<S>(shape, random);
    const auto d = twin.head_dim;
    for (naive::Index k = 0; k < twin.premix.size(); ++k) {
      twin.premix[k] = k / d % d == k % d ? 1 : 0;
    }
    std::fill(twin.postmix_b.begin(), twin.postmix_b.end(), 0);

    // The same query heads in every group.
    naive::Layer plain = twin;
    plain.wq.clear();
    const auto append_repeated = [&](naive::Vector& to, auto begin) {
      for (naive::Index group = 0; group < twin.kv_heads; ++group) {
        to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(twin.physical_heads * d));
      }
    };
    for (naive::Index row = 0; row < twin.hidden; ++row) {
      append_repeated(plain.wq,
                      twin.wq.begin() + static_cast<std::ptrdiff_t>(row * twin.physical_heads * d));
    }
    plain.bq.clear();
    if (!twin.bq.empty()) append_repeated(plain.bq, twin.bq.begin());

    const auto layer = library_layer<typename TypeParam::Vha>(twin);
    const auto gqa = library_layer<typename TypeParam::Gqa>(plain);
    const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
    const double allowed = tolerance<T>(longest_sum(twin, tokens));
    EXPECT_TRUE(close(run(layer, x), run(gqa, x), allowed));
    EXPECT_TRUE(close(run(vha::fold_vha(layer), x), run(gqa, x),
                      shape.value_scale == 1 ? allowed : tolerance<S>(longest_sum(twin, tokens))));
  });
}

TYPED_TEST(SpecialCase, GqaIsMultiHeadAttentionWithRepeatedKeysAndValues) {
  using S = typename TypeParam::S;
  using T = typename TypeParam::T;
  Random random(2);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index tokens) {
    const auto l = random_gqa_layer<S>(shape, random);
    const auto x = random_tokens<T>(tokens, l, random);
    const auto expected =
        multi_head_attention(l, x, repeated_heads(l, l.wk), repeated_heads(l, l.wv), tokens);
    EXPECT_TRUE(close(run(library_layer<typename TypeParam::Gqa>(l), matrix_of<T>(x, tokens)),
                      expected, tolerance<T>(longest_sum(l, tokens))));
  });
}

template <class S>
class HeadCounts : public testing::Test {
 protected:
  /// Expects a GQA layer of these heads to be multi-head attention, keys and values repeated.
  static void expect_multi_head(naive::Index group_size, naive::Index kv_heads) {
    using T = vha::Compute<S>;
    Random random(3);
    for (const naive::Index tokens : token_counts) {
      const auto l = random_gqa_layer<S>({"", 11, 6, group_size, kv_heads}, random);
      const auto x = random_tokens<T>(tokens, l, random);
      EXPECT_TRUE(close(
          run(library_layer<vha::GqaAttention<S>>(l), matrix_of<T>(x, tokens)),
          multi_head_attention(l, x, repeated_heads(l, l.wk), repeated_heads(l, l.wv), tokens),
          tolerance<T>(longest_sum(l, tokens))));
    }
  }
};
using Scalars = testing::Types<double, float>;
TYPED_TEST_SUITE(HeadCounts, Scalars);

TYPED_TEST(HeadCounts, EqualOnesMakeGqaMultiHeadAttention) {
  this->expect_multi_head(1, 5);
}
TYPED_TEST(HeadCounts, OneKvHeadMakesGqaMultiQueryAttention) {
  this->expect_multi_head(5, 1);
}

}  // namespace
}  // namespace laws
