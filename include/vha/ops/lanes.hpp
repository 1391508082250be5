// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vha/core/scalar.hpp>
#include <vha/core/sizes.hpp>
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace vha {

/// What a product is taken in: double, float, or bfloat16, whose products are summed in float.
template <class T>
concept Operand = ComputeScalar<T> || std::same_as<T, bfloat16>;

/// What operands stored as `S...` are multiplied in where the rest is done in `T`: bfloat16 if all of
/// them are, as models in bfloat16 are served; else nothing is rounded.
template <ComputeScalar T, class... S>
using ProductsOf =
    std::conditional_t<(std::same_as<std::remove_const_t<S>, bfloat16> && ...), bfloat16, T>;

namespace detail {

/// A hint for __builtin_prefetch. The first level has few slots for lines on their way: asking for
/// lines there holds the processor up.
inline constexpr int to_second_level = 2;

/// 32 vector registers rather than 16: larger tiles.
inline constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;

/// How many lanes Eigen's widest packet has.
template <ComputeScalar T>
inline constexpr Index widest = Eigen::internal::packet_traits<T>::size;

/// Whether the target multiplies bfloat16 a matrix tile at a time (AMX; clang 14 has its own names), and
/// whether that can be used: the system must save the tiles' state for those that ask.
#if defined(__AMX_BF16__) || defined(__AMXBF16__)
inline constexpr bool targets_matrix_tiles = true;
#else
inline constexpr bool targets_matrix_tiles = false;
#endif
#if defined(__x86_64__) && defined(__linux__) && (defined(__AMX_TILE__) || defined(__AMXTILE__))
inline constexpr bool can_use_matrix_tiles = targets_matrix_tiles;
#else
inline constexpr bool can_use_matrix_tiles = false;
#endif

/// Whether there are instructions that round floats to bfloat16 and multiply pairs of them. Not where
/// tiles are targeted and cannot be used: there a dot takes as long as four multiply-adds of floats.
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
inline constexpr bool has_bfloat16_pairs =
    widest<float> == 16 && targets_matrix_tiles == can_use_matrix_tiles;
#else
inline constexpr bool has_bfloat16_pairs = false;
#endif

/// Whether bfloat16 is multiplied by tiles, and whether by dot instructions.
inline constexpr bool has_matrix_tiles = has_bfloat16_pairs && can_use_matrix_tiles;
inline constexpr bool has_bfloat16_dot = has_bfloat16_pairs && !has_matrix_tiles;

/// Two neighbours along the sum, the first in the low half: what bfloat16 dots and tiles take.
struct BFloat16Pair {
  std::uint32_t bits;
};

/// How products of `T` are summed, a lane for each result. A lane's share of an operand is an
/// `Element`, which holds `terms` neighbours along the sum.
template <Operand T>
struct LaneFormat {
  using Sum = Compute<T>;
  static constexpr bool pairs = std::same_as<T, bfloat16> && has_bfloat16_pairs;
  /// Whether the products are those of matrix_tiles.hpp.
  static constexpr bool by_tiles = std::same_as<T, bfloat16> && has_matrix_tiles;
  using Element = std::conditional_t<pairs, BFloat16Pair, Sum>;
  static constexpr Index terms = pairs ? 2 : 1;
  /// Elements that one instruction sums.
  static constexpr Index steps_at_once = by_tiles ? 16 : 1;
  static constexpr Index terms_at_once = steps_at_once * terms;
  /// Elements that hold `depth` terms, the last ones filled up with zeros.
  static constexpr Index steps(Index depth) { return pieces(depth, terms_at_once) * steps_at_once; }

  /// One term, rounded to `T`.
  template <StorageScalar S>
  static Sum term(S value) {
    return convert<Sum>(convert<T>(value));
  }
};

/// Whether neighbours stored as `S` are elements as they stand.
template <Operand T, StorageScalar S>
inline constexpr bool is_stored_as_elements = std::same_as<S, T> &&
                                              sizeof(S) * LaneFormat<T>::terms ==
                                                  sizeof(typename LaneFormat<T>::Element);

inline BFloat16Pair bfloat16_pair(bfloat16 first, bfloat16 second) {
  return {std::bit_cast<std::uint16_t>(first) |
          static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(second)) << 16};
}

/// `N` lanes of sums and one step of them: sum += a · b, `a` the same for all lanes.
template <Operand T, Index N>
struct Lanes {
  using Sum = Compute<T>;
  using Packet = typename Eigen::internal::find_best_packet<Sum, N>::type;
  using Elements = Packet;

  static Elements load(const Sum* source) { return Eigen::internal::ploadu<Packet>(source); }
  static Packet step(Sum a, const Elements& b, const Packet& sum) {
    return Eigen::internal::pmadd(Eigen::internal::pset1<Packet>(a), b, sum);
  }
};

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
template <std::same_as<bfloat16> T>
requires has_bfloat16_pairs struct Lanes<T, 16> {
  using Packet = __m512;
  using Elements = __m512i;
  static Elements load(const BFloat16Pair* source) { return _mm512_loadu_si512(source); }
  /// Packet `packet` of two rows of bfloat16, a pair from each column.
  static Elements interleave(const std::byte* row, Index row_bytes, Index packet) {
    // Two packets share the loads of their rows, which the compiler merges.
    const std::byte* const at = row + packet / 2 * 64;
    const __m512i first = _mm512_loadu_si512(at);
    const __m512i second = _mm512_loadu_si512(at + row_bytes);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    return _mm512_permutex2var_epi16(first, packet % 2 == 0 ? low : high, second);
  }
  /// Pairs of both packets' lanes, rounded.
  static Elements pair_up(const Packet& first, const Packet& second) {
    const __m512i one_by_one =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto both = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    return _mm512_permutexvar_epi16(one_by_one, both);
  }
  static Packet step(BFloat16Pair a, const Elements& b, const Packet& sum) {
    return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(_mm512_set1_epi32(std::bit_cast<int>(a))),
                            std::bit_cast<__m512bh>(b));
  }
};
template <std::same_as<bfloat16> T>
requires has_bfloat16_pairs struct Lanes<T, 8> {
  using Packet = __m256;
  using Elements = __m256i;
  static Elements load(const BFloat16Pair* source) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  }
  static Elements pair_up(const Packet& first, const Packet& second) {
    const __m256i one_by_one =
        _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    const auto both = std::bit_cast<__m256i>(_mm256_cvtne2ps_pbh(second, first));
    return _mm256_permutexvar_epi16(one_by_one, both);
  }
  static Packet step(BFloat16Pair a, const Elements& b, const Packet& sum) {
    return _mm256_dpbf16_ps(sum, std::bit_cast<__m256bh>(_mm256_set1_epi32(std::bit_cast<int>(a))),
                            std::bit_cast<__m256bh>(b));
  }
};
template <std::same_as<bfloat16> T>
requires has_bfloat16_pairs struct Lanes<T, 4> {
  using Packet = __m128;
  using Elements = __m128i;
  static Elements load(const BFloat16Pair* source) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  }
  static Elements pair_up(const Packet& first, const Packet& second) {
    const auto both = std::bit_cast<__m128i>(_mm_cvtne2ps_pbh(second, first));
    return _mm_unpacklo_epi16(both, _mm_unpackhi_epi64(both, both));
  }
  static Packet step(BFloat16Pair a, const Elements& b, const Packet& sum) {
    return _mm_dpbf16_ps(sum, std::bit_cast<__m128bh>(_mm_set1_epi32(std::bit_cast<int>(a))),
                         std::bit_cast<__m128bh>(b));
  }
};
#endif

}  // namespace detail
}  // namespace vha
