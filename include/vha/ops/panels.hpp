// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vha/core/view.hpp>
#include <vha/ops/lanes.hpp>

// Copies of operands in the order in which a register tile reads them: panels of a few lines, all
// lines' first elements, then their second, and so on. A line is a row of A or a column of B.

namespace vha::detail {

/// The element of `line` that begins at term `k`; terms beyond the line's end are zeros.
template <Operand T, StorageScalar S>
typename LaneFormat<T>::Element panel_element(const MatrixView<S>& lines, Index line, Index k) {
  if constexpr (LaneFormat<T>::pairs) {
    const auto term = [&](Index at) {
      return at < lines.cols ? convert<T>(lines(line, at)) : T(0);
    };
    return bfloat16_pair(term(k), term(k + 1));
  } else {
    return LaneFormat<T>::term(lines(line, k));
  }
}

/// `count` elements of a line whose terms are contiguous from `source` on.
template <Operand T, StorageScalar S>
void copy_line(const std::byte* source, Index count, typename LaneFormat<T>::Element* target) {
  using Element = typename LaneFormat<T>::Element;
  constexpr Index size = sizeof(S);
  if constexpr (is_stored_as_elements<T, S>) {
    std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(Element));
  } else if constexpr (LaneFormat<T>::pairs) {
    for (Index i = 0; i < count; ++i) {
      target[i] = bfloat16_pair(convert<T>(load<S>(source + 2 * i * size)),
                                convert<T>(load<S>(source + (2 * i + 1) * size)));
    }
  } else {
    for (Index i = 0; i < count; ++i) target[i] = LaneFormat<T>::term(load<S>(source + i * size));
  }
}

/// Packs lines whose terms are contiguous: a square of packets is loaded, turned and stored.
template <Operand T, Index Lines, StorageScalar S>
void pack_contiguous_lines(const MatrixView<S>& lines, typename LaneFormat<T>::Element* target) {
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  using Sum = typename Format::Sum;
  using Packet = typename Eigen::internal::packet_traits<Sum>::type;
  constexpr Index side = widest<Sum>;
  constexpr Index squares_ahead = 8;
  static_assert(sizeof(Element) == sizeof(Sum));
  const Index whole = lines.cols / (side * Format::terms) * side;
  for (Index first = 0; first < Lines; first += side) {
    const Index present = std::clamp<Index>(lines.rows - first, 0, side);
    for (Index step = 0; step < whole; step += side) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
      Eigen::internal::PacketBlock<Packet, side> square;
#pragma GCC diagnostic pop
#pragma GCC unroll 16
      for (Index i = 0; i < side; ++i) {
        if (i < present) {
          const std::byte* const at = lines.address(first + i, step * Format::terms);
          if (step + squares_ahead * side < whole) {
            __builtin_prefetch(at + squares_ahead * side * Index(sizeof(S)) * Format::terms, 0,
                               to_second_level);
          }
          Element elements[side];
          copy_line<T, S>(at, side, elements);
          std::memcpy(&square.packet[i], elements, sizeof elements);
        } else {
          square.packet[i] = Eigen::internal::pset1<Packet>(Sum(0));
        }
      }
      Eigen::internal::ptranspose(square);
      Element* const to = target + step * Lines + first;
      if (Lines % side == 0 || (Lines < side && step + 2 * side <= whole)) {
        // A packet wider than the panel runs into the next step, which is written after it.
#pragma GCC unroll 16
        for (Index i = 0; i < side; ++i) {
          std::memcpy(to + i * Lines, &square.packet[i], sizeof(Packet));
        }
      } else {
        for (Index i = 0; i < side; ++i) {
          const Index count = std::min(side, Lines - first);
          std::memcpy(to + i * Lines, &square.packet[i],
                      static_cast<std::size_t>(count) * sizeof(Element));
        }
      }
    }
  }
  for (Index step = whole; step < Format::steps(lines.cols); ++step) {
    for (Index line = 0; line < Lines; ++line) {
      target[step * Lines + line] =
          line < lines.rows ? panel_element<T>(lines, line, step * Format::terms) : Element{};
    }
  }
}

/// Packs `lines`, `[at most Lines, depth]`, into `target` `[steps, Lines]`, missing lines as zeros.
template <Operand T, Index Lines, StorageScalar S>
void pack_panel(const MatrixView<S>& lines, typename LaneFormat<T>::Element* target) {
  using Format = LaneFormat<T>;
  if (lines.col_stride == 1) return pack_contiguous_lines<T, Lines>(lines, target);
  for (Index step = 0; step < Format::steps(lines.cols); ++step, target += Lines) {
    const Index k = step * Format::terms;
    if (lines.rows < Lines || lines.row_stride != 1 || k + Format::terms > lines.cols) {
      for (Index line = 0; line < Lines; ++line) {
        target[line] =
            line < lines.rows ? panel_element<T>(lines, line, k) : typename Format::Element{};
      }
      continue;
    }
    constexpr Index size = sizeof(S);
    const std::byte* const source = lines.address(0, k);
    if constexpr (Format::pairs) {
      const std::byte* const next = lines.address(0, k + 1);
      for (Index line = 0; line < Lines; ++line) {
        target[line] = bfloat16_pair(convert<T>(load<S>(source + line * size)),
                                     convert<T>(load<S>(next + line * size)));
      }
    } else {
      copy_line<T, S>(source, Lines, target);
    }
  }
}

}  // namespace vha::detail
