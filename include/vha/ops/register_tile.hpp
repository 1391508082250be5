// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vha/ops/lanes.hpp>

// The loop that all products of matrices end in. A tile of C, `Rows` rows of `Packets` packets, stays
// in registers while the sum goes by: at each step one packet of B for each column packet, times one
// element of A for each row, the same in all lanes.
//
//                columns ->
//             +-----+-----+
//             |  B  |     | steps
//             +-----+-----+
//   +------+  +-----+-----+
//   |  A   |  |  C  |     | rows
//   +------+  +-----+-----+
//
// A and B stay where they are: the tile reads them through an accessor. An element of C is summed in
// the order of the steps whatever the tile, so that its bits do not depend on how C is cut.

namespace vha::detail {

/// Element (row, step) of A, at any alignment. The strides, in bytes, may be integral_constants.
template <class Element, class RowBytes = Index, class StepBytes = Index>
struct TileRows {
  const std::byte* data;
  [[no_unique_address]] RowBytes row_bytes;
  [[no_unique_address]] StepBytes step_bytes;

  Element operator()(Index row, Index step) const {
    Element element;
    std::memcpy(&element, data + row * row_bytes + step * step_bytes, sizeof element);
    return element;
  }
};

/// A that is packed as `[step, Rows]`.
template <Index Rows, class Element>
auto packed_rows(const Element* panel) {
  constexpr Index size = sizeof(Element);
  using RowBytes = std::integral_constant<Index, size>;
  using StepBytes = std::integral_constant<Index, size * Rows>;
  return TileRows<Element, RowBytes, StepBytes>{reinterpret_cast<const std::byte*>(panel), {}, {}};
}

/// B that is packed as `[step, columns]`.
template <Operand T, Index N, class Step = Index>
struct PackedColumns {
  const typename LaneFormat<T>::Element* data;
  Step step_elements;

  auto operator()(Index step, Index packet) const {
    return Lanes<T, N>::load(data + step * step_elements + packet * N);
  }
};

/// B as it is stored, row-major, at any alignment: in `T` itself, or in bfloat16 where `T` is float.
/// Where a lane holds pairs, two rows are interleaved on the way; the depth must then be even.
template <Operand T, StorageScalar S>
struct StoredColumns {
  static constexpr Index lanes = widest<Compute<T>>;
  static constexpr bool supported =
      LaneFormat<T>::pairs
          ? lanes == 16 && std::same_as<S, T>
          : std::same_as<S, T> || (std::same_as<S, bfloat16> && std::same_as<Compute<T>, float>);
  const std::byte* data;
  Index row_bytes;
  /// Rows that lie so many bytes further are asked for on the way.
  Index ahead_bytes = 0;

  auto operator()(Index step, Index packet) const {
    typename Lanes<T, lanes>::Elements elements;
    if (ahead_bytes != 0) {
      const std::byte* const row = data + step * LaneFormat<T>::terms * row_bytes + ahead_bytes;
      const Index first = packet * lanes * static_cast<Index>(sizeof(S));
      for (Index term = 0; term < LaneFormat<T>::terms; ++term) {
        // A packet of pairs is half a line of each row; the other half's asking does no harm.
        __builtin_prefetch(row + term * row_bytes + first, 0, to_second_level);
      }
    }
    if constexpr (!supported) {
      static_cast<void>(step), static_cast<void>(packet);
    } else if constexpr (LaneFormat<T>::pairs) {
      elements = Lanes<T, lanes>::interleave(data + 2 * step * row_bytes, row_bytes, packet);
    } else {
      const std::byte* const at = data + step * row_bytes + packet * lanes * Index(sizeof(S));
      if constexpr (std::same_as<S, Compute<T>>) {
        std::memcpy(&elements, at, sizeof elements);
      } else {
        Compute<T> terms[lanes];
        for (Index i = 0; i < lanes; ++i) {
          terms[i] = LaneFormat<T>::term(load<S>(at + i * Index(sizeof(S))));
        }
        std::memcpy(&elements, terms, sizeof elements);
      }
    }
    return elements;
  }
};

/// What becomes of the elements that C has: they are replaced, the sum goes on from them, or the sum
/// is made by itself and added to them.
enum class SumInto { replace, go_on, add };

/// C[rows, cols] (+)= A · B with `rows <= Rows` and `cols <= Packets * N`; what lies beyond is read
/// from A and B and dropped. C is row-major, rows `c_stride` apart.
template <Operand T, Index Rows, Index Packets, Index N, class A, class B>
// Not inlined: amid a larger function compilers would keep the sums in memory.
EIGEN_DONT_INLINE void multiply_tile(Index steps, const A& a, const B& b, Compute<T>* c,
                                     Index c_stride, Index rows, Index cols, SumInto into) {
  using Tile = Lanes<T, N>;
  using Packet = typename Tile::Packet;
  namespace packet = Eigen::internal;
  const bool whole = cols == Packets * N;
  alignas(Packet) Compute<T> spill[Packets * N] = {};  // a row that C holds only a part of
  const auto row_of_c = [&](Index row) {
    Compute<T>* const address = c + row * c_stride;
    if (whole) return address;
    if (into != SumInto::replace) std::copy_n(address, cols, spill);
    return spill + 0;
  };
  // Unrolled whole, or compilers keep the sums in memory.
  Packet sums[Rows][Packets];
#pragma GCC unroll 16
  for (Index row = 0; row < Rows; ++row) {
    const bool goes_on = into == SumInto::go_on && row < rows;
    const Compute<T>* const source = goes_on ? row_of_c(row) : nullptr;
#pragma GCC unroll 16
    for (Index p = 0; p < Packets; ++p) {
      sums[row][p] =
          goes_on ? packet::ploadu<Packet>(source + p * N) : packet::pset1<Packet>(Compute<T>(0));
    }
  }
  for (Index step = 0; step < steps; ++step) {
    typename Tile::Elements columns[Packets];
#pragma GCC unroll 16
    for (Index p = 0; p < Packets; ++p) columns[p] = b(step, p);
#pragma GCC unroll 16
    for (Index row = 0; row < Rows; ++row) {
      const auto element = a(row, step);
#pragma GCC unroll 16
      for (Index p = 0; p < Packets; ++p) {
        sums[row][p] = Tile::step(element, columns[p], sums[row][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (Index row = 0; row < Rows; ++row) {
    if (row >= rows) break;
    Compute<T>* const target = row_of_c(row);
#pragma GCC unroll 16
    for (Index p = 0; p < Packets; ++p) {
      Packet result = sums[row][p];
      if (into == SumInto::add) {
        result = packet::padd(packet::ploadu<Packet>(target + p * N), result);
      }
      packet::pstoreu(target + p * N, result);
    }
    if (!whole) std::copy_n(spill, cols, c + row * c_stride);
  }
}

}  // namespace vha::detail
