// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/ops/rope.hpp>

namespace vha {

/// At which end of a row its padding stands.
enum class Padding { right, left };

/// Which tokens of a batch `[batch, tokens]` are real, and where they stand in their sequences.
/// Padding is never read, attended to or cached; its outputs are zeros.
struct TokenLayout {
  std::span<const Index> lengths = {};  ///< `[batch]`, real tokens of each row; empty: all are
  Padding padding = Padding::right;
  /// `[batch, tokens]`, absolute position of each token, from 0 to 2^31 - 1; those of padding are not
  /// looked at. Empty: each row goes on where its cache ends.
  std::span<const Position> positions = {};

  /// Throws Error where a field does not fit a batch of this shape.
  void validate(Index batch, Index tokens) const {
    if (!lengths.empty()) require_size("lengths.size() (batch)", batch, ssize(lengths));
    for (const Index length : lengths) {
      if (length < 0 || length > tokens) raise("lengths", text("0 to ", tokens), text(length));
    }
    if (positions.empty()) return;
    require_size("positions.size() (batch * tokens)", checked_product("batch", {batch, tokens}),
                 ssize(positions));
    for (Index row = 0; row < batch; ++row) {
      for (const Position position : row_positions(row, tokens)) {
        require_position("positions", position);
      }
    }
  }

  Index length(Index row, Index tokens) const {
    return lengths.empty() ? tokens : lengths[static_cast<std::size_t>(row)];
  }
  /// The first real token of a row.
  Index first(Index row, Index tokens) const {
    return padding == Padding::left ? tokens - length(row, tokens) : 0;
  }
  /// The positions of a row's real tokens; empty where none are given.
  std::span<const Position> row_positions(Index row, Index tokens) const {
    if (positions.empty()) return {};
    return part(positions, row * tokens + first(row, tokens), length(row, tokens));
  }

 private:
  template <class T>
  static Index ssize(std::span<T> span) {
    return static_cast<Index>(span.size());
  }
};

}  // namespace vha
