// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/matrix_tiles.hpp>
#include <vha/ops/panels.hpp>
#include <vha/ops/register_tile.hpp>

namespace vha::detail {

/// The buffers of a block.
template <Operand T>
struct KeyValueMemory {
  static constexpr Index max_keys = 128;
  static constexpr Index tile_cols = 2 * widest<Compute<T>>;  ///< of values

  Buffer<Compute<T>> keys, values, value_step;

  /// Makes room for any block, so that none allocates that must copy while the first did not.
  void reserve(Index head_dim, Index value_dim) {
    const Index padded = pieces(value_dim, tile_cols) * tile_cols;
    keys.reserve(max_keys * LaneFormat<T>::steps(head_dim));
    values.reserve(LaneFormat<T>::steps(max_keys) * padded);
    value_step.reserve(padded * LaneFormat<T>::steps_at_once);
  }
};

/// Rows of A at addresses of their own, which a register each holds.
template <class E, Index Rows>
struct AddressedRows {
  std::array<const std::byte*, static_cast<std::size_t>(Rows)> rows;

  E operator()(Index row, Index step) const {
    E element;
    std::memcpy(&element, rows[static_cast<std::size_t>(row)] + step * Index(sizeof(E)),
                sizeof element);
    return element;
  }
};

/// Columns that are packed, and a few cache lines of `Ahead` asked for at each step: spread so, they
/// come in while the processor multiplies; asked for at once, they would hold it up.
template <Operand T, Index N, Index width, class Ahead>
struct FetchingColumns {
  const typename LaneFormat<T>::Element* data;
  Ahead ahead;

  auto operator()(Index step, Index packet) const {
    if (packet == 0) ahead.fetch(step);
    return Lanes<T, N>::load(data + step * width + packet * N);
  }
};

/// A block of keys and values as the register tile reads them: where they are stored, if they are
/// stored as `T` in the tile's order, else as a copy in that order. Values that many rows of queries
/// or matrix tiles read are copied too.
template <Operand T>
class KeyValueBlock {
 public:
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  static constexpr Index lanes = widest<Compute<T>>;
  static constexpr Index max_keys = KeyValueMemory<T>::max_keys;
  static constexpr Index tile_cols = KeyValueMemory<T>::tile_cols;
  static constexpr Index tile_keys = 2 * tile_side;  ///< of `tile_key_rows`

  template <class K, class V>
  KeyValueBlock(const MatrixView<K>& keys, const MatrixView<V>& values, bool many_rows,
                KeyValueMemory<T>& memory)
      : keys_(keys.rows), many_rows_(many_rows) {
    const Index key_steps = Format::steps(keys.cols);
    padded_ = pieces(values.cols, tile_cols) * tile_cols;
    memory.reserve(keys.cols, values.cols);
    const auto elements = [](auto& buffer) { return reinterpret_cast<Element*>(buffer.data()); };
    Element* const copies = elements(memory.keys);
    packed_values_ = elements(memory.values);
    value_step_ = elements(memory.value_step);
    key_copies_ = reinterpret_cast<const std::byte*>(copies);
    key_copy_bytes_ = key_steps * static_cast<Index>(sizeof(Element));
    if (is_stored_as_elements<T, K> && keys.cols % Format::terms_at_once == 0) {
      key_data_ = keys.data;
      key_bytes_ = keys.row_stride * static_cast<Index>(sizeof(K));
      // Tiles read rows up to a multiple of 16: the last of them are copied to where there are as many.
      const bool all = !Format::by_tiles || keys.rows % tile_side == 0;
      copied_from_ = all ? keys.rows : keys.rows / tile_keys * tile_keys;
    } else {
      key_data_ = key_copies_;
      key_bytes_ = key_copy_bytes_;
      copied_from_ = 0;
    }
    for (Index key = copied_from_; key < keys.rows; ++key) {
      Element* const copy = copies + key * key_steps;
      const Index whole = keys.cols / Format::terms;
      copy_line<T, K>(keys.address(key, 0), whole, copy);
      for (Index step = whole; step < key_steps; ++step) {
        copy[step] = panel_element<T>(keys, key, step * Format::terms);
      }
    }
    values_in_place_ = !Format::by_tiles && tile_reads<T, V> && !many_rows &&
                       padded_ == values.cols && keys.rows % Format::terms == 0;
    if (values_in_place_) return;
    for (Index step = 0; step < Format::steps(keys.rows); ++step) {
      pack_value_step(values, step, ~0U, packed_values_ + step * padded_);
    }
  }

  Index keys() const { return keys_; }

  /// The memory `key_rows` keys from `key` on and their values are in, to be asked for in `steps`
  /// portions while an earlier tile is worked on. Nothing where it would not be used.
  struct Ahead {
    const std::byte* keys;
    const std::byte* values;
    Index key_bytes;  // per step
    Index value_bytes;
    bool worth_it;

    void fetch(Index step) const {
      fetch_line(keys, step, key_bytes);
      fetch_line(values, step, value_bytes);
    }

   private:
    static void fetch_line(const std::byte* from, Index step, Index bytes) {
      // Portions of doubles, and those for tiles, are of two cache lines.
      constexpr bool two_lines = sizeof(Compute<T>) == 8 || Format::by_tiles;
      __builtin_prefetch(from + step * bytes, 0, to_second_level);
      if constexpr (two_lines) {
        __builtin_prefetch(from + step * bytes + bytes / 2, 0, to_second_level);
      }
    }
  };
  template <class K, class V>
  Ahead ahead(const MatrixView<K>& keys, const MatrixView<V>& values, Index key, Index key_rows,
              Index steps) const {
    const bool worth_it = !many_rows_ && steps > 0 && key + key_rows <= keys.rows &&
                          keys.row_stride == keys.cols && values.row_stride == values.cols;
    if (!worth_it) return {};
    const auto bytes = [&](const auto& matrix) {
      return static_cast<Index>(matrix.address(key_rows, 0) - matrix.address(0, 0)) / steps;
    };
    return {keys.address(key, 0), values.address(key, 0), bytes(keys), bytes(values), true};
  }

  /// Keys [key, key + count) as a tile's rows; the rows beyond repeat the last, so that the tile reads
  /// no memory beyond.
  template <Index Rows>
  AddressedRows<Element, Rows> key_rows(Index key, Index count) const {
    AddressedRows<Element, Rows> result;
    for (Index row = 0; row < Rows; ++row) {
      result.rows[static_cast<std::size_t>(row)] =
          key_data_ + (key + std::min(row, count - 1)) * key_bytes_;
    }
    return result;
  }

  /// Keys [key, key + tile_keys), or to the block's end, as tiles read them: up to a multiple of 16.
  /// Precondition: `key` is a multiple of `tile_keys`.
  TileRowsOfA tile_key_rows(Index key) const {
    if (key < copied_from_) return {key_data_ + key * key_bytes_, key_bytes_, 64};
    return {key_copies_ + key * key_copy_bytes_, key_copy_bytes_, 64};
  }

  /// Calls `body` with a function that gives the columns of the values from one on, the rows counted
  /// from `step`, which has `terms_at_once` keys.
  template <class V, class Body>
  void with_value_columns(const MatrixView<V>& values, Index step, Body&& body) const {
    if constexpr (tile_reads<T, V> && !Format::by_tiles) {
      if (values_in_place_) {
        return body([&](Index col) {
          return StoredColumns<T, V>{values.address(step * Format::terms_at_once, col),
                                     values.row_stride * static_cast<Index>(sizeof(V))};
        });
      }
    }
    const Element* const from = packed_values_ + step * Format::steps_at_once * padded_;
    body([&](Index col) { return packed_columns(from + col); });
  }

  auto packed_columns(const Element* from) const {
    if constexpr (Format::by_tiles) {
      return TileColumnsOfB{from, padded_};
    } else {
      return PackedColumns<T, lanes>{from, padded_};
    }
  }

  /// A copy of one step of the values, zeros in place of the terms that are not in `which`, a bit each.
  template <class V>
  const Element* value_step(const MatrixView<V>& values, Index step, std::uint32_t which) const {
    for (Index k = 0; k < Format::steps_at_once; ++k) {
      pack_value_step(values, step * Format::steps_at_once + k, which >> k * Format::terms,
                      value_step_ + k * padded_);
    }
    return value_step_;
  }

 private:
  template <class V>
  void pack_value_step(const MatrixView<V>& values, Index step, std::uint32_t which,
                       Element* target) const {
    constexpr Index size = sizeof(V);
    const Index key = step * Format::terms;
    std::fill(target + values.cols, target + padded_, Element{});
    if constexpr (Format::pairs) {
      const bool first_seen = (which & 1U) != 0 && key < values.rows;
      const bool second_seen = (which & 2U) != 0 && key + 1 < values.rows;
      if (!first_seen && !second_seen) return void(std::fill_n(target, values.cols, Element{}));
      const std::byte* const first = values.address(first_seen ? key : key + 1, 0);
      const std::byte* const second = values.address(second_seen ? key + 1 : key, 0);
      const std::uint32_t kept = (first_seen ? 0x0000FFFFU : 0U) | (second_seen ? 0xFFFF0000U : 0U);
      for (Index c = 0; c < values.cols; ++c) {
        const auto pair = bfloat16_pair(convert<T>(load<V>(first + c * size)),
                                        convert<T>(load<V>(second + c * size)));
        target[c].bits = pair.bits & kept;
      }
    } else {
      copy_line<T, V>(values.address(key, 0), values.cols, target);
    }
  }

  Index keys_;
  bool many_rows_;
  const std::byte* key_data_;
  Index key_bytes_;
  const std::byte* key_copies_;
  Index key_copy_bytes_;
  Index copied_from_;  ///< keys before it are read where they are stored
  Index padded_;
  bool values_in_place_;
  Element* packed_values_;
  Element* value_step_;
};

}  // namespace vha::detail
