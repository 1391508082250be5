// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <concepts>
#include <vha/core/scalar.hpp>

namespace vha::detail {

/// A packet of `N` scalars, or the scalar itself for one.
template <ComputeScalar T, Index N>
struct PacketOf {
  using type = typename Eigen::internal::find_best_packet<T, N>::type;
};
template <ComputeScalar T>
struct PacketOf<T, 1> {
  using type = T;
};

/// Comparing and choosing lane by lane. In a packet a mask is all bits set or none; in one scalar
/// that would be a NaN, which -ffast-math may take for 0, so that there it is a bool.
template <class Packet>
auto equal(const Packet& a, const Packet& b) {
  if constexpr (std::floating_point<Packet>) {
    return a == b;
  } else {
    return Eigen::internal::pcmp_eq(a, b);
  }
}
template <class Packet>
auto less(const Packet& a, const Packet& b) {
  if constexpr (std::floating_point<Packet>) {
    return a < b;
  } else {
    return Eigen::internal::pcmp_lt(a, b);
  }
}
template <class Packet>
auto less_or_equal(const Packet& a, const Packet& b) {
  if constexpr (std::floating_point<Packet>) {
    return a <= b;
  } else {
    return Eigen::internal::pcmp_le(a, b);
  }
}
template <class Packet, class Mask>
Packet select(const Mask& mask, const Packet& chosen, const Packet& otherwise) {
  if constexpr (std::floating_point<Packet>) {
    return mask ? chosen : otherwise;
  } else {
    return Eigen::internal::pselect(mask, chosen, otherwise);
  }
}

/// Below this, `exp_nonpositive` is 0: near there the result would lose its last bits.
template <ComputeScalar T>
inline constexpr T least_exponent = std::same_as<T, float> ? T(-86) : T(-706);

/// e^x for x ≤ 0 (and a little above, as rounding leaves it), lane by lane: within 2 units in the last
/// place, exactly 1 for 0, and exactly 0 below `least_exponent`. NaN stays NaN. The same in a packet
/// of any width; one scalar alone is std::exp's. In float by the reduction and the polynomial of Cephes' expf.
template <ComputeScalar T, Index N>
typename PacketOf<T, N>::type exp_nonpositive(const typename PacketOf<T, N>::type& x) {
  using Packet = typename PacketOf<T, N>::type;
  namespace packet = Eigen::internal;
  if constexpr (N == 1) {
    return x < least_exponent<T> ? T(0) : std::exp(x);
  } else {
    const auto all = [](double value) { return packet::pset1<Packet>(static_cast<T>(value)); };
    const Packet least = all(least_exponent<T>);
    const Packet vanished = less(x, least);
    const Packet clamped = packet::pmax(x, least);
    Packet power;
    if constexpr (std::same_as<T, float>) {
      const Packet n = packet::pfloor(packet::pmadd(clamped, all(1.44269504088896341), all(0.5)));
      Packet r = packet::pmadd(n, all(-0.693359375), clamped);  // ln 2 in two parts
      r = packet::pmadd(n, all(2.12194440e-4), r);
      Packet y = packet::pmadd(all(1.9875691500e-4), r, all(1.3981999507e-3));
      y = packet::pmadd(y, r, all(8.3334519073e-3));
      y = packet::pmadd(y, r, all(4.1665795894e-2));
      y = packet::pmadd(y, r, all(1.6666665459e-1));
      y = packet::pmadd(y, r, all(5.0000001201e-1));
      y = packet::padd(packet::pmadd(y, packet::pmul(r, r), r), all(1));
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
      power = packet::pldexp_fast_impl<Packet>::run(y, n);
#pragma GCC diagnostic pop
    } else {
      power = packet::pexp_double(clamped);
    }
    return select(vanished, all(0), power);
  }
}

}  // namespace vha::detail
