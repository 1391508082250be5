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
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/panels.hpp>
#include <vha/ops/register_tile.hpp>
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
  Buffer<Compute<T>> queries, weights, values, earlier_values;
  std::vector<SoftmaxState<Compute<T>>> states, earlier_states;
  std::vector<VisibleRun> runs;
  KeyValueMemory<T> keys;
};

/// The queries of one K/V head's group for some tokens, against blocks of keys.
///
/// Queries stand side by side in the lanes, a panel of them at a time, and keys are what all lanes
/// share. So keys and values are read where they are stored, each once for the whole panel, and the
/// softmax runs down the lanes:
///
///              query rows ->                                 value channels ->
///     keys  |  logits = K · Qᵀ          rows  |  values += weightsᵀ · V
///       v   |  weights = softmax          v   |
///
/// A value that a query does not see, were it NaN, touches no result, and a query's result is the
/// same to the last bit whatever other queries are in the block.
template <Operand T>
class QueryBlock {
 public:
  using Sum = Compute<T>;
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  using Memory = QueryBlockMemory<T>;

  static constexpr Index lanes = widest<Sum>;
  static constexpr Index panel_rows = 2 * lanes;
  static constexpr Index key_block = KeyValueBlock<T>::max_keys;

  QueryBlock(std::span<const Position> positions, Index group_size, Index head_dim, Index value_dim,
             const CausalMask& mask, double scale, Memory& memory)
      : positions_(positions),
        group_size_(group_size),
        rows_(static_cast<Index>(positions.size()) * group_size),
        head_dim_(head_dim),
        value_dim_(value_dim),
        mask_(mask),
        scale_(static_cast<Sum>(scale)),
        memory_(memory) {
    const Index padded = (rows_ + panel_rows - 1) / panel_rows * panel_rows;
    queries_ = reinterpret_cast<Element*>(memory.queries.reserve(padded * Format::steps(head_dim)));
    // A tile may read past its panel's rows.
    weights_ = memory.weights.reserve((key_block + 1) * panel_rows + value_rows);
    values_ = memory.values.reserve(rows_ * value_dim);
    memory.states.resize(static_cast<std::size_t>(padded));
    forget();
  }

  /// Precondition: as many tokens as positions.
  template <class Q>
  void load_queries(const HeadsView<const Q>& query, Index group) {
    Q* const gathered = gather_room<Q>();
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
    std::fill_n(values_, rows_ * value_dim_, Sum(0));
    std::fill(memory_.states.begin(), memory_.states.end(), SoftmaxState<Sum>{});
  }
  AttendedRows<Sum> attended() const { return {memory_.states.data(), values_}; }
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
    const bool once = rows_ <= panel_rows;  // the block is read for one panel
    const KeyValueBlock<T> block(keys, values, !once, memory_.keys);
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
      list_visible_runs(mask_, tokens, key_positions, of_panel, Format::terms, memory_.runs);
      if (memory_.runs.empty()) continue;
      with_panel(rows, [&](auto packets, auto lanes_each) {
        attend_panel<packets(), lanes_each()>(first, rows, block, key_positions, values, ahead);
      });
    }
  }

 private:
  static constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;
  static constexpr Index value_rows = many_registers ? 8 : 4;

  /// Calls `body` with the packets and the lanes of each that hold `rows` query rows.
  template <class Body>
  static void with_panel(Index rows, Body&& body) {
    constexpr Index narrowest = std::min<Index>(lanes, 16 / static_cast<Index>(sizeof(Sum)));
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

  template <class Q>
  Q* gather_room() {
    constexpr Index sums_each = std::max<Index>(1, sizeof(Q) / sizeof(Sum));
    return reinterpret_cast<Q*>(memory_.keys.gathered.reserve(panel_rows * head_dim_ * sums_each));
  }

  Element* query_panel(Index first_row) const {
    return queries_ + first_row * Format::steps(head_dim_);
  }

  /// The positions of the tokens that rows [first, first + count) belong to.
  std::span<const Position> tokens_of(Index first, Index count) const {
    const Index token = first / group_size_;
    return part(positions_, token, (first + count - 1) / group_size_ + 1 - token);
  }

  template <Index Packets, Index N, class V, class AheadOf>
  void attend_panel(Index first, Index count, const KeyValueBlock<T>& block,
                    std::span<const Position> key_positions, const MatrixView<V>& values,
                    const AheadOf& ahead) {
    constexpr Index width = Packets * N;
    const Index begin = memory_.runs.front().step * Format::terms;
    const Index end = std::min(block.keys(), memory_.runs.back().step_end * Format::terms);
    compute_logits<Packets, N>(first, begin, end, block, ahead);
    hide_logits<width>(first, count, key_positions);
    // The second half of a last pair.
    const Index padded_end = begin + Format::steps(end - begin) * Format::terms;
    std::fill_n(weights_ + end * width, (padded_end - end) * width, hidden_logit<Sum>);
    update_states<Packets, N>(first, count, begin, padded_end);
    const Element* const elements = weights_as_elements<Packets, N>(begin, padded_end);
    for (const VisibleRun& run : memory_.runs) {
      if (run.to_all) {
        accumulate<width>(elements, first, 0, count, run.step, run.step_end, block, values);
      } else {
        accumulate_by_token<width>(elements, first, count, run, block, key_positions, values);
      }
    }
  }

  /// Writes the logits of keys [begin, end) to `weights_`, `[keys, width]`.
  template <Index Packets, Index N, class AheadOf>
  void compute_logits(Index first, Index begin, Index end, const KeyValueBlock<T>& block,
                      const AheadOf& ahead) {
    constexpr Index width = Packets * N;
    // Sixteen sums or more hide the latency of an addition.
    constexpr Index key_rows = (many_registers ? 16 : 8) / Packets;
    for (Index key = begin; key < end; key += key_rows) {
      const Index keys = std::min(key_rows, end - key);
      const auto multiply_by = [&](const auto& columns) {
        multiply_tile<T, key_rows, Packets, N>(Format::steps(head_dim_), block.key_rows(key, keys),
                                               columns, weights_ + key * width, width, keys, width,
                                               SumInto::replace);
      };
      if (const auto next = ahead(key, key_rows); next.worth_it) {
        multiply_by(FetchingColumns<T, N, width, decltype(next)>{query_panel(first), next});
      } else {
        using Width = std::integral_constant<Index, width>;
        multiply_by(PackedColumns<T, N, Width>{query_panel(first), {}});
      }
    }
  }

  template <Index width>
  void hide_logits(Index first, Index count, std::span<const Position> key_positions) {
    for (const VisibleRun& run : memory_.runs) {
      if (run.to_all) continue;
      const Index end =
          std::min(run.step_end * Format::terms, static_cast<Index>(key_positions.size()));
      for (Index key = run.step * Format::terms; key < end; ++key) {
        for (Index row = 0; row < count; ++row) {
          if (!visible(first + row, key_positions, key))
            weights_[key * width + row] = hidden_logit<Sum>;
        }
      }
    }
    // Keys between two runs are seen by none.
    for (std::size_t k = 1; k < memory_.runs.size(); ++k) {
      const Index from = memory_.runs[k - 1].step_end * Format::terms;
      const Index to = memory_.runs[k].step * Format::terms;
      if (from < to) std::fill_n(weights_ + from * width, (to - from) * width, hidden_logit<Sum>);
    }
  }

  bool visible(Index row, std::span<const Position> key_positions, Index key) const {
    return mask_.visible(positions_[static_cast<std::size_t>(row / group_size_)],
                         key_positions[static_cast<std::size_t>(key)]);
  }

  /// Turns the logits into weights, and rescales the values accumulated so far.
  template <Index Packets, Index N>
  void update_states(Index first, Index count, Index begin, Index end) {
    constexpr Index width = Packets * N;
    namespace packet = Eigen::internal;
    using Row = Eigen::Map<Eigen::Array<Sum, Eigen::Dynamic, 1>>;
    for (Index p = 0; p < Packets; ++p) {
      SoftmaxState<Sum>* const states = memory_.states.data() + first + p * N;
      Sum max[N], sum[N], factor[N];
      for (Index lane = 0; lane < N; ++lane) {
        max[lane] = states[lane].max;
        sum[lane] = states[lane].sum;
      }
      using Packet = typename SoftmaxLanes<Sum, N>::Packet;
      SoftmaxLanes<Sum, N> together{packet::ploadu<Packet>(max), packet::ploadu<Packet>(sum)};
      packet::pstoreu(
          factor, together.update(weights_ + begin * width + p * N, end - begin, width, scale_));
      packet::pstoreu(max, together.max);
      packet::pstoreu(sum, together.sum);
      for (Index lane = 0; lane < N; ++lane) {
        states[lane].max = max[lane];
        states[lane].sum = sum[lane];
        const Index row = p * N + lane;
        if (row < count && factor[lane] != Sum(1)) {
          Row(values_ + (first + row) * value_dim_, value_dim_) *= factor[lane];
        }
      }
    }
  }

  /// The weights of keys [begin, end), a multiple of `terms`, as elements `[steps, width]`, counted
  /// from key 0; in the same place.
  template <Index Packets, Index N>
  const Element* weights_as_elements(Index begin, Index end) {
    constexpr Index width = Packets * N;
    auto* const elements = reinterpret_cast<Element*>(weights_);
    if constexpr (Format::pairs) {
      using Packet = typename Lanes<T, N>::Packet;
      const auto load = [](const Sum* at) { return Eigen::internal::ploadu<Packet>(at); };
      for (Index step = begin / 2; step < end / 2; ++step) {
        for (Index p = 0; p < Packets; ++p) {
          const Sum* const source = weights_ + 2 * step * width + p * N;
          const auto pairs = Lanes<T, N>::pair_up(load(source), load(source + width));
          std::memcpy(elements + step * width + p * N, &pairs, sizeof pairs);
        }
      }
    } else if constexpr (!std::same_as<T, Sum>) {
      for (Index k = begin * width; k < end * width; ++k) weights_[k] = Format::term(weights_[k]);
    }
    return elements;
  }

  /// Adds the weighted values of steps [step, step_end) to rows [row, row + count) of the panel.
  template <Index width, class V>
  void accumulate(const Element* elements, Index first, Index row, Index count, Index step,
                  Index step_end, const KeyValueBlock<T>& block, const MatrixView<V>& values) {
    block.with_value_columns(values, step, [&](auto&& columns_from) {
      accumulate_columns<width>(elements + step * width + row, first + row, count, step_end - step,
                                columns_from);
    });
  }

  template <Index width, class Columns>
  void accumulate_columns(const Element* elements, Index row, Index count, Index steps,
                          const Columns& columns_from) {
    using One = std::integral_constant<Index, sizeof(Element)>;
    using Step = std::integral_constant<Index, sizeof(Element) * width>;
    constexpr Index cols = 2 * lanes;
    for (Index col = 0; col < value_dim_; col += cols) {
      for (Index r = 0; r < count; r += value_rows) {
        const TileRows<Element, One, Step> weights{
            reinterpret_cast<const std::byte*>(elements + r), {}, {}};
        multiply_tile<T, value_rows, 2, lanes>(
            steps, weights, columns_from(col), values_ + (row + r) * value_dim_ + col, value_dim_,
            std::min(value_rows, count - r), std::min(cols, value_dim_ - col), SumInto::go_on);
      }
    }
  }

  /// The same for keys that some of the panel's tokens see, token by token.
  template <Index width, class V>
  void accumulate_by_token(const Element* elements, Index first, Index count, const VisibleRun& run,
                           const KeyValueBlock<T>& block, std::span<const Position> key_positions,
                           const MatrixView<V>& values) {
    const auto keys = static_cast<Index>(key_positions.size());
    for (Index row = 0; row < count;) {
      const Index next_token = ((first + row) / group_size_ + 1) * group_size_ - first;
      const Index token_rows = std::min(count, next_token) - row;
      // How many of a step's terms the token sees; a term beyond the last key is as good as seen.
      const auto seen = [&](Index step) {
        unsigned which = 0;
        for (Index term = 0; term < Format::terms; ++term) {
          const Index key = step * Format::terms + term;
          if (key < keys && visible(first + row, key_positions, key)) which |= 1U << term;
        }
        return which;
      };
      const auto whole = [&](Index step) {
        const Index terms = std::min(Format::terms, keys - step * Format::terms);
        return seen(step) == (1U << terms) - 1;
      };
      for (Index step = run.step; step < run.step_end;) {
        Index end = step;
        while (end < run.step_end && whole(end)) ++end;
        if (end > step) {
          accumulate<width>(elements, first, row, token_rows, step, end, block, values);
          step = end;
          continue;
        }
        if (const unsigned which = seen(step); which != 0) {
          const Element* const one = block.value_step(values, step, which);
          accumulate_columns<width>(elements + step * width + row, first + row, token_rows, 1,
                                    [&](Index col) { return block.packed_columns(one + col); });
        }
        ++step;
      }
      row += token_rows;
    }
  }

  std::span<const Position> positions_;
  Index group_size_;
  Index rows_;
  Index head_dim_;
  Index value_dim_;
  CausalMask mask_;
  Sum scale_;
  Memory& memory_;
  Element* queries_;
  Sum* weights_;
  Sum* values_;
};

}  // namespace vha::detail
