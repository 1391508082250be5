// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>
#include <vha/attention/causal_attention.hpp>

namespace {

using vha::HeadsView;
using vha::Index;
using vha::Position;

template <class S>
std::vector<S> random_values(Index count, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-2, 2);
  std::vector<S> values(static_cast<std::size_t>(count));
  for (S& value : values) value = vha::convert<S>(uniform(bits));
  return values;
}

std::vector<Position> counted(Index count, Position first = 0) {
  std::vector<Position> positions(static_cast<std::size_t>(count));
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

std::vector<Position> shuffled(std::vector<Position> positions, unsigned seed) {
  std::ranges::shuffle(positions, std::mt19937(seed));
  return positions;
}

/// One call of the core: operands in memory of their own, the result beside poison.
template <class Q, class K = Q, class V = K>
struct Call {
  Index groups = 2, group_size = 3, head_dim = 8, value_dim = 8;
  std::vector<Position> query_positions, key_positions;
  Index window = 0;
  double scale = 0.7;

  using T = vha::Compute<Q>;
  std::vector<Q> query = {};
  std::vector<K> key = {};
  std::vector<V> value = {};
  std::vector<Q> out = {};

  Index tokens() const { return static_cast<Index>(query_positions.size()); }
  Index keys() const { return static_cast<Index>(key_positions.size()); }
  bool visible(Index token, Index k) const {
    const Position distance = query_positions[static_cast<std::size_t>(token)] -
                              key_positions[static_cast<std::size_t>(k)];
    return distance >= 0 && (window == 0 || distance < window);
  }

  void fill() {
    query = random_values<Q>(groups * tokens() * group_size * head_dim, 1);
    key = random_values<K>(keys() * groups * head_dim, 2);
    value = random_values<V>(keys() * groups * value_dim, 3);
  }
  HeadsView<const K> key_view() const {
    return vha::token_major_heads(key.data(), keys(), groups, 1, head_dim);
  }
  HeadsView<const V> value_view() const {
    return vha::token_major_heads(value.data(), keys(), groups, 1, value_dim);
  }

  template <int HeadDim = Eigen::Dynamic, int GroupSize = Eigen::Dynamic>
  Call& run() {
    const Q nan = vha::convert<Q>(std::numeric_limits<double>::quiet_NaN());
    out.assign(static_cast<std::size_t>(tokens() * groups * group_size * value_dim), nan);
    vha::CausalAttentionWorkspace<T> workspace;
    vha::causal_attention<HeadDim, GroupSize, T>(
        vha::group_major_heads<const Q>(query.data(), tokens(), groups, group_size, head_dim),
        key_view(), value_view(), std::span<const Position>(query_positions),
        std::span<const Position>(key_positions), {scale, {window}}, out_view(), workspace);
    return *this;
  }
  HeadsView<Q> out_view() {
    return vha::token_major_heads(out.data(), tokens(), groups, group_size, value_dim);
  }

  /// Compares with softmax(scale·q·kᵀ)·V in loops, for every query head.
  void check() {
    // 8 per rounding of a logit of at most 4·head_dim, and one rounding to the result's scalar.
    const double limit =
        8.0 * static_cast<double>(head_dim + keys()) * std::numeric_limits<T>::epsilon() +
        (sizeof(Q) == 2 ? 0x1p-7 : 0.0);
    const auto q =
        vha::group_major_heads<const Q>(query.data(), tokens(), groups, group_size, head_dim);
    const auto dot = [&](Index token, Index group, Index member, Index k) {
      long double sum = 0;
      for (Index c = 0; c < head_dim; ++c) {
        sum += static_cast<long double>(vha::convert<double>(q.head(token, group, member)[c])) *
               vha::convert<double>(key_view().head(k, group, 0)[c]);
      }
      return sum * scale;
    };
    for (Index token = 0; token < tokens(); ++token) {
      for (Index head = 0; head < groups * group_size; ++head) {
        const Index group = head / group_size, member = head % group_size;
        long double total = 0;
        std::vector<long double> sums(static_cast<std::size_t>(value_dim), 0);
        for (Index k = 0; k < keys(); ++k) {
          if (!visible(token, k)) continue;
          const long double weight = std::exp(dot(token, group, member, k));
          total += weight;
          for (std::size_t c = 0; c < sums.size(); ++c) {
            sums[c] += weight * vha::convert<double>(value_view().head(k, group, 0)[c]);
          }
        }
        const Q* const result = out_view().head(token, group, member);
        for (std::size_t c = 0; c < sums.size(); ++c) {
          const double expected = total == 0 ? 0.0 : static_cast<double>(sums[c] / total);
          ASSERT_NEAR(vha::convert<double>(result[c]), expected, total == 0 ? 0.0 : limit)
              << "token " << token << " head " << head << " channel " << c;
        }
      }
    }
  }
};

template <class S>
class CausalAttentionOf : public testing::Test {};
using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(CausalAttentionOf, Scalars);

TYPED_TEST(CausalAttentionOf, AgreesWithLoops) {
  for (const Index tokens : {1, 9, 81}) {
    for (const Index window : {0, 1, 7, 1000}) {
      Call<TypeParam> call{.query_positions = counted(tokens), .key_positions = counted(tokens)};
      call.window = window;
      call.fill();
      call.run().check();
    }
  }
}

TYPED_TEST(CausalAttentionOf, CountsAndWidthsMayDiffer) {
  for (const Index value_dim : {1, 5, 12}) {
    Call<TypeParam> call{.groups = 3,
                         .group_size = 1,
                         .head_dim = 6,
                         .value_dim = value_dim,
                         .query_positions = counted(4, 20),
                         .key_positions = counted(27)};
    call.fill();
    call.run().check();
  }
}

TYPED_TEST(CausalAttentionOf, PositionsInAnyOrderAndRepeated) {
  for (const Index window : {0, 6}) {
    Call<TypeParam> call{.query_positions = shuffled(counted(19, 3), 1),
                         .key_positions = shuffled(counted(33), 2)};
    call.query_positions.push_back(11);
    call.key_positions.insert(call.key_positions.end(), {11, 11, 4});
    call.window = window;
    call.fill();
    call.run().check();
  }
}

TYPED_TEST(CausalAttentionOf, StaticSizesGiveTheSameBits) {
  Call<TypeParam> call{.query_positions = counted(9, 2), .key_positions = counted(11)};
  call.fill();
  const auto expected = call.run().out;
  const auto same = [&](const std::vector<TypeParam>& out) {
    return std::ranges::equal(out, expected);
  };
  EXPECT_TRUE(same((call.template run<8, 3>().out)));
  EXPECT_TRUE(same((call.template run<8, Eigen::Dynamic>().out)));
  EXPECT_TRUE(same((call.template run<Eigen::Dynamic, 3>().out)));
}

TEST(CausalAttention, LongerThanItsBlocks) {
  // More than 512 rows of queries in a group, and more than 256 keys.
  Call<float> call{.groups = 1,
                   .group_size = 4,
                   .head_dim = 2,
                   .value_dim = 2,
                   .query_positions = counted(150, 400),
                   .key_positions = counted(600)};
  for (const Index window : {0, 301}) {
    call.window = window;
    call.fill();
    call.run().check();
  }
}

TEST(CausalAttention, ARowThatSeesNothingIsZero) {
  Call<float> call{.query_positions = {0, 5, 100}, .key_positions = {3, 4, 9}};
  call.window = 10;
  call.fill();
  call.run().check();
  for (const Index token : {0, 2}) EXPECT_EQ(call.out_view().head(token, 1, 2)[3], 0.0F);
  EXPECT_NE(call.out_view().head(1, 1, 2)[3], 0.0F);

  Call<float> no_keys{.query_positions = counted(3), .key_positions = {}};
  no_keys.fill();
  no_keys.run().check();
}

TEST(CausalAttention, HiddenKeysAndValuesAreNeverTouched) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Call<float> call{.query_positions = shuffled(counted(30, 40), 3),
                   .key_positions = shuffled(counted(100), 4)};
  call.window = 13;
  call.fill();
  for (Index k = 0; k < call.keys(); ++k) {
    bool seen = false;
    for (Index token = 0; token < call.tokens(); ++token) seen = seen || call.visible(token, k);
    if (seen) continue;
    std::fill_n(call.key.begin() + k * 2 * 8, 2 * 8, nan);
    std::fill_n(call.value.begin() + k * 2 * 8, 2 * 8, nan);
  }
  call.run().check();
}

TEST(CausalAttention, OperandsMayBeOfDifferentScalars) {
  Call<double, vha::bfloat16, vha::half> narrow_cache{.query_positions = counted(7, 2),
                                                      .key_positions = counted(9)};
  narrow_cache.fill();
  narrow_cache.run().check();
  Call<vha::half, float, double> wide_cache{.query_positions = counted(7, 2),
                                            .key_positions = counted(9)};
  wide_cache.fill();
  wide_cache.run().check();
}

TEST(CausalAttention, LargeLogitsDoNotOverflow) {
  Call<float> call{.query_positions = counted(5), .key_positions = counted(5)};
  call.scale = 1e6;
  call.fill();
  call.run();
  EXPECT_TRUE(std::ranges::all_of(call.out, [](float x) { return std::abs(x) <= 2.0001F; }));
}

}  // namespace
