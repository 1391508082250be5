// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>
#include <vha/ops/normal.hpp>

namespace {

using vha::NormalGenerator;

std::vector<double> samples(std::uint64_t seed, std::size_t count) {
  NormalGenerator normal(seed);
  std::vector<double> values(count);
  for (double& value : values) value = normal();
  return values;
}

TEST(Normal, ASeedGivesTheseNumbersForGood) {
  EXPECT_EQ(samples(0, 6), (std::vector{-0x1.95fbbp-2, 0x1.3ea7e8p-2, -0x1.980d86p-1, 0x1.159a98p-3,
                                        0x1.08dd7p-2, -0x1.251adep-1}));
  EXPECT_EQ(samples(42, 6), (std::vector{-0x1.581ce1p+0, 0x1.836dedp+0, 0x1.7eadfp-4,
                                         -0x1.5621a78p+1, -0x1.039e78p+0, -0x1.b9deb3p+0}));
}

TEST(Normal, HasTheMomentsOfANormalVariable) {
  constexpr std::size_t count = 400000;
  double sums[5] = {};
  for (const double x : samples(1, count)) {
    for (int power = 1; power <= 4; ++power) sums[power] += std::pow(x, power);
  }
  const auto n = static_cast<double>(count);
  // Within 5 standard errors: the variances of x, x², x³, x⁴ are 1, 2, 15, 96.
  EXPECT_NEAR(sums[1] / n, 0, 5 * std::sqrt(1 / n));
  EXPECT_NEAR(sums[2] / n, 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(sums[3] / n, 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(sums[4] / n, 3, 5 * std::sqrt(96 / n));
}

TEST(Normal, HasTheNormalDistribution) {
  constexpr std::size_t count = 400000;
  auto values = samples(2, count);
  std::ranges::sort(values);
  double largest = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const double below = 0.5 * std::erfc(-values[k] / std::sqrt(2.0));
    const double at = static_cast<double>(k) / static_cast<double>(count);
    largest = std::max(largest, std::abs(below - at));
  }
  // Kolmogorov: 1.95 / √n is exceeded once in a thousand.
  EXPECT_LT(largest, 1.95 / std::sqrt(static_cast<double>(count)));
  EXPECT_GT(values.back(), 4);
  EXPECT_LT(values.front(), -4);
}

TEST(Normal, NeighboursAreUncorrelated) {
  const auto values = samples(3, 200000);
  const double limit = 5 / std::sqrt(200000.0);
  for (const std::size_t lag : {1U, 2U, 3U, 16U}) {
    double sum = 0, sum_of_squares = 0;
    for (std::size_t k = lag; k < values.size(); ++k) {
      sum += values[k] * values[k - lag];
      sum_of_squares += (values[k] * values[k] - 1) * (values[k - lag] * values[k - lag] - 1);
    }
    EXPECT_NEAR(sum / 200000, 0, limit) << lag;
    EXPECT_NEAR(sum_of_squares / 200000, 0, 2 * limit) << lag;
  }
}

TEST(Normal, IsAMultipleOfTheSmallestStep) {
  for (const double x : samples(4, 10000)) ASSERT_EQ(x * 0x1p24, std::trunc(x * 0x1p24));
}

TEST(Normal, SeedsGiveDifferentNumbers) {
  const auto first = samples(5, 100), second = samples(6, 100);
  EXPECT_EQ(first, samples(5, 100));
  int equal = 0;
  for (std::size_t k = 0; k < 100; ++k) equal += first[k] == second[k];
  EXPECT_LT(equal, 3);
}

}  // namespace
