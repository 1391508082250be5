// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>
#include <vha/ops/rms_norm.hpp>

namespace {

using vha::Index;
using vha::RmsNorm;
using vha::Weight;

template <class T>
class RmsNormIn : public testing::Test {};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(RmsNormIn, ComputeScalars);

template <class T>
std::vector<T> random_values(Index count, unsigned seed, double scale = 1) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-scale, scale);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) value = static_cast<T>(uniform(bits));
  return values;
}

TYPED_TEST(RmsNormIn, NormalisesEachHeadByItselfAndTouchesNothingElse) {
  using T = TypeParam;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  for (const Index channels : {1, 2, 9, 81}) {
    // Two tokens of three groups of two heads, with gaps after each head, group and token.
    const Index head = channels + 1, group = 2 * head + 3, token = 3 * group + 5;
    const auto values = random_values<T>(12 * channels, 1, 100);
    const Weight<float> weight =
        Eigen::Map<const Eigen::RowVectorXf>(random_values<float>(channels, 2).data(), channels);
    std::vector<T> memory(static_cast<std::size_t>(2 * token), nan);
    const vha::HeadsView<T> heads{memory.data(), 2, 3, 2, channels, token, group, head};
    const T* source = values.data();
    vha::for_each_head(heads, [&](Index, T* x) {
      std::copy_n(source, channels, x);
      source += channels;
    });

    vha::Buffer<T> scratch;
    RmsNorm<float>{weight, 0.25}(heads, scratch);

    source = values.data();
    Index written = 0;
    vha::for_each_head(heads, [&](Index, const T* x) {
      long double squares = 0;
      for (Index c = 0; c < channels; ++c)
        squares += static_cast<long double>(source[c]) * source[c];
      const long double norm = std::sqrt(squares / static_cast<long double>(channels) + 0.25L);
      for (Index c = 0; c < channels; ++c, ++written) {
        const auto expected = static_cast<double>(source[c] * weight(0, c) / norm);
        ASSERT_NEAR(
            x[c], expected,
            8 * std::numeric_limits<T>::epsilon() * std::sqrt(static_cast<double>(channels)));
      }
      source += channels;
    });
    EXPECT_EQ(std::ranges::count_if(memory, [](T x) { return std::isnan(x); }),
              static_cast<Index>(memory.size()) - written);
  }
}

TYPED_TEST(RmsNormIn, AUnitWeightGivesUnitMeanSquare) {
  using T = TypeParam;
  auto values = random_values<T>(64, 3, 1000);
  const Weight<double> ones = Eigen::RowVectorXd::Ones(64);
  vha::Buffer<T> scratch;
  RmsNorm<double>{ones, 0}(vha::token_major_heads(values.data(), 1, 1, 1, 64), scratch);
  double squares = 0;
  for (const T x : values) squares += static_cast<double>(x) * static_cast<double>(x);
  EXPECT_NEAR(squares / 64, 1, 16 * std::numeric_limits<T>::epsilon());
}

TYPED_TEST(RmsNormIn, EpsKeepsAZeroHeadAtZero) {
  using T = TypeParam;
  std::vector<T> values(4, T(0));
  const Weight<vha::bfloat16> ones =
      Weight<double>(Eigen::RowVectorXd::Ones(4)).cast<vha::bfloat16>();
  vha::Buffer<T> scratch;
  RmsNorm<vha::bfloat16>{ones}(vha::token_major_heads(values.data(), 1, 1, 1, 4), scratch);
  EXPECT_EQ(values, std::vector<T>(4, T(0)));
}

}  // namespace
