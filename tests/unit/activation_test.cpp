// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vha/ops/activation.hpp>

namespace {

static_assert(vha::Activation<vha::Identity> && vha::Activation<vha::Silu>);
static_assert(!vha::Activation<int>);
static_assert(!vha::Activation<decltype([](double x) { return x; })>);  // float would widen

template <class T>
class ActivationIn : public testing::Test {};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(ActivationIn, ComputeScalars);

TYPED_TEST(ActivationIn, SigmoidIsAccurateOnBothSides) {
  using T = TypeParam;
  const double limit = 4 * std::numeric_limits<T>::epsilon();
  for (double at = -80; at <= 80; at += 0.37) {
    const auto x = static_cast<T>(at);
    const long double expected = 1.0L / (1.0L + std::exp(-static_cast<long double>(x)));
    const long double value = vha::sigmoid(x);
    ASSERT_NEAR(static_cast<double>(value / expected), 1, limit) << x;
    ASSERT_NEAR(static_cast<double>(vha::sigmoid(x) + vha::sigmoid(-x)), 1, limit) << x;
    ASSERT_NEAR(static_cast<double>(vha::Silu{}(x) / (x * expected)), 1, 2 * limit) << x;
  }
  EXPECT_EQ(vha::sigmoid(T(0)), T(0.5));
}

TYPED_TEST(ActivationIn, NothingOverflows) {
  using T = TypeParam;
  for (const T large : {T(1000), std::numeric_limits<T>::max()}) {
    EXPECT_EQ(vha::sigmoid(large), T(1));
    EXPECT_EQ(vha::sigmoid(-large), T(0));
    EXPECT_EQ(vha::Silu{}(large), large);
    EXPECT_EQ(vha::Silu{}(-large), T(0));
  }
  EXPECT_EQ(vha::sigmoid(std::numeric_limits<T>::infinity()), T(1));
  EXPECT_EQ(vha::sigmoid(-std::numeric_limits<T>::infinity()), T(0));
  EXPECT_TRUE(std::isnan(vha::sigmoid(std::numeric_limits<T>::quiet_NaN())));
}

TYPED_TEST(ActivationIn, IdentityChangesNoBit) {
  EXPECT_EQ(vha::Identity{}(TypeParam(-0.1)), TypeParam(-0.1));
  EXPECT_TRUE(std::signbit(vha::Identity{}(TypeParam(-0.0))));
  EXPECT_EQ(vha::Silu{}(TypeParam(0)), TypeParam(0));
}

}  // namespace
