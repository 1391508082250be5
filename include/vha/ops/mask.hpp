// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vha/ops/rope.hpp>

namespace vha {

/// Whether all, none or some of a block of keys are visible to a block of queries.
enum class Visibility { none, some, all };

/// Key `t` is visible to query `s` iff 0 ≤ pos_s - pos_t, and pos_s - pos_t < window where a window
/// is set.
struct CausalMask {
  Index window = 0;  ///< 0: none

  /// Judges a block by the ranges of its positions. Precondition: neither span is empty.
  Visibility visibility(std::span<const Position> queries, std::span<const Position> keys) const {
    const auto [first_query, last_query] = std::ranges::minmax(queries);
    const auto [first_key, last_key] = std::ranges::minmax(keys);
    const bool within = window == 0 || last_query - first_key < window;
    if (last_key <= first_query && within) return Visibility::all;
    const bool beyond = window != 0 && first_query - last_key >= window;
    if (first_key > last_query || beyond) return Visibility::none;
    return Visibility::some;
  }
};

}  // namespace vha
