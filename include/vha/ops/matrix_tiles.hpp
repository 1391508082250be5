// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vha/core/view.hpp>
#include <vha/ops/lanes.hpp>
#include <vha/ops/panels.hpp>
#include <vha/ops/register_tile.hpp>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// What `multiply_tile` is on a processor that multiplies tiles of bfloat16 by themselves (AMX): 16 rows
// of A by 16 columns of B, 32 terms of each sum in one instruction. A tile's 16 steps, of a pair of
// terms each, are a "chunk". In a chunk the even terms are summed apart from the odd ones, both are
// added, then C: the bits of a sum depend on where its chunks begin, so that all depths are counted
// from a multiple of `terms_at_once` and filled up with zeros.

namespace vha::detail {

/// Rows and columns of a tile, and steps of a chunk.
inline constexpr Index tile_side = 16;

/// Whether the system lets this process use the tile registers, whose state Linux saves for those
/// that ask. Where not, `SoftwareTiles` stand in for them.
inline bool may_use_matrix_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // of arch_prctl(2)
  static const bool permitted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return permitted;
#else
  return false;
#endif
}

/// The thread's tile registers, set up while this lives for tiles of `rows` rows of A and C; released
/// at the end, whatever they held before.
class TileRegisters {
 public:
  /// Precondition: 1 ≤ rows ≤ 16; no other one lives in this thread.
  explicit TileRegisters(Index rows = tile_side)
      : rows_(rows), in_use_(has_matrix_tiles && may_use_matrix_tiles()) {
    eigen_assert(rows >= 1 && rows <= tile_side);  // the processor would fault
    if constexpr (has_matrix_tiles) {
      if (!in_use_) return;
      Configuration of;
      for (std::size_t tile = 0; tile < 8; ++tile) {
        const bool of_b = tile >= 6;
        of.row_bytes[tile] = 64;
        of.rows[tile] = static_cast<std::uint8_t>(of_b ? tile_side : rows);
      }
      asm volatile("ldtilecfg %0" ::"m"(of));
    }
  }
  ~TileRegisters() {
    if constexpr (has_matrix_tiles) {
      if (in_use_) asm volatile("tilerelease");
    }
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  Index rows() const { return rows_; }
  bool in_use() const { return in_use_; }

 private:
  /// As the instruction reads it.
  struct alignas(64) Configuration {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::array<std::uint8_t, 14> reserved = {};
    std::array<std::uint16_t, 16> row_bytes = {};
    std::array<std::uint8_t, 16> rows = {};
  };

  Index rows_;
  bool in_use_;
};

/// Where a thread needs none.
struct NoTileRegisters {
  explicit NoTileRegisters(Index = 0) {}
};

/// What a thread holds while it multiplies in `T`.
template <Operand T>
using RegistersFor = std::conditional_t<LaneFormat<T>::by_tiles, TileRegisters, NoTileRegisters>;

/// A as tiles read it: a row's chunk, 64 bytes, is contiguous.
struct TileRowsOfA {
  const std::byte* data;
  Index row_bytes;    ///< from a row to the next
  Index chunk_bytes;  ///< from a chunk to the next

  TileRowsOfA from(Index row) const { return {data + row * row_bytes, row_bytes, chunk_bytes}; }
};

/// A that is packed as `[chunk, lines, step]`.
inline TileRowsOfA packed_tile_rows(const BFloat16Pair* elements, Index lines) {
  return {reinterpret_cast<const std::byte*>(elements), 64, lines * 64};
}

/// B as tiles read it, `[step, columns]`.
struct TileColumnsOfB {
  const BFloat16Pair* data;
  Index step_elements;
};

/// Packs rows of A, `[at most lines, depth]`, into `target` `[chunk, lines, step]`. Missing rows and
/// terms are zeros.
template <Operand T, StorageScalar S>
requires LaneFormat<T>::by_tiles void pack_tile_rows(const MatrixView<S>& a, Index lines,
                                                     BFloat16Pair* target) {
  using Format = LaneFormat<T>;
  for (Index k = 0; k < a.cols; k += Format::terms_at_once) {
    const bool whole = k + Format::terms_at_once <= a.cols && a.col_stride == 1;
    for (Index row = 0; row < lines; ++row, target += tile_side) {
      if (row < a.rows && whole) {
        copy_line<T, S>(a.address(row, k), tile_side, target);
        continue;
      }
      for (Index step = 0; step < tile_side; ++step) {
        target[step] =
            row < a.rows ? panel_element<T>(a, row, k + step * Format::terms) : BFloat16Pair{};
      }
    }
  }
}

/// Calls `body` with the constants 0 to Count - 1.
template <int Count, class Body>
EIGEN_ALWAYS_INLINE void unroll(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
  }
  (std::make_integer_sequence<int, Count>{});
}

/// The thread's tile registers: 0 to 3 are C's, 4 and 5 are A's, 6 and 7 are B's.
struct HardwareTiles {
  template <int Tile>
  void load(const void* from, Index row_bytes) {
    if constexpr (has_matrix_tiles) {
      asm volatile("{tileloadd (%0,%1,1), %%tmm%c2|tileloadd tmm%c2, [%0+%1*1]}" ::"r"(from),
                   "r"(row_bytes), "i"(Tile));
    }
  }
  template <int Tile>
  void store(void* to, Index row_bytes) {
    if constexpr (has_matrix_tiles) {
      asm volatile("{tilestored %%tmm%c2, (%0,%1,1)|tilestored [%0+%1*1], tmm%c2}" ::"r"(to),
                   "r"(row_bytes), "i"(Tile)
                   : "memory");
    }
  }
  template <int Tile>
  void clear() {
    if constexpr (has_matrix_tiles) {
      asm volatile("{tilezero %%tmm%c0|tilezero tmm%c0}" ::"i"(Tile));
    }
  }
  template <int C, int A, int B>
  void multiply_add() {
    if constexpr (has_matrix_tiles) {
      asm volatile(
          "{tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0|tdpbf16ps tmm%c0, tmm%c1, tmm%c2}" ::"i"(C),
          "i"(A), "i"(B));
    }
  }
};

/// The same in plain C++, to the same bits unless numbers are as small as 2^-126, which the hardware
/// takes for zeros.
class SoftwareTiles {
 public:
  /// Tiles of `rows` rows of A and C.
  explicit SoftwareTiles(Index rows) : rows_(rows) {}

  template <int Tile>
  void load(const void* from, Index row_bytes) {
    for (Index row = 0; row < rows_of(Tile); ++row) {
      std::memcpy(&tile(Tile)[row * tile_side],
                  static_cast<const std::byte*>(from) + row * row_bytes, row_size);
    }
  }
  template <int Tile>
  void store(void* to, Index row_bytes) {
    for (Index row = 0; row < rows_of(Tile); ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * row_bytes, &tile(Tile)[row * tile_side],
                  row_size);
    }
  }
  template <int Tile>
  void clear() {
    std::fill_n(tile(Tile), rows_of(Tile) * tile_side, 0U);
  }
  template <int C, int A, int B>
  void multiply_add() {
    const auto even = [](std::uint32_t pair) { return std::bit_cast<float>(pair << 16); };
    const auto odd = [](std::uint32_t pair) { return std::bit_cast<float>(pair & 0xFFFF0000U); };
    for (Index row = 0; row < rows_; ++row) {
      float even_sums[tile_side] = {}, odd_sums[tile_side] = {};
      for (Index step = 0; step < tile_side; ++step) {
        const std::uint32_t pair = tile(A)[row * tile_side + step];
        const std::uint32_t* const columns = tile(B) + step * tile_side;
        for (Index col = 0; col < tile_side; ++col) {
          even_sums[col] = std::fma(even(pair), even(columns[col]), even_sums[col]);
          odd_sums[col] = std::fma(odd(pair), odd(columns[col]), odd_sums[col]);
        }
      }
      std::uint32_t* const sums = tile(C) + row * tile_side;
      for (Index col = 0; col < tile_side; ++col) {
        const float sum = std::bit_cast<float>(sums[col]) + (even_sums[col] + odd_sums[col]);
        sums[col] = std::bit_cast<std::uint32_t>(sum);
      }
    }
  }

 private:
  static constexpr std::size_t row_size = 64;
  Index rows_of(int tile) const { return tile < 6 ? rows_ : tile_side; }
  std::uint32_t* tile(int which) { return tiles_ + which * tile_side * tile_side; }

  Index rows_;
  std::uint32_t tiles_[8 * tile_side * tile_side];  // written before it is read
};

/// `multiply_tiles` by one kind of tiles.
template <int RowTiles, int ColTiles, class Tiles, class BeforeChunk>
EIGEN_ALWAYS_INLINE void multiply_by(Tiles&& tiles, Index tile_rows, Index chunks,
                                     const TileRowsOfA& a, const TileColumnsOfB& b, float* c,
                                     Index c_stride, Index rows, Index cols, SumInto into,
                                     const BeforeChunk& before_chunk) {
  constexpr Index width = ColTiles * tile_side;
  const bool whole = rows == RowTiles * tile_rows && cols == width;
  alignas(64) float spill[RowTiles * tile_side * width];  // for a C of fewer rows or columns
  float* const sums = whole && into != SumInto::add ? c : spill;
  const Index sums_stride = sums == c ? c_stride : width;
  const auto each_tile = [&](auto body) {
    unroll<RowTiles>([&](auto row) { unroll<ColTiles>([&](auto col) { body(row, col); }); });
  };
  const auto sums_of = [&](int row, int col) {
    return sums + row * tile_rows * sums_stride + col * tile_side;
  };
  if (into == SumInto::go_on && sums == spill) {
    for (Index row = 0; row < rows; ++row) {
      std::copy_n(c + row * c_stride, cols, spill + row * width);
    }
  }
  // The registers are loaded behind the compiler's back: all that was written must be in memory.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  each_tile([&](auto row, auto col) {
    constexpr int tile = row() * ColTiles + col();
    if (into == SumInto::go_on) {
      tiles.template load<tile>(sums_of(row(), col()), sums_stride * 4);
    } else {
      tiles.template clear<tile>();
    }
  });
  for (Index chunk = 0; chunk < chunks; ++chunk) {
    before_chunk(chunk);
    const std::byte* const a_chunk = a.data + chunk * a.chunk_bytes;
    unroll<RowTiles>([&](auto row) {
      tiles.template load<4 + row()>(a_chunk + row() * tile_rows * a.row_bytes, a.row_bytes);
    });
    const BFloat16Pair* const b_chunk = b.data + chunk * tile_side * b.step_elements;
    unroll<ColTiles>([&](auto col) {
      tiles.template load<6 + col() % 2>(b_chunk + col() * tile_side, b.step_elements * 4);
      unroll<RowTiles>([&](auto row) {
        tiles.template multiply_add<row() * ColTiles + col(), 4 + row(), 6 + col() % 2>();
      });
    });
  }
  each_tile([&](auto row, auto col) {
    tiles.template store<row() * ColTiles + col()>(sums_of(row(), col()), sums_stride * 4);
  });
  if (sums == c) return;
  for (Index row = 0; row < rows; ++row) {
    float* const target = c + row * c_stride;
    const float* const source = spill + row * width;
    if (into == SumInto::add) {
      for (Index col = 0; col < cols; ++col) target[col] += source[col];
    } else {
      std::copy_n(source, cols, target);
    }
  }
}

/// C[rows, cols] (+)= A · B with `rows <= RowTiles * registers.rows()` and `cols <= ColTiles * 16`; what
/// lies beyond is read from A and B, and dropped. C is row-major, rows `c_stride` apart.
/// `before_chunk(chunk)` is called while the chunks go by, and writes to none of the three.
template <int RowTiles, int ColTiles, class BeforeChunk>
EIGEN_DONT_INLINE void multiply_tiles(const TileRegisters& registers, Index chunks,
                                      const TileRowsOfA& a, const TileColumnsOfB& b, float* c,
                                      Index c_stride, Index rows, Index cols, SumInto into,
                                      const BeforeChunk& before_chunk) {
  static_assert(RowTiles * ColTiles <= 4 && RowTiles <= 2);
  const auto by = [&](auto&& tiles) {
    multiply_by<RowTiles, ColTiles>(tiles, registers.rows(), chunks, a, b, c, c_stride, rows, cols,
                                    into, before_chunk);
  };
  registers.in_use() ? by(HardwareTiles{}) : by(SoftwareTiles(registers.rows()));
}

}  // namespace vha::detail
