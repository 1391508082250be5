// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/matrix_tiles.hpp>
#include <vha/ops/panels.hpp>
#include <vha/ops/register_tile.hpp>

// The matrix product under every projection and under the fold. Eigen's own product allocates its
// packing buffers on every call and takes no misaligned or mixed-type operands.
//
// Many rows: blocks of A and B are packed into panels, and every tile reads two of them. A few rows,
// as in decode: B, a weight that is read once, is read where it stands.

namespace vha {

/// The threads and the packing buffers of `multiply`.
template <Operand T>
struct ProductWorkspace {
  Executor executor;
  Buffer<typename detail::LaneFormat<T>::Sum> a_panels;
  Buffer<typename detail::LaneFormat<T>::Sum> b_panels;
};

namespace detail {

/// The sizes of the register tile and of the blocks that fit the caches.
template <Operand T>
struct ProductTile {
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  static constexpr Index lanes = widest<typename Format::Sum>;
  static constexpr Index packets = 2;
  static constexpr Index cols = packets * lanes;
  // One register for A and two for B are needed beside the sums; matrix tiles are two by two.
  static constexpr Index rows = Format::by_tiles ? 2 * tile_side : many_registers ? 14 : 6;
  /// Rows of A for which B is read where it stands.
  static constexpr Index few_rows = Format::by_tiles ? tile_side : rows;

  // A panel of A stays in the first-level cache, `group_cols` of B in the second.
  static constexpr Index step_block =
      (Format::by_tiles ? 1024 : 2048) / static_cast<Index>(sizeof(Element));
  static constexpr Index depth_block = step_block * Format::terms;
  static constexpr Index row_block = rows * 40;
  static constexpr Index col_block = cols * 64;
  static constexpr Index group_rows = rows * 10;
  static constexpr Index group_cols = cols * 4;

  /// The panels' memory as what they hold.
  static Element* panels(Buffer<typename Format::Sum>& buffer, Index lines) {
    return reinterpret_cast<Element*>(buffer.reserve(step_block * lines));
  }
};

/// Calls `body` with the smallest compiled row count that holds `rows`.
template <Operand T, class Body>
EIGEN_ALWAYS_INLINE void with_tile_rows(Index rows, Body&& body) {
  if constexpr (LaneFormat<T>::by_tiles) {
    if (rows <= tile_side) return body(std::integral_constant<Index, tile_side>{});
  } else {
    if (rows == 1) return body(std::integral_constant<Index, 1>{});
    if (rows == 2) return body(std::integral_constant<Index, 2>{});
    if (rows <= 4) return body(std::integral_constant<Index, 4>{});
    if constexpr (ProductTile<T>::rows > 8) {
      if (rows <= 8) return body(std::integral_constant<Index, 8>{});
    }
  }
  body(std::integral_constant<Index, ProductTile<T>::rows>{});
}

/// One block: C[rows, cols] (+)= A[rows, depth] · B[depth, cols], no size beyond the block's.
template <Operand T, StorageScalar A, StorageScalar B>
void multiply_block(const MatrixView<A>& a, const MatrixView<B>& b, Compute<T>* c, Index c_stride,
                    SumInto into, ProductWorkspace<T>& workspace, bool b_is_packed) {
  using Tile = ProductTile<T>;
  const Index steps = LaneFormat<T>::steps(a.cols);
  auto* const a_panels = Tile::panels(workspace.a_panels, Tile::row_block);
  auto* const b_panels = Tile::panels(workspace.b_panels, Tile::col_block);
  const Index a_count = pieces(a.rows, Tile::rows);
  // Bands of B, a few rows or a few columns, whichever are contiguous: pages are read to their end.
  const bool by_columns = b.row_stride == 1;
  const Index band_rows = by_columns ? b.rows : std::max<Index>(16, LaneFormat<T>::terms_at_once);
  const Index band_cols = by_columns ? Tile::cols : b.cols;
  const Index b_count =
      b_is_packed ? 0 : pieces(by_columns ? b.cols : b.rows, by_columns ? band_cols : band_rows);
  const Executor executor = workspace.executor.for_work_of(a.rows * a.cols * b.cols);
  executor.for_each(a_count + b_count, [&](Index task, Index) {
    if (task < b_count) {
      const Index k = by_columns ? 0 : task * band_rows;
      const Index depth = std::min(b.rows - k, band_rows);
      const Index first = by_columns ? task * band_cols : 0;
      for (Index col = first; col < std::min(b.cols, first + band_cols); col += Tile::cols) {
        const Index cols = std::min(b.cols - col, Tile::cols);
        pack_panel<T, Tile::cols>(b.block(k, col, depth, cols).transposed(),
                                  b_panels + col * steps + k / LaneFormat<T>::terms * Tile::cols);
      }
    } else {
      const Index row = (task - b_count) * Tile::rows;
      const Index rows = std::min(a.rows - row, Tile::rows);
      const auto lines = a.block(row, 0, rows, a.cols);
      with_tile_rows<T>(rows, [&](auto tile_rows) {
        if constexpr (LaneFormat<T>::by_tiles) {
          pack_tile_rows<T>(lines, tile_rows(), a_panels + row * steps);
        } else {
          pack_panel<T, tile_rows()>(lines, a_panels + row * steps);
        }
      });
    }
  });
  const Index row_groups = pieces(a.rows, Tile::group_rows);
  const Index col_groups = pieces(b.cols, Tile::group_cols);
  executor.for_each(row_groups * col_groups, [&](Index group, Index) {
    [[maybe_unused]] const RegistersFor<T> registers;
    const Index row_begin = group % row_groups * Tile::group_rows;
    const Index row_end = std::min(a.rows, row_begin + Tile::group_rows);
    const Index col_begin = group / row_groups * Tile::group_cols;
    const Index col_end = std::min(b.cols, col_begin + Tile::group_cols);
    for (Index row = row_begin; row < row_end; row += Tile::rows) {
      const Index rows = std::min(row_end - row, Tile::rows);
      with_tile_rows<T>(rows, [&](auto tile_rows) {
        const auto* const a_panel = a_panels + row * steps;
        for (Index col = col_begin; col < col_end; col += Tile::cols) {
          const auto* const b_panel = b_panels + col * steps;
          Compute<T>* const target = c + row * c_stride + col;
          const Index cols = std::min(col_end - col, Tile::cols);
          if constexpr (LaneFormat<T>::by_tiles) {
            multiply_tiles<tile_rows() / tile_side, Tile::packets>(
                registers, steps / tile_side, packed_tile_rows(a_panel, tile_rows()),
                {b_panel, Tile::cols}, target, c_stride, rows, cols, into, [](Index) {});
          } else {
            using Step = std::integral_constant<Index, Tile::cols>;
            multiply_tile<T, tile_rows(), Tile::packets, Tile::lanes>(
                steps, packed_rows<tile_rows()>(a_panel),
                PackedColumns<T, Tile::lanes, Step>{b_panel, {}}, target, c_stride, rows, cols,
                into);
          }
        }
      });
    }
  });
}

/// Copies `steps` steps of B as it is stored to `target`, `[steps, columns]`.
template <Operand T, Index Packets, StorageScalar B>
void copy_columns(const StoredColumns<T, B>& columns, Index steps,
                  typename LaneFormat<T>::Element* target) {
  for (Index step = 0; step < steps; ++step) {
    for (Index packet = 0; packet < Packets; ++packet, target += StoredColumns<T, B>::lanes) {
      const auto elements = columns(step, packet);
      std::memcpy(target, &elements, sizeof elements);
    }
  }
}

/// The product where A has no more rows than a tile, for the columns [0, cols) of B, a multiple of
/// the tile's columns.
template <Operand T, StorageScalar A, StorageScalar B>
void multiply_few_rows(const MatrixView<A>& a, const MatrixView<B>& b, Index cols, Compute<T>* c,
                       Index c_stride, bool accumulate, ProductWorkspace<T>& workspace) {
  using Tile = ProductTile<T>;
  using Format = LaneFormat<T>;
  // Tiles of two rows (matrix tiles: all rows) and many columns: a long run of each row of B is read at a time, and
  // `depth_at_once` such runs stay in the first-level cache for the next two rows of A.
  static constexpr Index rows = Format::by_tiles ? tile_side : 2;
  static constexpr Index packets = Format::by_tiles || !many_registers ? 4 : 8;
  static constexpr Index depth_at_once = Format::by_tiles ? 64 : 16;
  const Executor executor = workspace.executor.for_work_of(a.rows * a.cols * cols);
  const Index tasks = std::min(executor.threads(), cols / Tile::cols);
  const Index task_cols = pieces(cols / Tile::cols, tasks) * Tile::cols;
  auto* const a_panels = Tile::panels(workspace.a_panels, Tile::row_block);
  Compute<T>* const block_sums = workspace.b_panels.reserve(a.rows * cols);
  for (Index k = 0; k < a.cols; k += Tile::depth_block) {
    const Index depth = std::min(a.cols - k, Tile::depth_block);
    const Index panel_size = Format::steps(depth) * rows;
    for (Index row = 0; row < a.rows; row += rows) {
      const auto lines = a.block(row, k, std::min(a.rows - row, rows), depth);
      if constexpr (Format::by_tiles) {
        pack_tile_rows<T>(lines, rows, a_panels + row / rows * panel_size);
      } else {
        pack_panel<T, rows>(lines, a_panels + row / rows * panel_size);
      }
    }
    // Each block of the depth is summed by itself, as in `multiply_block`.
    Compute<T>* const target = k == 0 ? c : block_sums;
    const Index stride = k == 0 ? c_stride : cols;
    executor.for_each(tasks, [&](Index task, Index) {
      [[maybe_unused]] const RegistersFor<T> registers(a.rows);
      const Index end = std::min(cols, (task + 1) * task_cols);
      for (Index at = 0; at < depth; at += depth_at_once) {
        const Index steps = Format::steps(std::min(depth - at, depth_at_once));
        const bool goes_on = at > 0 || (k == 0 && accumulate);
        Index col = task * task_cols;
        const auto tiles = [&](auto tile_packets) {
          constexpr Index width = tile_packets() * Tile::lanes;
          for (; col + width <= end; col += width) {
            const bool more = k + at + 2 * depth_at_once <= a.cols;
            const Index row_bytes = b.row_stride * Index(sizeof(B));
            const StoredColumns<T, B> columns{b.address(k + at, col), row_bytes,
                                              more ? depth_at_once * row_bytes : 0};
            for (Index row = 0; row < a.rows; row += rows) {
              const Index count = std::min(a.rows - row, rows);
              const auto* const a_panel =
                  a_panels + row / rows * panel_size + at / Format::terms * rows;
              Compute<T>* const tile = target + row * stride + col;
              const auto into = goes_on ? SumInto::go_on : SumInto::replace;
              if constexpr (Format::by_tiles) {
                alignas(64) typename Format::Element strip[depth_at_once / Format::terms * width];
                copy_columns<T, tile_packets()>(columns, steps, strip);
                multiply_tiles<1, tile_packets()>(registers, steps / tile_side,
                                                  packed_tile_rows(a_panel, rows), {strip, width},
                                                  tile, stride, count, width, into, [](Index) {});
              } else {
                multiply_tile<T, rows, tile_packets(), Tile::lanes>(
                    steps, packed_rows<rows>(a_panel), columns, tile, stride, count, width, into);
              }
            }
          }
        };
        tiles(std::integral_constant<Index, packets>{});
        tiles(std::integral_constant<Index, Tile::packets>{});
      }
      if (k == 0) return;
      for (Index row = 0; row < a.rows; ++row) {
        for (Index j = task * task_cols; j < end; ++j) {
          c[row * c_stride + j] += block_sums[row * cols + j];
        }
      }
    });
  }
}

}  // namespace detail

/// C = A·B, or C += A·B where `accumulate` is set. A is `[rows, depth]`, B `[depth, cols]`, C
/// row-major `[rows, cols]` with rows `c_stride` apart. The operands, of any storage scalars, are
/// rounded to `T` and the products summed in `T`, those of bfloat16 in float. An element of C depends
/// on its row of A and its column of B alone and has the same bits wherever it stands and on any
/// number of threads, also where a sum of 256 products or fewer is cut into accumulating calls (of
/// depths that 32 divides, where `T` is bfloat16).
/// Precondition: the sizes fit, and C overlaps neither A nor B.
template <Operand T, StorageScalar A, StorageScalar B>
void multiply(const MatrixView<A>& a, const MatrixView<B>& b, Compute<T>* c, Index c_stride,
              bool accumulate, ProductWorkspace<T>& workspace) {
  using Tile = detail::ProductTile<T>;
  if (a.cols == 0 && !accumulate) {
    for (Index i = 0; i < a.rows; ++i) std::fill_n(c + i * c_stride, b.cols, Compute<T>(0));
  }
  // Whole blocks even for small products, so that a workspace never grows again.
  Tile::panels(workspace.a_panels, Tile::row_block);
  Tile::panels(workspace.b_panels, Tile::col_block);
  if (a.rows == 0) return;  // tiles of no rows are none
  Index first = 0;
  if constexpr (detail::tile_reads<T, B>) {
    const bool few_rows = a.rows <= Tile::few_rows && b.cols >= Tile::cols;
    if (few_rows && b.col_stride == 1 && a.cols % detail::LaneFormat<T>::terms_at_once == 0) {
      first = b.cols / Tile::cols * Tile::cols;
      detail::multiply_few_rows<T>(a, b, first, c, c_stride, accumulate, workspace);
    }
  }
  for (Index col = first; col < b.cols; col += Tile::col_block) {
    const Index cols = std::min(b.cols - col, Tile::col_block);
    for (Index k = 0; k < a.cols; k += Tile::depth_block) {
      const Index depth = std::min(a.cols - k, Tile::depth_block);
      const auto into = k > 0        ? detail::SumInto::add
                        : accumulate ? detail::SumInto::go_on
                                     : detail::SumInto::replace;
      // A shallow block of A has room for more rows.
      const Index steps = detail::LaneFormat<T>::steps(depth);
      const Index row_block = Tile::row_block * (Tile::step_block / steps);
      for (Index row = 0; row < a.rows; row += row_block) {
        const Index rows = std::min(a.rows - row, row_block);
        detail::multiply_block<T>(a.block(row, k, rows, depth), b.block(k, col, depth, cols),
                                  c + row * c_stride + col, c_stride, into, workspace, row > 0);
      }
    }
  }
}

}  // namespace vha
