// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>
#include <vha/attention/key_value_block.hpp>
#include <vha/attention/query_panel.hpp>
#include <vha/attention/visible_runs.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/panels.hpp>
#include <vha/ops/softmax_state.hpp>

namespace vha::detail {

/// What some rows of queries have seen: their softmax states and the weighted sums of the values.
template <ComputeScalar T>
struct AttendedRows {
  SoftmaxState<T>* states;
  T* values;  ///< `[rows, value_dim]`

  /// Joins what the same rows saw elsewhere.
  void merge(const AttendedRows& other, Index rows, Index value_dim) const {
    using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
    for (Index row = 0; row < rows; ++row) {
      // Where one side saw nothing the other's values stay as they are, to the sign of a zero: what is
      // hidden changes no bit.
      if (other.states[row].empty()) continue;
      if (states[row].empty()) {
        states[row] = other.states[row];
        std::copy_n(other.values + row * value_dim, value_dim, values + row * value_dim);
        continue;
      }
      T factor, other_factor;
      states[row] = states[row].merge(other.states[row], factor, other_factor);
      Row mine(values + row * value_dim, value_dim);
      mine = factor * mine + other_factor * Row(other.values + row * value_dim, value_dim);
    }
  }
};

/// One thread's buffers.
template <Operand T>
struct QueryBlockMemory {
  static constexpr Index panel_rows = 2 * widest<Compute<T>>;

  Buffer<Compute<T>> gathered, queries, weights, values, earlier_values;
  std::vector<SoftmaxState<Compute<T>>> states, earlier_states;
  std::vector<VisibleRun> runs;
  KeyValueMemory<T> block;

  /// Makes room for `rows` rows of queries, of whatever scalar, and for any block of keys.
  void reserve(Index rows, Index head_dim, Index value_dim) {
    using Panel = QueryPanel<T, 2, widest<Compute<T>>>;
    constexpr Index keys = KeyValueBlock<T>::max_keys;
    const Index padded = pieces(rows, panel_rows) * panel_rows;
    gathered.reserve(panel_rows * head_dim * Index(sizeof(double) / sizeof(Compute<T>)));
    queries.reserve(padded * LaneFormat<T>::steps(head_dim));
    weights.reserve(Panel::weights_size);
    values.reserve(rows * value_dim);
    earlier_values.reserve(rows * value_dim);
    states.reserve(static_cast<std::size_t>(padded));
    earlier_states.reserve(static_cast<std::size_t>(padded));
    runs.reserve(static_cast<std::size_t>(keys));
    block.reserve(head_dim, value_dim);
  }
};

/// The queries of one K/V head's group for some tokens, a panel at a time, against blocks of keys.
template <Operand T>
class QueryBlock {
 public:
  using Sum = Compute<T>;
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  using Memory = QueryBlockMemory<T>;

  static constexpr Index lanes = widest<Sum>;
  static constexpr Index panel_rows = Memory::panel_rows;
  static constexpr Index key_block = KeyValueBlock<T>::max_keys;

  /// Precondition: `memory` has room for the rows; `memory` and `registers` are the thread's own.
  QueryBlock(std::span<const Position> positions, Index group_size, Index head_dim, Index value_dim,
             const CausalMask& mask, double scale, Memory& memory, const RegistersFor<T>& registers)
      : positions_(positions),
        group_size_(group_size),
        rows_(static_cast<Index>(positions.size()) * group_size),
        head_dim_(head_dim),
        value_dim_(value_dim),
        mask_(mask),
        scale_(static_cast<Sum>(scale)),
        memory_(memory),
        registers_(registers) {
    const Index padded = pieces(rows_, panel_rows) * panel_rows;
    memory.states.resize(static_cast<std::size_t>(padded));
    forget();
  }

  /// Precondition: as many tokens as positions.
  template <class Q>
  void load_queries(const HeadsView<const Q>& query, Index group) {
    auto* const gathered = reinterpret_cast<Q*>(memory_.gathered.data());
    for (Index first = 0; first < rows_; first += panel_rows) {
      const Index count = std::min(panel_rows, rows_ - first);
      for (Index row = 0; row < count; ++row) {
        const Q* const head =
            query.head((first + row) / group_size_, group, (first + row) % group_size_);
        std::copy_n(head, head_dim_, gathered + row * head_dim_);
      }
      const auto lines =
          row_major_view(static_cast<const Q*>(gathered), count, head_dim_, head_dim_);
      with_panel(count, [&](auto packets, auto lanes_each) {
        pack_panel<T, packets() * lanes_each()>(lines, query_panel(first));
      });
    }
  }

  /// Forgets what was seen.
  void forget() {
    std::fill_n(memory_.values.data(), rows_ * value_dim_, Sum(0));
    std::fill(memory_.states.begin(), memory_.states.end(), SoftmaxState<Sum>{});
  }
  AttendedRows<Sum> attended() const { return {memory_.states.data(), memory_.values.data()}; }
  Index rows() const { return rows_; }

  /// Sees `count` keys from `key` on, `key_block` of them at most.
  template <class K, class V>
  void attend(const MatrixView<K>& all_keys, const MatrixView<V>& all_values,
              std::span<const Position> all_positions, Index key, Index count) {
    const auto keys = all_keys.block(key, 0, count, all_keys.cols);
    const auto values = all_values.block(key, 0, count, all_values.cols);
    const auto key_positions = part(all_positions, key, count);
    const auto key_range = PositionRange::of(key_positions);
    const Visibility of_block = mask_.visibility(PositionRange::of(positions_), key_range);
    if (of_block == Visibility::none) return;
    const KeyValueBlock<T> block(keys, values, rows_ > panel_rows, memory_.block);
    static constexpr Index keys_ahead = 64;
    const auto ahead = [&](Index tile, Index tile_keys) {
      return block.ahead(all_keys, all_values, key + tile + keys_ahead, tile_keys,
                         Format::steps(head_dim_));
    };
    for (Index first = 0; first < rows_; first += panel_rows) {
      const Index rows = std::min(panel_rows, rows_ - first);
      const auto tokens = tokens_of(first, rows);
      const Visibility of_panel = of_block == Visibility::all
                                      ? of_block
                                      : mask_.visibility(PositionRange::of(tokens), key_range);
      if (of_panel == Visibility::none) continue;
      list_visible_runs(mask_, tokens, key_positions, of_panel, Format::terms_at_once,
                        memory_.runs);
      if (memory_.runs.empty()) continue;
      with_panel(rows, [&](auto packets, auto lanes_each) {
        QueryPanel<T, packets(), lanes_each()>(rows_from(first, rows), memory_.weights.data(),
                                               registers_)
            .attend(block, values, key_positions, memory_.runs, ahead);
      });
    }
  }

 private:
  /// Calls `body` with the packets and the lanes of each that hold `rows` query rows.
  template <class Body>
  static void with_panel(Index rows, Body&& body) {
    constexpr Index narrowest =
        Format::by_tiles ? lanes : std::min<Index>(lanes, 16 / static_cast<Index>(sizeof(Sum)));
    constexpr std::integral_constant<Index, 1> one;
    if (rows > lanes)
      return body(std::integral_constant<Index, 2>{}, std::integral_constant<Index, lanes>{});
    if constexpr (lanes / 2 >= narrowest) {
      if constexpr (lanes / 4 >= narrowest) {
        if (rows <= lanes / 4) return body(one, std::integral_constant<Index, lanes / 4>{});
      }
      if (rows <= lanes / 2) return body(one, std::integral_constant<Index, lanes / 2>{});
    }
    body(one, std::integral_constant<Index, lanes>{});
  }

  Element* query_panel(Index first_row) const {
    return reinterpret_cast<Element*>(memory_.queries.data()) +
           first_row * Format::steps(head_dim_);
  }

  QueryRows<T> rows_from(Index first, Index count) const {
    return {.queries = query_panel(first),
            .states = memory_.states.data() + first,
            .values = memory_.values.data() + first * value_dim_,
            .count = count,
            .first_member = first % group_size_,
            .group_size = group_size_,
            .positions = tokens_of(first, count),
            .head_dim = head_dim_,
            .value_dim = value_dim_,
            .mask = mask_,
            .scale = scale_};
  }

  /// The positions of the tokens that rows [first, first + count) belong to.
  std::span<const Position> tokens_of(Index first, Index count) const {
    const Index token = first / group_size_;
    return part(positions_, token, (first + count - 1) / group_size_ + 1 - token);
  }

  std::span<const Position> positions_;
  Index group_size_;
  Index rows_;
  Index head_dim_;
  Index value_dim_;
  CausalMask mask_;
  Sum scale_;
  Memory& memory_;
  const RegistersFor<T>& registers_;
};

}  // namespace vha::detail
