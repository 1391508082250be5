// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace vha {

using Index = Eigen::Index;
using bfloat16 = Eigen::bfloat16;
using half = Eigen::half;

/// What weights, caches and activations can be stored in.
template <class T>
concept StorageScalar = std::same_as<T, double> || std::same_as<T, float> ||
    std::same_as<T, bfloat16> || std::same_as<T, half>;

/// What the arithmetic is done in.
template <class T>
concept ComputeScalar = std::same_as<T, double> || std::same_as<T, float>;

/// The scalar in which what is made of values stored as `T` is summed: double for double, float for
/// float, bfloat16 and half.
template <StorageScalar T>
using Compute = std::conditional_t<std::same_as<T, double>, double, float>;

/// True for every value but the infinities and NaN. Looks at the bits, because `std::isfinite` is
/// constant under -ffast-math.
template <StorageScalar T>
constexpr bool is_finite(T value) {
  if constexpr (std::same_as<T, double>) {
    return (std::bit_cast<std::uint64_t>(value) >> 52 & 0x7FFU) != 0x7FFU;
  } else if constexpr (std::same_as<T, float>) {
    return (std::bit_cast<std::uint32_t>(value) >> 23 & 0xFFU) != 0xFFU;
  } else if constexpr (std::same_as<T, bfloat16>) {
    return (std::bit_cast<std::uint16_t>(value) >> 7 & 0xFFU) != 0xFFU;
  } else {
    return (std::bit_cast<std::uint16_t>(value) >> 10 & 0x1FU) != 0x1FU;
  }
}

namespace detail {

/// Float nearest to `value` by rounding to odd: where `value` is no float, the neighbour whose last
/// bit is 1. A later rounding to a narrower format then gives what rounding `value` once gives.
inline float round_to_odd(double value) {
  // Without branches, so that compilers turn loops of it into vector code.
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const bool rounded_away = (back < 0 ? -back : back) > (value < 0 ? -value : value);
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  bits -= rounded_away ? 1U : 0U;  // also brings an overflow to infinity back to the largest float
  bits |= back != value ? 1U : 0U;
  return std::bit_cast<float>(bits);
}

inline bfloat16 round_to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  // A quiet NaN, so that dropping the low half cannot make an infinity.
  const std::uint32_t rounded = is_nan ? bits | 0x00400000U : bits + 0x7FFFU + (bits >> 16 & 1U);
  return std::bit_cast<bfloat16>(static_cast<std::uint16_t>(rounded >> 16));
}

}  // namespace detail

/// `value` in the storage scalar `To`, rounded once, to nearest even. NaN stays NaN; what is beyond
/// the largest number becomes infinite.
template <StorageScalar To, StorageScalar From>
To convert(From value) {
  if constexpr (std::same_as<To, From>) {
    return value;
  } else if constexpr (std::same_as<From, bfloat16>) {
    const auto bits = static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(value)) << 16;
    return convert<To>(std::bit_cast<float>(bits));
  } else if constexpr (std::same_as<From, half>) {
    return convert<To>(static_cast<float>(value));
  } else if constexpr (ComputeScalar<To>) {
    return static_cast<To>(value);
  } else if constexpr (std::same_as<From, double>) {
    return convert<To>(detail::round_to_odd(value));
  } else if constexpr (std::same_as<To, bfloat16>) {
    return detail::round_to_bfloat16(value);
  } else {
    return half(value);
  }
}

/// The `T` whose bytes stand at `address`, at any alignment.
template <StorageScalar T>
T load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

}  // namespace vha
