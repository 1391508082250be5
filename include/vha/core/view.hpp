// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>
#include <vha/core/scalar.hpp>

namespace vha {

/// A matrix somewhere in memory that is read, never written: address, sizes and strides (counted in
/// elements). The address needs no alignment, so that a matrix in a memory-mapped file will do.
template <StorageScalar S>
struct MatrixView {
  using Scalar = S;

  const std::byte* data = nullptr;
  Index rows = 0;
  Index cols = 0;
  Index row_stride = 0;
  Index col_stride = 1;

  const std::byte* address(Index row, Index col) const {
    return data + (row * row_stride + col * col_stride) * static_cast<Index>(sizeof(S));
  }
  S operator()(Index row, Index col) const { return load<S>(address(row, col)); }

  MatrixView block(Index row, Index col, Index block_rows, Index block_cols) const {
    return {address(row, col), block_rows, block_cols, row_stride, col_stride};
  }
  MatrixView transposed() const { return {data, cols, rows, col_stride, row_stride}; }
};

/// Writes the elements of `view`, row by row, to `target`, each rounded once.
template <StorageScalar T, StorageScalar S>
void copy_elements(const MatrixView<S>& view, T* target) {
  constexpr auto size = static_cast<Index>(sizeof(S));
  if (view.col_stride == 1) {  // a loop of its own, which compilers turn into vector code
    for (Index row = 0; row < view.rows; ++row, target += view.cols) {
      const std::byte* const source = view.address(row, 0);
      for (Index col = 0; col < view.cols; ++col) {
        target[col] = convert<T>(load<S>(source + col * size));
      }
    }
    return;
  }
  // Tile by tile: in a transposed matrix the elements of a column lie side by side, and one row alone
  // would use one of each cache line. By way of a tile of its own, since columns and rows a power of
  // two apart drive each other out of the cache.
  constexpr Index tile_rows = 32, tile_cols = 64;
  std::array<T, tile_rows * tile_cols> tile;
  for (Index first_col = 0; first_col < view.cols; first_col += tile_cols) {
    const Index cols = std::min(tile_cols, view.cols - first_col);
    for (Index first_row = 0; first_row < view.rows; first_row += tile_rows) {
      const Index rows = std::min(tile_rows, view.rows - first_row);
      for (Index col = 0; col < cols; ++col) {
        const std::byte* const source = view.address(first_row, first_col + col);
        // The tile below, as the processor does not follow so many columns by itself.
        const Index below = std::min(tile_rows, view.rows - 1 - first_row);
        __builtin_prefetch(source + below * view.row_stride * size);
        for (Index row = 0; row < rows; ++row) {
          tile[static_cast<std::size_t>(row * tile_cols + col)] =
              convert<T>(load<S>(source + row * view.row_stride * size));
        }
      }
      for (Index row = 0; row < rows; ++row) {
        std::copy_n(&tile[static_cast<std::size_t>(row * tile_cols)], cols,
                    target + (first_row + row) * view.cols + first_col);
      }
    }
  }
}

/// The view of a row-major array of `rows` rows, `row_stride` elements apart.
template <StorageScalar S>
MatrixView<S> row_major_view(const S* data, Index rows, Index cols, Index row_stride) {
  return {reinterpret_cast<const std::byte*>(data), rows, cols, row_stride, 1};
}

/// The heads of one sequence, `[tokens, groups, group_size, head_dim]`: address, sizes and strides
/// (counted in elements); the channels of a head are contiguous. `groups` counts K/V heads. Keys
/// and values have a `group_size` of 1, queries as many heads as read one K/V head; head `j` of the
/// layer is head `j % group_size` of group `j / group_size`.
template <class T>
struct HeadsView {
  T* data = nullptr;
  Index tokens = 0;
  Index groups = 0;
  Index group_size = 1;
  Index head_dim = 0;
  Index token_stride = 0;
  Index group_stride = 0;
  Index head_stride = 0;

  T* head(Index token, Index group, Index member) const {
    return data + token * token_stride + group * group_stride + member * head_stride;
  }
  /// The first member of each token's `group`, `[tokens, head_dim]`.
  MatrixView<std::remove_const_t<T>> group_matrix(Index group) const {
    if (tokens == 0) return {nullptr, 0, head_dim, token_stride, 1};  // no arithmetic on a null
    return row_major_view<std::remove_const_t<T>>(head(0, group, 0), tokens, head_dim,
                                                  token_stride);
  }
  /// The `count` tokens from `first` on.
  HeadsView slice(Index first, Index count) const {
    HeadsView part = *this;
    part.data += first * token_stride;
    part.tokens = count;
    return part;
  }
  operator HeadsView<const T>() const requires(!std::is_const_v<T>) {
    return {.data = data,
            .tokens = tokens,
            .groups = groups,
            .group_size = group_size,
            .head_dim = head_dim,
            .token_stride = token_stride,
            .group_stride = group_stride,
            .head_stride = head_stride};
  }
};

/// Calls `body(token, head)` for every head, with the address of its channels.
template <class T, class Body>
void for_each_head(const HeadsView<T>& heads, Body&& body) {
  for (Index token = 0; token < heads.tokens; ++token) {
    for (Index group = 0; group < heads.groups; ++group) {
      for (Index member = 0; member < heads.group_size; ++member) {
        body(token, heads.head(token, group, member));
      }
    }
  }
}

/// Heads that stand one after the other in each token, tokens one after the other:
/// `[tokens, groups * group_size * head_dim]`, as a projection gives them.
template <class T>
HeadsView<T> token_major_heads(T* data, Index tokens, Index groups, Index group_size,
                               Index head_dim) {
  const Index group_stride = group_size * head_dim;
  return {.data = data,
          .tokens = tokens,
          .groups = groups,
          .group_size = group_size,
          .head_dim = head_dim,
          .token_stride = groups * group_stride,
          .group_stride = group_stride,
          .head_stride = head_dim};
}

/// Heads in which each group's stand together: `[groups, tokens, group_size, head_dim]`, as Premix
/// makes them.
template <class T>
HeadsView<T> group_major_heads(T* data, Index tokens, Index groups, Index group_size,
                               Index head_dim) {
  const Index token_stride = group_size * head_dim;
  return {.data = data,
          .tokens = tokens,
          .groups = groups,
          .group_size = group_size,
          .head_dim = head_dim,
          .token_stride = token_stride,
          .group_stride = tokens * token_stride,
          .head_stride = head_dim};
}

/// Memory that a computation needs for a while. It grows and never shrinks, so that a second run of
/// the same size allocates nothing. The contents do not survive a `reserve`.
template <class T>
class Buffer {
 public:
  /// At least `size` elements, aligned for Eigen's packets.
  T* reserve(Index size) {
    if (size > storage_.size()) {
      storage_.resize(0);  // else Eigen keeps a freed address where the allocation throws
      storage_.resize(size);
    }
    return data();
  }
  T* data() { return storage_.data(); }
  Index size() const { return storage_.size(); }

 private:
  Eigen::Matrix<T, Eigen::Dynamic, 1> storage_;
};

}  // namespace vha
