// SPDX-License-Identifier: Apache-2.0
// Softmax states: merging is associative, and any split of a row equals one update.

#include <vha/ops/softmax_state.hpp>

#include "random.hpp"
#include "tolerance.hpp"

namespace laws {
namespace {

/// A state with the values that were accumulated beside it, here Σ exp(l - max)·v.
template <class T>
struct Accumulated {
  vha::SoftmaxState<T> state = {};
  T sum = 0;

  void take(std::vector<T> logits, const T* values) {
    using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
    sum *= state.update(Row(logits.data(), static_cast<Eigen::Index>(logits.size())));
    for (std::size_t k = 0; k < logits.size(); ++k) sum += logits[k] * values[k];
  }
  Accumulated merged_with(const Accumulated& other) const {
    T factor = 0, other_factor = 0;
    const auto merged = state.merge(other.state, factor, other_factor);
    return {merged, factor * sum + other_factor * other.sum};
  }
  Array result() const {
    return {{2}, {static_cast<double>(sum * state.normalizer()), static_cast<double>(state.max)}};
  }
};

/// The weighted mean of `values` and the largest logit, in long double.
template <class T>
std::vector<double> naive_result(const std::vector<T>& logits, const std::vector<T>& values) {
  const T largest = *std::max_element(logits.begin(), logits.end());
  long double total = 0, sum = 0;
  for (std::size_t k = 0; k < logits.size(); ++k) {
    const long double weight = std::exp(static_cast<long double>(logits[k]) - largest);
    total += weight;
    sum += weight * values[k];
  }
  return {static_cast<double>(sum / total), static_cast<double>(largest)};
}

template <class T>
class SoftmaxState : public testing::Test {
 protected:
  /// Logits up to `scale` and values, 81 of each.
  void draw(Random& random, double scale) {
    const auto l = random.values<T>(81, scale), v = random.values<T>(81);
    logits.assign(l.begin(), l.end());
    values.assign(v.begin(), v.end());
  }
  Accumulated<T> of(std::size_t first, std::size_t last) const {
    Accumulated<T> part;
    if (first == last) return part;  // has seen nothing
    part.take({logits.begin() + static_cast<std::ptrdiff_t>(first),
               logits.begin() + static_cast<std::ptrdiff_t>(last)},
              values.data() + first);
    return part;
  }

  std::vector<T> logits, values;
};
using Scalars = testing::Types<double, float>;
TYPED_TEST_SUITE(SoftmaxState, Scalars);

constexpr double logit_scales[] = {0, 1, 30, 5000, 2e6};
constexpr std::pair<std::size_t, std::size_t> cuts[] = {{1, 2},   {9, 81}, {0, 80}, {40, 41},
                                                        {27, 54}, {0, 0},  {81, 81}};

TYPED_TEST(SoftmaxState, OfAnySplitIsThatOfOneUpdate) {
  Random random(1);
  for (const double scale : logit_scales) {
    this->draw(random, scale);
    const auto expected = naive_result(this->logits, this->values);
    EXPECT_TRUE(close(this->of(0, 81).result(), expected, tolerance<TypeParam>(81))) << scale;
    for (const std::size_t size : {1U, 2U, 9U, 40U, 80U}) {
      Accumulated<TypeParam> all;
      for (std::size_t first = 0; first < 81; first += size) {
        const auto begin = this->logits.begin() + static_cast<std::ptrdiff_t>(first);
        const auto count = static_cast<std::ptrdiff_t>(std::min<std::size_t>(size, 81 - first));
        all.take({begin, begin + count}, this->values.data() + first);
      }
      EXPECT_TRUE(close(all.result(), expected, tolerance<TypeParam>(81)))
          << "logits up to " << scale << " in blocks of " << size;
    }
  }
}

TYPED_TEST(SoftmaxState, MergesAssociatively) {
  Random random(2);
  for (const double scale : logit_scales) {
    this->draw(random, scale);
    const auto expected = naive_result(this->logits, this->values);
    for (const auto& cut : cuts) {
      const std::size_t first = cut.first, second = cut.second;
      const auto a = this->of(0, first), b = this->of(first, second), c = this->of(second, 81);
      const auto expect = [&](const Accumulated<TypeParam>& merged) {
        EXPECT_TRUE(close(merged.result(), expected, tolerance<TypeParam>(81)))
            << "logits up to " << scale << " cut at " << first << " and " << second;
      };
      expect(a.merged_with(b).merged_with(c));
      expect(a.merged_with(b.merged_with(c)));
      expect(c.merged_with(b).merged_with(a));
    }
  }
}

TYPED_TEST(SoftmaxState, ThatHasSeenNothingIsNeutral) {
  Random random(3);
  this->draw(random, 30);
  const auto all = this->of(0, 81);
  const Accumulated<TypeParam> nothing;
  EXPECT_TRUE(same_bits(all.merged_with(nothing).result(), all.result()));
  EXPECT_TRUE(same_bits(nothing.merged_with(all).result(), all.result()));
  EXPECT_EQ(nothing.merged_with(nothing).state.normalizer(), 0);
  EXPECT_TRUE(nothing.merged_with(nothing).state.empty());
}

TYPED_TEST(SoftmaxState, IsNotChangedByABlockOfHiddenKeys) {
  Random random(4);
  this->draw(random, 30);
  const auto expected = this->of(0, 81);
  const std::vector<TypeParam> hidden(9, vha::SoftmaxState<TypeParam>::hidden);
  Accumulated<TypeParam> before, after = expected;
  before.take(hidden, this->values.data());
  EXPECT_TRUE(before.state.empty());
  before.take(this->logits, this->values.data());
  after.take(hidden, this->values.data());
  EXPECT_TRUE(same_bits(before.result(), expected.result()));
  EXPECT_TRUE(same_bits(after.result(), expected.result()));
}

}  // namespace
}  // namespace laws
