// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>
#include <vha/ops/softmax_state.hpp>

namespace {

using vha::Index;
using vha::SoftmaxState;

/// A softmax state with the weighted sum of values that goes with it.
template <class T>
struct Row {
  SoftmaxState<T> state = {};
  T accumulated = 0;

  void take(std::vector<T> logits, const std::vector<T>& values) {
    const T factor = state.update({logits.data(), static_cast<Index>(logits.size())});
    accumulated *= factor;
    for (std::size_t k = 0; k < logits.size(); ++k) accumulated += logits[k] * values[k];
  }
  Row merged(const Row& other) const {
    T factor = 0, other_factor = 0;
    const auto both = state.merge(other.state, factor, other_factor);
    return {both, accumulated * factor + other.accumulated * other_factor};
  }
  T result() const { return accumulated * state.normalizer(); }
};

template <class T>
std::vector<T> random_values(std::size_t count, unsigned seed, double scale) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-scale, scale);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(uniform(bits));
  return values;
}

template <class T>
std::vector<T> part(const std::vector<T>& values, std::size_t first, std::size_t end) {
  return {values.begin() + static_cast<std::ptrdiff_t>(first),
          values.begin() + static_cast<std::ptrdiff_t>(end)};
}

/// Σ softmax(logits)_k · values_k in long double.
template <class T>
double expected(const std::vector<T>& logits, const std::vector<T>& values) {
  const long double largest = *std::ranges::max_element(logits);
  long double sum = 0, weighted = 0;
  for (std::size_t k = 0; k < logits.size(); ++k) {
    const long double weight = std::exp(logits[k] - largest);
    sum += weight;
    weighted += weight * values[k];
  }
  return static_cast<double>(weighted / sum);
}

template <class T>
class SoftmaxStateIn : public testing::Test {
 protected:
  // Logits up to 50 are rounded to 50·epsilon / 2, and so are their exponentials' relative errors.
  static constexpr double limit = 200 * std::numeric_limits<T>::epsilon();
};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(SoftmaxStateIn, ComputeScalars);

TYPED_TEST(SoftmaxStateIn, BlocksOfAnySizeGiveTheSoftmax) {
  using T = TypeParam;
  for (const std::size_t count : {1U, 9U, 81U}) {
    const auto logits = random_values<T>(count, 1, 50), values = random_values<T>(count, 2, 1);
    for (const std::size_t block : {1U, 2U, 7U, 81U}) {
      Row<T> row;
      for (std::size_t k = 0; k < count; k += block) {
        const std::size_t end = std::min(count, k + block);
        row.take(part(logits, k, end), part(values, k, end));
      }
      ASSERT_NEAR(row.result(), expected(logits, values), this->limit) << count << ' ' << block;
      ASSERT_EQ(row.state.max, *std::ranges::max_element(logits));
    }
  }
}

TYPED_TEST(SoftmaxStateIn, OrderOfTheBlocksDoesNotMatter) {
  using T = TypeParam;
  auto logits = random_values<T>(64, 3, 50);
  const auto values = random_values<T>(64, 4, 1);
  for (const bool rising : {true, false}) {
    std::ranges::sort(logits);
    if (!rising) std::ranges::reverse(logits);
    Row<T> row;
    for (std::size_t k = 0; k < 64; k += 4)
      row.take(part(logits, k, k + 4), part(values, k, k + 4));
    EXPECT_NEAR(row.result(), expected(logits, values), this->limit) << rising;
  }
}

TYPED_TEST(SoftmaxStateIn, UpdateLeavesWeightsRelativeToTheLargest) {
  using T = TypeParam;
  SoftmaxState<T> state;
  std::vector<T> logits{T(1), T(3), T(2)};
  EXPECT_EQ(state.update({logits.data(), 3}), T(0));  // nothing was accumulated before
  EXPECT_EQ(logits[1], T(1));
  EXPECT_NEAR(logits[0], std::exp(-2.0), this->limit);
  EXPECT_NEAR(state.sum, 1 + std::exp(-1.0) + std::exp(-2.0), this->limit);
  logits = {T(0)};
  EXPECT_EQ(state.update({logits.data(), 1}), T(1));
  logits = {T(4)};
  EXPECT_NEAR(state.update({logits.data(), 1}), std::exp(-1.0), this->limit);
  EXPECT_EQ(state.max, T(4));
}

TYPED_TEST(SoftmaxStateIn, MergingIsAssociative) {
  using T = TypeParam;
  const auto logits = random_values<T>(30, 5, 50), values = random_values<T>(30, 6, 1);
  std::vector<Row<T>> rows(3);
  for (std::size_t k = 0; k < 3; ++k) {
    rows[k].take(part(logits, 10 * k, 10 * k + 10), part(values, 10 * k, 10 * k + 10));
  }
  const double exact = expected(logits, values);
  EXPECT_NEAR(rows[0].merged(rows[1]).merged(rows[2]).result(), exact, this->limit);
  EXPECT_NEAR(rows[0].merged(rows[1].merged(rows[2])).result(), exact, this->limit);
  EXPECT_NEAR(rows[2].merged(rows[0]).merged(rows[1]).result(), exact, this->limit);
}

TYPED_TEST(SoftmaxStateIn, NothingSeenIsTheNeutralElement) {
  using T = TypeParam;
  const Row<T> nothing;
  EXPECT_TRUE(nothing.state.empty());
  EXPECT_EQ(nothing.state.normalizer(), T(0));
  EXPECT_TRUE(nothing.merged(nothing).state.empty());
  EXPECT_EQ(nothing.merged(nothing).result(), T(0));

  // Also beside logits as low as they may be.
  for (const T logit : {T(3), std::nextafter(SoftmaxState<T>::hidden, T(0))}) {
    Row<T> row;
    row.take({logit, logit}, {T(1), T(3)});
    EXPECT_FALSE(row.state.empty());
    for (const Row<T>& merged : {row.merged(nothing), nothing.merged(row)}) {
      EXPECT_EQ(merged.state.max, row.state.max);
      EXPECT_EQ(merged.state.sum, row.state.sum);
      EXPECT_EQ(merged.result(), T(2));
    }
  }
}

TYPED_TEST(SoftmaxStateIn, HiddenLogitsWeighNothing) {
  using T = TypeParam;
  constexpr T hidden = SoftmaxState<T>::hidden;
  for (const T logit : {T(0), T(-1e30), T(1e30), std::numeric_limits<T>::max()}) {
    std::vector<T> logits{hidden, logit, hidden};
    SoftmaxState<T> state;
    state.update({logits.data(), 3});
    EXPECT_EQ(logits, (std::vector<T>{0, 1, 0}));
    EXPECT_EQ(state.sum, T(1));
    logits.assign(2, hidden);
    EXPECT_EQ(state.update({logits.data(), 2}), T(1));
    EXPECT_EQ(logits, (std::vector<T>{0, 0}));
    EXPECT_EQ(state.sum, T(1));
    EXPECT_EQ(state.max, logit);
  }
  SoftmaxState<T> nothing;
  std::vector<T> logits(3, hidden);
  nothing.update({logits.data(), 3});
  EXPECT_TRUE(nothing.empty());
  EXPECT_EQ(logits, std::vector<T>(3, T(0)));
}

TYPED_TEST(SoftmaxStateIn, HugeLogitsDoNotOverflow) {
  using T = TypeParam;
  for (const T huge : {T(1e30), T(-1e30)}) {
    Row<T> row;
    row.take({huge, huge}, {T(1), T(2)});
    row.take({huge}, {T(6)});
    EXPECT_NEAR(row.result(), 3.0, this->limit);
  }
  Row<T> row;
  row.take({T(-1e30)}, {T(1)});
  row.take({T(1e30)}, {T(2)});
  row.take({T(-1e30)}, {T(1)});
  EXPECT_EQ(row.result(), T(2));
}

}  // namespace
