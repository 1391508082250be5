// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>
#include <vha/attention/kv_cache.hpp>

#include "error_of.hpp"

namespace {

using vha::HeadsView;
using vha::Index;
using vha::KvCache;
using vha::Position;

static_assert(!std::is_copy_constructible_v<KvCache<float>>);
static_assert(!std::is_copy_assignable_v<KvCache<float>>);
static_assert(std::is_nothrow_move_constructible_v<KvCache<float>>);

using support::error_of;

constexpr Index groups = 2, head_dim = 4, value_dim = 3;

template <class S>
KvCache<S> new_cache(Index batch = 2, Index capacity = 5) {
  return KvCache<S>({.batch = batch,
                     .kv_heads = groups,
                     .head_dim = head_dim,
                     .value_dim = value_dim,
                     .capacity = capacity});
}

/// New tokens whose numbers tell where they belong.
struct Tokens {
  std::vector<float> keys, values;
  std::vector<Position> positions;

  Tokens(Index count, float from, Position first)
      : keys(static_cast<std::size_t>(count * groups * head_dim)),
        values(static_cast<std::size_t>(count * groups * value_dim)),
        positions(static_cast<std::size_t>(count)) {
    std::iota(keys.begin(), keys.end(), from);
    std::iota(values.begin(), values.end(), from + 0.5F);
    std::iota(positions.begin(), positions.end(), first);
  }
  Index count() const { return static_cast<Index>(positions.size()); }
  HeadsView<const float> key_view() const {
    return vha::token_major_heads(keys.data(), count(), groups, 1, head_dim);
  }
  HeadsView<const float> value_view() const {
    return vha::token_major_heads(values.data(), count(), groups, 1, value_dim);
  }
  template <class S>
  void append_to(KvCache<S>& cache, Index row) const {
    cache.append(row, key_view(), value_view(), positions);
  }
};

/// All that a cache says of a row.
template <class S>
std::vector<double> contents(const KvCache<S>& cache, Index row) {
  std::vector<double> all(cache.positions(row).begin(), cache.positions(row).end());
  for (const auto& heads : {cache.keys(row), cache.values(row)}) {
    EXPECT_EQ(heads.tokens, cache.length(row));
    vha::for_each_head(heads, [&](Index, const S* head) {
      for (Index c = 0; c < heads.head_dim; ++c) all.push_back(vha::convert<double>(head[c]));
    });
  }
  return all;
}

std::vector<double> contents(const Tokens& tokens) {
  std::vector<double> all(tokens.positions.begin(), tokens.positions.end());
  all.insert(all.end(), tokens.keys.begin(), tokens.keys.end());
  all.insert(all.end(), tokens.values.begin(), tokens.values.end());
  return all;
}

template <class S>
class KvCacheOf : public testing::Test {};
using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(KvCacheOf, Scalars);

TYPED_TEST(KvCacheOf, RowsFillUnevenly) {
  auto cache = new_cache<TypeParam>();
  const Tokens first(2, 10, 0), other(5, 40, 7);
  first.append_to(cache, 0);
  other.append_to(cache, 1);
  EXPECT_EQ(cache.length(0), 2);
  EXPECT_EQ(cache.length(1), 5);
  EXPECT_EQ(contents(cache, 0), contents(first));
  EXPECT_EQ(contents(cache, 1), contents(other));
  EXPECT_EQ(cache.next_position(0), 2);
  EXPECT_EQ(cache.next_position(1), 12);

  Tokens(1, 60, 30).append_to(cache, 0);
  EXPECT_EQ(cache.length(0), 3);
  EXPECT_EQ(cache.next_position(0), 31);
  EXPECT_EQ(vha::convert<double>(cache.keys(0).head(2, 1, 0)[3]), 67);
  EXPECT_EQ(contents(cache, 1), contents(other));

  const Index per_token = groups * (head_dim + value_dim) * static_cast<Index>(sizeof(TypeParam));
  EXPECT_EQ(cache.bytes_per_token(), per_token);
  EXPECT_EQ(cache.bytes_used(), 8 * per_token);
  EXPECT_EQ(cache.bytes_capacity(), 10 * per_token);
}

TYPED_TEST(KvCacheOf, TruncateAndResetForget) {
  auto cache = new_cache<TypeParam>();
  Tokens(4, 0, 0).append_to(cache, 0);
  Tokens(3, 50, 0).append_to(cache, 1);
  cache.truncate(0, 1);
  EXPECT_EQ(cache.length(0), 1);
  EXPECT_EQ(cache.next_position(0), 1);
  const Tokens again(2, 90, 5);
  again.append_to(cache, 0);
  EXPECT_EQ(vha::convert<double>(cache.keys(0).head(1, 0, 0)[0]), 90);
  EXPECT_EQ(cache.length(1), 3);

  cache.reset();
  EXPECT_EQ(cache.length(0) + cache.length(1), 0);
  EXPECT_EQ(cache.bytes_used(), 0);
  EXPECT_EQ(cache.next_position(1), 0);
  again.append_to(cache, 1);
  EXPECT_EQ(contents(cache, 1), contents(again));
}

TYPED_TEST(KvCacheOf, ACopyStandsByItself) {
  auto cache = new_cache<TypeParam>();
  const Tokens tokens(3, 7, 2);
  tokens.append_to(cache, 1);
  auto copy = cache.copy();
  Tokens(1, 70, 5).append_to(copy, 1);
  cache.truncate(1, 0);
  Tokens(2, 20, 0).append_to(cache, 1);
  copy.truncate(1, 3);
  EXPECT_EQ(contents(copy, 1), contents(tokens));
  const auto moved = std::move(copy);
  EXPECT_EQ(contents(moved, 1), contents(tokens));
}

TEST(KvCache, UncommittedTokensDoNotCount) {
  auto cache = new_cache<float>();
  Tokens(1, 0, 0).append_to(cache, 0);
  const Tokens tokens(2, 30, 4);
  cache.write(0, 1, tokens.key_view(), tokens.value_view(), std::span(tokens.positions));
  EXPECT_EQ(cache.length(0), 1);
  EXPECT_EQ(cache.bytes_used(), cache.bytes_per_token());
  EXPECT_EQ(cache.keys(0, 3).head(2, 0, 0)[0], 30);
  EXPECT_EQ(cache.positions(0, 3)[3], 5);
  cache.commit(0, 3);
  EXPECT_EQ(cache.length(0), 4);
  EXPECT_EQ(error_of([&] { cache.commit(0, 2); }),
            "kv_cache: expected at most 5 tokens (its capacity), got 6 in sequence 0");
  EXPECT_EQ(cache.length(0), 4);
}

TEST(KvCache, TakesItsShapeFromAConfiguration) {
  const KvCache<vha::bfloat16> cache(
      {.hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2}, 3, 7);
  EXPECT_EQ(cache.batch(), 3);
  EXPECT_EQ(cache.capacity(), 7);
  EXPECT_EQ(cache.shape().value_dim, 128);
  EXPECT_EQ(cache.bytes_per_token(), 1024);  // the paper's figure
}

TEST(KvCache, RefusedCallsLeaveItUnchanged) {
  auto cache = new_cache<float>();
  Tokens(3, 10, 0).append_to(cache, 0);
  const auto before = contents(cache, 0);
  const Tokens tokens(2, 99, 3), three(3, 99, 3);
  const auto keys = tokens.key_view(), values = tokens.value_view();
  const auto append = [&](Index row, HeadsView<const float> k, HeadsView<const float> v,
                          std::span<const Position> positions) {
    const auto text = error_of([&] { cache.append(row, k, v, positions); });
    EXPECT_EQ(contents(cache, 0), before) << text;
    EXPECT_EQ(cache.length(1), 0) << text;
    return text;
  };
  const auto with = [](HeadsView<const float> heads, auto member, Index size) {
    heads.*member = size;
    return heads;
  };
  using View = HeadsView<const float>;
  EXPECT_EQ(append(0, three.key_view(), three.value_view(), three.positions),
            "kv_cache: expected at most 5 tokens (its capacity), got 6 in sequence 0");
  EXPECT_EQ(append(2, keys, values, tokens.positions), "row: expected 0 to 1, got 2");
  EXPECT_EQ(append(-1, keys, values, tokens.positions), "row: expected 0 to 1, got -1");
  EXPECT_EQ(append(0, with(keys, &View::head_dim, 3), values, tokens.positions),
            "keys.head_dim: expected 4, got 3");
  EXPECT_EQ(append(0, keys, with(values, &View::head_dim, 4), tokens.positions),
            "values.head_dim: expected 3, got 4");
  EXPECT_EQ(append(0, with(keys, &View::groups, 1), values, tokens.positions),
            "keys.groups (kv_heads): expected 2, got 1");
  EXPECT_EQ(append(0, keys, with(values, &View::groups, 1), tokens.positions),
            "values.groups (kv_heads): expected 2, got 1");
  EXPECT_EQ(append(0, with(keys, &View::group_size, 2), values, tokens.positions),
            "keys.group_size: expected 1, got 2");
  EXPECT_EQ(append(0, keys, values, std::vector<Position>{3, -1}),
            "positions: expected 0 to 2^31 - 1, got -1");
  EXPECT_EQ(append(0, keys, values.slice(0, 1), tokens.positions),
            "values.tokens: expected 2, got 1");
  EXPECT_EQ(append(0, keys, values, std::span(tokens.positions).first(1)),
            "positions.size(): expected 2, got 1");
  EXPECT_EQ(error_of([&] { cache.commit(0, -1); }), "tokens: expected 0 or more, got -1");
  EXPECT_EQ(error_of([&] { cache.truncate(0, 4); }), "length: expected 0 to 3, got 4");
  EXPECT_EQ(error_of([&] { cache.truncate(0, -1); }), "length: expected 0 to 3, got -1");
  EXPECT_EQ(error_of([&] { cache.truncate(2, 0); }), "row: expected 0 to 1, got 2");
  EXPECT_EQ(contents(cache, 0), before);
}

TEST(KvCache, ValuesWithinKeysAreStoredOnce) {
  KvCache<float> cache({.batch = 2,
                        .kv_heads = groups,
                        .head_dim = head_dim,
                        .value_dim = value_dim,
                        .capacity = 5,
                        .values_in_keys = true});
  EXPECT_EQ(cache.bytes_per_token(), groups * head_dim * Index(sizeof(float)));
  const Tokens tokens(3, 10, 4);
  tokens.append_to(cache, 1);
  const auto keys = cache.keys(1), values = cache.values(1);
  EXPECT_EQ(values.tokens, 3);
  EXPECT_EQ(values.groups, groups);
  EXPECT_EQ(values.head_dim, value_dim);
  for (Index token = 0; token < 3; ++token) {
    for (Index group = 0; group < groups; ++group) {
      EXPECT_EQ(values.head(token, group, 0), keys.head(token, group, 0));
      EXPECT_EQ(keys.head(token, group, 0)[head_dim - 1],
                tokens.key_view().head(token, group, 0)[head_dim - 1]);
    }
  }
}

TEST(KvCache, RefusesSizesThatCannotBe) {
  const auto error = [](const KvCache<float>::Shape& shape) {
    return error_of([&] { KvCache<float> cache(shape); });
  };
  EXPECT_EQ(error({0, 1, 2, 2, 3}), "batch: expected 1 or more, got 0");
  EXPECT_EQ(error({1, 0, 2, 2, 3}), "kv_heads: expected 1 or more, got 0");
  EXPECT_EQ(error({1, 1, -2, 2, 3}), "head_dim: expected 1 or more, got -2");
  EXPECT_EQ(error({1, 1, 2, -2, 3}), "value_dim: expected 1 or more, got -2");
  EXPECT_EQ(error({1, 1, 2, 2, 0}), "capacity: expected 1 or more, got 0");
  EXPECT_EQ(error({1, 1, 2, 3, 3, true}),
            "value_dim (values_in_keys): expected head_dim = 2 or less, got 3");
  const Index huge = std::numeric_limits<Index>::max() / 2;
  EXPECT_NE(error({huge, 1, 2, 2, 3}).find("batch * capacity: expected at most"),
            std::string::npos);
  EXPECT_NE(error({1, 1, 2, 2, huge}).find("cache bytes: expected at most"), std::string::npos);
}

}  // namespace
