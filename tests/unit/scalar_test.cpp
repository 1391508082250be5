// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#include <vha/core/scalar.hpp>

namespace {

using vha::bfloat16;
using vha::convert;
using vha::half;

static_assert(vha::StorageScalar<bfloat16> && vha::StorageScalar<half>);
static_assert(!vha::StorageScalar<int> && !vha::StorageScalar<long double>);
static_assert(!vha::ComputeScalar<bfloat16> && !vha::ComputeScalar<half>);
static_assert(std::is_same_v<vha::Compute<double>, double>);
static_assert(std::is_same_v<vha::Compute<bfloat16>, float>);
static_assert(vha::is_finite(std::numeric_limits<double>::max()));
static_assert(!vha::is_finite(-std::numeric_limits<double>::infinity()));
static_assert(!vha::is_finite(std::numeric_limits<float>::quiet_NaN()));
static_assert(vha::is_finite(std::numeric_limits<float>::denorm_min()));

std::uint16_t bits_of(auto value) {
  return std::bit_cast<std::uint16_t>(value);
}

/// A 2-byte format by its definition: sign, exponent, fraction.
template <class S>
struct Format {
  static constexpr int fraction_bits = std::is_same_v<S, bfloat16> ? 7 : 10;
  static constexpr int exponent_bits = 15 - fraction_bits;
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr unsigned infinity = ((1U << exponent_bits) - 1U) << fraction_bits;

  static bool is_nan(unsigned bits) { return (bits & 0x7FFFU) > infinity; }
  static bool is_finite(unsigned bits) { return (bits & 0x7FFFU) < infinity; }

  /// The value of a finite pattern; of infinity's, the power of two that stands in its place.
  static double value(unsigned bits) {
    const int exponent = static_cast<int>((bits & 0x7FFFU) >> fraction_bits);
    const unsigned fraction = bits & ((1U << fraction_bits) - 1U);
    const double significand = fraction + (exponent == 0 ? 0.0 : std::ldexp(1.0, fraction_bits));
    const double magnitude =
        std::ldexp(significand, (exponent == 0 ? 1 : exponent) - bias - fraction_bits);
    return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
  }
};

template <class S>
class NarrowScalar : public testing::Test {};
using NarrowScalars = testing::Types<bfloat16, half>;
TYPED_TEST_SUITE(NarrowScalar, NarrowScalars);

TYPED_TEST(NarrowScalar, EveryPatternHasItsValueAndComesBack) {
  using F = Format<TypeParam>;
  for (unsigned bits = 0; bits < 0x10000U; ++bits) {
    const auto value = std::bit_cast<TypeParam>(static_cast<std::uint16_t>(bits));
    ASSERT_EQ(vha::is_finite(value), F::is_finite(bits)) << bits;
    const auto as_float = convert<float>(value);
    const auto as_double = convert<double>(value);
    if (F::is_nan(bits)) {
      ASSERT_TRUE(std::isnan(as_float) && std::isnan(as_double)) << bits;
      ASSERT_TRUE(F::is_nan(bits_of(convert<TypeParam>(as_float)))) << bits;
      ASSERT_TRUE(F::is_nan(bits_of(convert<TypeParam>(as_double)))) << bits;
      continue;
    }
    if (F::is_finite(bits)) {
      ASSERT_EQ(as_float, F::value(bits)) << bits;
      ASSERT_EQ(as_double, F::value(bits)) << bits;
    } else {
      ASSERT_TRUE(std::isinf(as_float) && std::isinf(as_double)) << bits;
    }
    ASSERT_EQ(bits_of(convert<TypeParam>(as_float)), bits);
    ASSERT_EQ(bits_of(convert<TypeParam>(as_double)), bits);
  }
}

// Between any two neighbours: the middle goes to the even one, its own neighbours to the nearer
// one.
template <class S, class From>
void check_rounding_between_neighbours() {
  using F = Format<S>;
  for (unsigned low = 0; low < F::infinity; ++low) {
    for (const From sign : {From(1), From(-1)}) {
      const unsigned sign_bit = sign < 0 ? 0x8000U : 0U;
      const auto middle = static_cast<From>((F::value(low) + F::value(low + 1)) / 2);
      const From above = std::nextafter(middle, std::numeric_limits<From>::infinity());
      const unsigned even = low + (low & 1U);
      ASSERT_EQ(bits_of(convert<S>(sign * middle)), sign_bit | even) << low;
      ASSERT_EQ(bits_of(convert<S>(sign * std::nextafter(middle, From(0)))), sign_bit | low) << low;
      ASSERT_EQ(bits_of(convert<S>(sign * above)), sign_bit | (low + 1)) << low;
    }
  }
}

TYPED_TEST(NarrowScalar, FloatRoundsToNearestEven) {
  check_rounding_between_neighbours<TypeParam, float>();
}

TYPED_TEST(NarrowScalar, DoubleRoundsOnceToNearestEven) {
  check_rounding_between_neighbours<TypeParam, double>();
}

TYPED_TEST(NarrowScalar, TheOtherNarrowFormatRoundsOnce) {
  using Other = std::conditional_t<std::is_same_v<TypeParam, half>, bfloat16, half>;
  for (unsigned bits = 0; bits < 0x10000U; ++bits) {
    if (Format<Other>::is_nan(bits)) continue;
    const auto value = std::bit_cast<Other>(static_cast<std::uint16_t>(bits));
    ASSERT_EQ(bits_of(convert<TypeParam>(value)),
              bits_of(convert<TypeParam>(convert<double>(value))))
        << bits;
  }
}

TYPED_TEST(NarrowScalar, WhatIsBeyondTheRangeBecomesInfinite) {
  const unsigned infinity = Format<TypeParam>::infinity;
  for (const double large : {3.5e38, 1e39, 1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(bits_of(convert<TypeParam>(large)), infinity) << large;
    EXPECT_EQ(bits_of(convert<TypeParam>(-large)), 0x8000U | infinity) << large;
  }
}

TYPED_TEST(NarrowScalar, WhatIsTooSmallKeepsItsSign) {
  EXPECT_EQ(bits_of(convert<TypeParam>(1e-300)), 0U);
  EXPECT_EQ(bits_of(convert<TypeParam>(-1e-300)), 0x8000U);
  EXPECT_EQ(bits_of(convert<TypeParam>(-0.0)), 0x8000U);
}

TYPED_TEST(NarrowScalar, NanStaysNan) {
  // Payloads that stand only in the bits that are dropped.
  for (const std::uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0x7FC00000U}) {
    EXPECT_TRUE(Format<TypeParam>::is_nan(bits_of(convert<TypeParam>(std::bit_cast<float>(bits)))));
  }
  for (const std::uint64_t bits : {0x7FF0000000000001U, 0xFFF0000000000001U, 0x7FF8000000000000U}) {
    EXPECT_TRUE(
        Format<TypeParam>::is_nan(bits_of(convert<TypeParam>(std::bit_cast<double>(bits)))));
  }
}

TEST(Scalar, OneRoundingIsNotTwo) {
  // By way of float both would be ties, which go down to 1.
  EXPECT_EQ(convert<double>(convert<bfloat16>(1 + 0x1p-8 + 0x1p-40)), 1 + 0x1p-7);
  EXPECT_EQ(convert<double>(convert<half>(1 + 0x1p-11 + 0x1p-40)), 1 + 0x1p-10);
  // And these up.
  EXPECT_EQ(convert<double>(convert<bfloat16>(1 + 0x3p-8 - 0x1p-40)), 1 + 0x1p-7);
  EXPECT_EQ(convert<double>(convert<half>(1 + 0x3p-11 - 0x1p-40)), 1 + 0x1p-10);
}

TEST(Scalar, FloatAndDouble) {
  EXPECT_EQ(convert<float>(1 + 0x1p-24), 1.0F);
  EXPECT_EQ(convert<float>(1 + 0x3p-24), 1 + 0x1p-22F);
  EXPECT_EQ(convert<float>(1 + 0x1p-24 + 0x1p-50), 1 + 0x1p-23F);
  EXPECT_EQ(convert<double>(0.1F), static_cast<double>(0.1F));
  EXPECT_EQ(convert<float>(1e39), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(convert<float>(std::numeric_limits<double>::quiet_NaN())));
}

TEST(Scalar, LoadsFromAnyAddress) {
  std::vector<std::byte> bytes(17);
  for (std::size_t offset = 0; offset < 9; ++offset) {
    const double value = 1.5 + static_cast<double>(offset);
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
    EXPECT_EQ(vha::load<double>(bytes.data() + offset), value);
  }
}

}  // namespace
