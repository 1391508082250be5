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
    value_step.reserve(padded);
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
    if (packet == 0) {
      fetch(ahead.keys, step, ahead.key_bytes);
      fetch(ahead.values, step, ahead.value_bytes);
    }
    return Lanes<T, N>::load(data + step * width + packet * N);
  }

 private:
  static void fetch(const std::byte* from, Index step, Index bytes) {
    __builtin_prefetch(from + step * bytes, 0, to_second_level);
    if constexpr (sizeof(Compute<T>) == 8) {
      __builtin_prefetch(from + step * bytes + bytes / 2, 0, to_second_level);
    }
  }
};

/// A block of keys and values as the register tile reads them: where they are stored, if they are
/// stored as `T` in the tile's order, else as a copy in that order. Values that many rows of queries
/// read are copied too.
template <Operand T>
class KeyValueBlock {
 public:
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  static constexpr Index lanes = widest<Compute<T>>;
  static constexpr Index max_keys = KeyValueMemory<T>::max_keys;
  static constexpr Index tile_cols = KeyValueMemory<T>::tile_cols;

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
    if (is_stored_as_elements<T, K> && keys.cols % Format::terms == 0) {
      key_data_ = keys.data;
      key_bytes_ = keys.row_stride * static_cast<Index>(sizeof(K));
    } else {
      for (Index key = 0; key < keys.rows; ++key) {
        Element* const copy = copies + key * key_steps;
        const Index whole = keys.cols / Format::terms;
        copy_line<T, K>(keys.address(key, 0), whole, copy);
        if (whole < key_steps) copy[whole] = panel_element<T>(keys, key, whole * Format::terms);
      }
      key_data_ = reinterpret_cast<const std::byte*>(copies);
      key_bytes_ = key_steps * static_cast<Index>(sizeof(Element));
    }
    values_in_place_ =
        tile_reads<T, V> && !many_rows && padded_ == values.cols && keys.rows % Format::terms == 0;
    if (values_in_place_) return;
    for (Index step = 0; step < Format::steps(keys.rows); ++step) {
      const unsigned all = (1U << Format::terms) - 1;
      pack_value_step(values, step, all, packed_values_ + step * padded_);
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

  /// Calls `body` with a function that gives the columns of the values from one on, the rows counted
  /// from `step`.
  template <class V, class Body>
  void with_value_columns(const MatrixView<V>& values, Index step, Body&& body) const {
    if constexpr (tile_reads<T, V>) {
      if (values_in_place_) {
        return body([&](Index col) {
          return StoredColumns<T, V>{values.address(step * Format::terms, col),
                                     values.row_stride * static_cast<Index>(sizeof(V))};
        });
      }
    }
    body([&](Index col) { return packed_columns(packed_values_ + step * padded_ + col); });
  }

  PackedColumns<T, lanes> packed_columns(const Element* from) const { return {from, padded_}; }

  /// A copy of one step of the values, zeros in place of the terms that are not in `which`, a bit each.
  template <class V>
  const Element* value_step(const MatrixView<V>& values, Index step, unsigned which) const {
    pack_value_step(values, step, which, value_step_);
    return value_step_;
  }

 private:
  template <class V>
  void pack_value_step(const MatrixView<V>& values, Index step, unsigned which,
                       Element* target) const {
    constexpr Index size = sizeof(V);
    const Index key = step * Format::terms;
    std::fill(target + values.cols, target + padded_, Element{});
    if constexpr (Format::pairs) {
      const bool first_seen = (which & 1U) != 0;
      const bool second_seen = (which & 2U) != 0 && key + 1 < values.rows;
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
  Index padded_;
  bool values_in_place_;
  Element* packed_values_;
  Element* value_step_;
};

}  // namespace vha::detail
