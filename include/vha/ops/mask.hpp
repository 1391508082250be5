// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vha/ops/rope.hpp>

namespace vha {

/// Whether all, none or some of a block of keys are visible to a block of queries.
enum class Visibility { none, some, all };

/// The least and the greatest of some positions.
struct PositionRange {
  Position first;
  Position last;

  /// Precondition: `positions` is not empty.
  static PositionRange of(std::span<const Position> positions) {
    const auto [first, last] = std::ranges::minmax(positions);
    return {first, last};
  }
};

/// Key `t` is visible to query `s` iff 0 ≤ pos_s - pos_t, and pos_s - pos_t < window where a window
/// is set.
struct CausalMask {
  Index window = 0;  ///< 0: none

  bool visible(Position query, Position key) const {
    return key <= query && (window == 0 || query - key < window);
  }

  /// Judges a block by the ranges of its positions.
  Visibility visibility(const PositionRange& queries, const PositionRange& keys) const {
    const bool within = window == 0 || queries.last - keys.first < window;
    if (keys.last <= queries.first && within) return Visibility::all;
    const bool beyond = window != 0 && queries.first - keys.last >= window;
    if (keys.first > queries.last || beyond) return Visibility::none;
    return Visibility::some;
  }
  /// Precondition: neither span is empty.
  Visibility visibility(std::span<const Position> queries, std::span<const Position> keys) const {
    return visibility(PositionRange::of(queries), PositionRange::of(keys));
  }
};

}  // namespace vha
