// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vha/core/executor.hpp>
#include <vha/core/view.hpp>

// The matrix product under every projection, under the attention core and under the fold. Eigen's
// own product allocates its packing buffers on every call and takes no misaligned or mixed-type
// operands; this one packs both operands into the caller's buffers, converting as it packs.
//
// C is made tile by tile. A tile of `rows x cols` results stays in registers while `depth` goes by:
// one packet of B times one broadcast element of A, added. Panels of A and B are packed so that both
// are read from front to back.
//
//               cols ->
//            +---------+
//            |    B    | depth
//            +---------+
//   +-----+  +--+------+
//   |  A  |  |  |   C  | rows
//   +-----+  +--+------+
//
// The packets are Eigen::internal's, of Eigen 3.4.

namespace vha {

/// The packing buffers of `multiply`.
template <ComputeScalar T>
struct ProductWorkspace {
  Executor executor;
  Buffer<T> a_panels;
  Buffer<T> b_panels;
};

namespace detail {

/// The sizes of the register tile and of the blocks that fit the caches.
template <ComputeScalar T>
struct ProductTile {
  using Packet = typename Eigen::internal::packet_traits<T>::type;
  static constexpr Index lanes = Eigen::internal::unpacket_traits<Packet>::size;
  static constexpr Index packets = 2;
  static constexpr Index cols = packets * lanes;
  // One register for A and two for B are needed beside the sums.
  static constexpr Index rows = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 14 : 6;

  static constexpr Index depth_block = 2048 / static_cast<Index>(sizeof(T));
  static constexpr Index row_block = rows * 16;
  static constexpr Index col_block = cols * 64;
};

/// What becomes of the elements that C has: they are replaced, the sum goes on from them, or the sum
/// is made by itself and added to them.
enum class Sum { replace, go_on, add };

/// C[rows, cols] (+)= A panel · B panel, where `Rows` is how many rows the panel of A was packed
/// for; the products beyond `rows` and `cols` are dropped.
template <Index Rows, ComputeScalar T>
void multiply_tile(Index depth, const T* a, const T* b, T* c, Index c_stride, Index rows,
                   Index cols, Sum sum) {
  using Tile = ProductTile<T>;
  using Packet = typename Tile::Packet;
  namespace packet = Eigen::internal;
  Packet sums[Rows][Tile::packets];
  const auto each_row = [](auto&& body) {
    [&]<std::size_t... Row>(std::index_sequence<Row...>) {
      (body(std::integral_constant<std::size_t, Row>{}), ...);
    }
    (std::make_index_sequence<static_cast<std::size_t>(Rows)>{});
  };
  alignas(Packet) T spill[Tile::cols] = {};  // for tiles that C holds only a part of
  const bool whole = cols == Tile::cols;
  const auto row_of_c = [&](std::size_t row) {
    T* const address = c + static_cast<Index>(row) * c_stride;
    if (whole) return address;
    if (sum != Sum::replace) std::copy_n(address, cols, spill);
    return spill + 0;
  };
  each_row([&](auto row) {
    sums[row][0] = sums[row][1] = packet::pset1<Packet>(T(0));
    if (sum != Sum::go_on || static_cast<Index>(row) >= rows) return;
    const T* const source = row_of_c(row);
    sums[row][0] = packet::ploadu<Packet>(source);
    sums[row][1] = packet::ploadu<Packet>(source + Tile::lanes);
  });
  for (Index k = 0; k < depth; ++k, a += Rows, b += Tile::cols) {
    const Packet b0 = packet::pload<Packet>(b);
    const Packet b1 = packet::pload<Packet>(b + Tile::lanes);
    each_row([&](auto row) {
      const Packet a_row = packet::pset1<Packet>(a[row]);
      sums[row][0] = packet::pmadd(a_row, b0, sums[row][0]);
      sums[row][1] = packet::pmadd(a_row, b1, sums[row][1]);
    });
  }
  each_row([&](auto row) {
    if (static_cast<Index>(row) >= rows) return;
    T* const target = row_of_c(row);
    for (Index p = 0; p < Tile::packets; ++p) {
      Packet result = sums[row][p];
      T* const at = target + p * Tile::lanes;
      if (sum == Sum::add) result = packet::padd(packet::ploadu<Packet>(at), result);
      packet::pstoreu(at, result);
    }
    if (!whole) std::copy_n(spill, cols, c + static_cast<Index>(row) * c_stride);
  });
}

/// Calls `body` with the smallest compiled row count that holds `rows`.
template <ComputeScalar T, class Body>
void with_tile_rows(Index rows, Body&& body) {
  if (rows == 1) return body(std::integral_constant<Index, 1>{});
  if (rows == 2) return body(std::integral_constant<Index, 2>{});
  if (rows <= 4) return body(std::integral_constant<Index, 4>{});
  if constexpr (ProductTile<T>::rows > 8) {
    if (rows <= 8) return body(std::integral_constant<Index, 8>{});
  }
  body(std::integral_constant<Index, ProductTile<T>::rows>{});
}

/// Packs `panel`, of at most `Lines` rows, column by column into `target` [panel.cols, Lines],
/// missing rows as zeros. A panel of B is packed as its transpose.
template <Index Lines, ComputeScalar T, StorageScalar S>
void pack_panel(const MatrixView<S>& panel, T* target) {
  const Index step = panel.col_stride * static_cast<Index>(sizeof(S));
  if (panel.rows == Lines && panel.row_stride == 1) {
    const std::byte* source = panel.data;
    for (Index k = 0; k < panel.cols; ++k, source += step, target += Lines) {
      for (Index i = 0; i < Lines; ++i) {
        target[i] = convert<T>(load<S>(source + i * static_cast<Index>(sizeof(S))));
      }
    }
    return;
  }
  for (Index i = 0; i < Lines; ++i) {
    const std::byte* source = panel.address(i, 0);
    for (Index k = 0; k < panel.cols; ++k) {
      target[k * Lines + i] = i < panel.rows ? convert<T>(load<S>(source + k * step)) : T(0);
    }
  }
}

}  // namespace detail

/// C = A·B, or C += A·B where `accumulate` is set. A is `[rows, depth]`, B `[depth, cols]`, C
/// row-major `[rows, cols]` with rows `c_stride` apart. Operands of any storage scalar are
/// converted to `T`, in which the products are summed. An element of C depends on its row of A and
/// its column of B alone and has the same bits wherever it stands, also where a sum of 256 products
/// or fewer is cut into accumulating calls.
/// Precondition: the sizes fit, and C overlaps neither A nor B.
template <ComputeScalar T, StorageScalar A, StorageScalar B>
void multiply(const MatrixView<A>& a, const MatrixView<B>& b, T* c, Index c_stride, bool accumulate,
              ProductWorkspace<T>& workspace) {
  using Tile = detail::ProductTile<T>;
  if (a.cols == 0 && !accumulate) {
    for (Index i = 0; i < a.rows; ++i) std::fill_n(c + i * c_stride, b.cols, T(0));
  }
  // Whole blocks even for small products, so that a workspace never grows again.
  T* const a_panels = workspace.a_panels.reserve(Tile::depth_block * Tile::row_block);
  T* const b_panels = workspace.b_panels.reserve(Tile::depth_block * Tile::col_block);

  for (Index col = 0; col < b.cols; col += Tile::col_block) {
    const Index cols = std::min(b.cols - col, Tile::col_block);
    for (Index k = 0; k < a.cols; k += Tile::depth_block) {
      const Index depth = std::min(a.cols - k, Tile::depth_block);
      using detail::Sum;
      const Sum sum = k > 0 ? Sum::add : accumulate ? Sum::go_on : Sum::replace;
      for (Index j = 0; j < cols; j += Tile::cols) {
        const Index panel_cols = std::min(cols - j, Tile::cols);
        detail::pack_panel<Tile::cols>(b.block(k, col + j, depth, panel_cols).transposed(),
                                       b_panels + j * depth);
      }
      for (Index row = 0; row < a.rows; row += Tile::row_block) {
        const Index rows = std::min(a.rows - row, Tile::row_block);
        for (Index i = 0; i < rows; i += Tile::rows) {
          const Index panel_rows = std::min(rows - i, Tile::rows);
          detail::with_tile_rows<T>(panel_rows, [&](auto tile_rows) {
            detail::pack_panel<tile_rows()>(a.block(row + i, k, panel_rows, depth),
                                            a_panels + i * depth);
          });
        }
        for (Index j = 0; j < cols; j += Tile::cols) {
          for (Index i = 0; i < rows; i += Tile::rows) {
            const Index panel_rows = std::min(rows - i, Tile::rows);
            detail::with_tile_rows<T>(panel_rows, [&](auto tile_rows) {
              detail::multiply_tile<tile_rows()>(depth, a_panels + i * depth, b_panels + j * depth,
                                                 c + (row + i) * c_stride + col + j, c_stride,
                                                 panel_rows, std::min(cols - j, Tile::cols), sum);
            });
          }
        }
      }
    }
  }
}

}  // namespace vha
