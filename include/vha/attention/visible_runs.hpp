// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vector>
#include <vha/core/sizes.hpp>
#include <vha/ops/mask.hpp>

namespace vha::detail {

/// Steps [step, step_end) of a block of keys, seen by all of some queries or by some.
struct VisibleRun {
  Index step;
  Index step_end;
  bool to_all;
};

/// Lists the runs of keys that any of `queries` sees, from left to right, in steps of `terms` keys.
inline void list_visible_runs(const CausalMask& mask, std::span<const Position> queries,
                              std::span<const Position> keys, Visibility of_block, Index terms,
                              std::vector<VisibleRun>& runs) {
  runs.clear();
  const auto count = static_cast<Index>(keys.size());
  const Index steps = pieces(count, terms);
  if (of_block == Visibility::all) return runs.push_back({0, steps, true});
  const auto range = PositionRange::of(queries);
  for (Index step = 0; step < steps; ++step) {
    bool any = false, all = true;
    for (Index key = step * terms; key < std::min(count, (step + 1) * terms); ++key) {
      const Position at = keys[static_cast<std::size_t>(key)];
      const Visibility seen = mask.visibility(range, {at, at});
      any = any || seen != Visibility::none;
      all = all && seen == Visibility::all;
    }
    if (!any) continue;
    if (!runs.empty() && runs.back().step_end == step && runs.back().to_all == all) {
      ++runs.back().step_end;
    } else {
      runs.push_back({step, step + 1, all});
    }
  }
}

}  // namespace vha::detail
