// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>
#include <vha/attention/token_layout.hpp>
#include <vha/core/activations.hpp>

// A layer works on the real tokens of a padded batch as one list, row after row. Here are the list
// and the ways between it and the batch.

namespace vha::detail {

/// A real token of the batch.
struct BatchToken {
  Index row;         ///< sequence
  Index index;       ///< place in the batch's row, padding counted
  Index offset;      ///< place among the row's new tokens
  Index row_tokens;  ///< new tokens of the row
};
using BatchTokens = std::span<const BatchToken>;

/// Lists the real tokens, row by row, with their positions: those given, or the ones from
/// `next_position(row)` on.
template <class NextPosition>
void list_tokens(Index batch, Index tokens, const NextPosition& next_position,
                 const TokenLayout& layout, std::vector<BatchToken>& listed,
                 std::vector<Position>& positions) {
  listed.clear();
  positions.clear();
  for (Index row = 0; row < batch; ++row) {
    const auto given = layout.row_positions(row, tokens);
    const Position next = next_position(row);
    const Index row_tokens = layout.length(row, tokens);
    for (Index k = 0; k < row_tokens; ++k) {
      listed.push_back({row, layout.first(row, tokens) + k, k, row_tokens});
      positions.push_back(given.empty() ? next + k : given[static_cast<std::size_t>(k)]);
    }
  }
}

/// Calls `body(row, first, count)` for each run of tokens that is of one row.
template <class Body>
void for_each_row(BatchTokens tokens, Body&& body) {
  for (std::size_t first = 0, end = 0; first < tokens.size(); first = end) {
    while (end < tokens.size() && tokens[end].row == tokens[first].row) ++end;
    body(tokens[first].row, static_cast<Index>(first), static_cast<Index>(end - first));
  }
}

/// The tokens' activations in the scalar `T`, `[tokens, channels]`, in `buffer`.
template <ComputeScalar T, class X>
MatrixView<T> gather(const ActivationsView<X>& x, BatchTokens tokens, Buffer<T>& buffer) {
  const auto count = static_cast<Index>(tokens.size());
  T* target = buffer.reserve(count * x.channels);
  const T* const start = target;
  for (const auto& token : tokens) {
    for (Index c = 0; c < x.channels; ++c) {
      *target++ = convert<T>(std::remove_const_t<X>(x(token.row, token.index, c)));
    }
  }
  return row_major_view(start, count, x.channels, x.channels);
}

/// Writes the tokens' outputs, `[tokens, channels]`, to their places in the batch.
template <ComputeScalar T, class Out>
void scatter(const T* source, BatchTokens tokens, const ActivationsView<Out>& out) {
  for (const auto& token : tokens) {
    for (Index c = 0; c < out.channels; ++c) {
      out(token.row, token.index, c) = convert<Out>(*source++);
    }
  }
}

template <class Out>
void zero_padding(const ActivationsView<Out>& out, const TokenLayout& layout) {
  for (Index row = 0; row < out.batch; ++row) {
    const Index first = layout.first(row, out.tokens);
    const Index end = first + layout.length(row, out.tokens);
    for (Index token = 0; token < out.tokens; ++token) {
      if (token >= first && token < end) continue;
      for (Index c = 0; c < out.channels; ++c) out(row, token, c) = convert<Out>(0.0);
    }
  }
}

/// Writes the tokens' heads to their places in `target`, `[batch, tokens, heads, head_dim]`.
template <ComputeScalar T>
void record_heads(Tensor4<T>& target, const HeadsView<T>& heads, BatchTokens tokens) {
  for (Index token = 0; token < heads.tokens; ++token) {
    const auto& place = tokens[static_cast<std::size_t>(token)];
    for (Index group = 0; group < heads.groups; ++group) {
      for (Index member = 0; member < heads.group_size; ++member) {
        std::copy_n(heads.head(token, group, member), heads.head_dim,
                    &target(place.row, place.index, group * heads.group_size + member, 0));
      }
    }
  }
}

/// The tokens' heads of a tensor `[batch, tokens, heads, head_dim]` as rows `[tokens, heads *
/// head_dim]`: where they stand if all tokens are real, else copied to `buffer`.
template <ComputeScalar T>
const T* gather_heads(const Tensor4<T>& source, BatchTokens tokens, Buffer<T>& buffer) {
  if (static_cast<Index>(tokens.size()) == source.dimension(0) * source.dimension(1)) {
    return source.data();
  }
  const Index width = source.dimension(2) * source.dimension(3);
  T* const rows = buffer.reserve(static_cast<Index>(tokens.size()) * width);
  T* target = rows;
  for (const auto& token : tokens) {
    target = std::copy_n(&source(token.row, token.index, 0, 0), width, target);
  }
  return rows;
}

}  // namespace vha::detail
