// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
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
    return key <= query && within_window(query, key);
  }

  /// Judges a block by the ranges of its positions.
  Visibility visibility(const PositionRange& queries, const PositionRange& keys) const {
    if (keys.last <= queries.first && within_window(queries.last, keys.first)) {
      return Visibility::all;
    }
    if (keys.first > queries.last || !within_window(queries.first, keys.last)) {
      return Visibility::none;
    }
    return Visibility::some;
  }
  /// Precondition: neither span is empty.
  Visibility visibility(std::span<const Position> queries, std::span<const Position> keys) const {
    return visibility(PositionRange::of(queries), PositionRange::of(keys));
  }

 private:
  /// False where the key is too old. Unsigned, since the distance of two positions may not fit a
  /// Position.
  bool within_window(Position query, Position key) const {
    const auto distance = static_cast<std::uint64_t>(query) - static_cast<std::uint64_t>(key);
    return window == 0 || key > query || distance < static_cast<std::uint64_t>(window);
  }
};

}  // namespace vha
