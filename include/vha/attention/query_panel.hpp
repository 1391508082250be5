// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vha/attention/key_value_block.hpp>
#include <vha/attention/visible_runs.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/matrix_tiles.hpp>
#include <vha/ops/register_tile.hpp>
#include <vha/ops/softmax_state.hpp>

namespace vha::detail {

/// Rows of queries, some heads of some tokens, and what they have seen.
template <Operand T>
struct QueryRows {
  using Sum = Compute<T>;
  /// Rows that a register tile holds, of two packets each.
  static constexpr Index tile_rows = many_registers ? 8 : 4;

  const typename LaneFormat<T>::Element* queries;  ///< packed `[steps of head_dim, panel's width]`
  SoftmaxState<Sum>* states;                       ///< `[panel's width]`
  Sum* values;                                     ///< `[count, value_dim]`, weighted sums
  Index count;
  Index first_member;  ///< which head of its token's group the first row is
  Index group_size;
  std::span<const Position> positions;  ///< of the rows' tokens
  Index head_dim;
  Index value_dim;
  CausalMask mask;
  Sum scale;

  Index token(Index row) const { return (first_member + row) / group_size; }
};

/// Rows of queries side by side in the lanes, `Packets` packets of `N`, against a block of keys that
/// all lanes share. So keys and values are read where they are stored, each once for all rows, and the
/// softmax runs down the lanes:
///
///              query rows ->                                 value channels ->
///     keys  |  logits = K · Qᵀ          rows  |  values += weightsᵀ · V
///       v   |  weights = softmax          v   |
///
/// A value that a row does not see, were it NaN, touches no result, and a row's result is the same to
/// the last bit whatever other rows there are.
template <Operand T, Index Packets, Index N>
class QueryPanel {
 public:
  using Format = LaneFormat<T>;
  using Element = typename Format::Element;
  using Sum = Compute<T>;
  static constexpr Index width = Packets * N;

  /// Sums that the weights of a block of keys take: the sums themselves, behind them the chunks for
  /// tiles. A tile may read past its panel's rows.
  static constexpr Index sums_size = KeyValueBlock<T>::max_keys * width;
  static constexpr Index weights_size =
      sums_size +
      (Format::by_tiles ? sums_size / 2 + tile_side * tile_side : QueryRows<T>::tile_rows);

  /// Precondition: no more rows than lanes, and weights for a block of keys.
  QueryPanel(const QueryRows<T>& rows, Sum* weights, const RegistersFor<T>& registers)
      : rows_(rows), weights_(weights), registers_(registers) {}

  /// Sees the keys in `runs`, of which there is at least one, in steps of `terms_at_once` keys.
  /// `ahead(key, key_rows)` tells what memory to ask for while the logits of keys
  /// [key, key + key_rows) are computed.
  template <class V, class AheadOf>
  void attend(const KeyValueBlock<T>& block, const MatrixView<V>& values,
              std::span<const Position> key_positions, std::span<const VisibleRun> runs,
              const AheadOf& ahead) {
    const Index begin = runs.front().step * step_keys;
    const Index end = std::min(block.keys(), runs.back().step_end * step_keys);
    compute_logits(begin, end, block, ahead);
    for (Index k = begin * width; k < end * width; ++k) weights_[k] *= rows_.scale;
    hide_logits(key_positions, runs);
    // The rest of a last step.
    const Index padded_end = begin + pieces(end - begin, step_keys) * step_keys;
    std::fill_n(weights_ + end * width, (padded_end - end) * width, hidden_logit<Sum>);
    update_states(begin, padded_end);
    const Element* const elements = weights_as_elements(begin, padded_end);
    for (const VisibleRun& run : runs) {
      if (run.to_all) {
        accumulate(elements, 0, rows_.count, run.step, run.step_end, block, values);
      } else {
        accumulate_by_token(elements, run, block, key_positions, values);
      }
    }
  }

 private:
  static constexpr Index step_keys = Format::terms_at_once;
  static constexpr Index lanes = widest<Sum>;
  static constexpr Index value_rows = QueryRows<T>::tile_rows;

  /// Writes the logits of keys [begin, end) to `weights_`, `[keys, width]`.
  template <class AheadOf>
  void compute_logits(Index begin, Index end, const KeyValueBlock<T>& block, const AheadOf& ahead) {
    const Index steps = Format::steps(rows_.head_dim);
    if constexpr (Format::by_tiles) {
      compute_logits_by_tiles(begin, end, steps, block, ahead);
    } else {
      compute_logits_in_lanes(begin, end, steps, block, ahead);
    }
  }

  template <class AheadOf>
  void compute_logits_by_tiles(Index begin, Index end, Index steps, const KeyValueBlock<T>& block,
                               const AheadOf& ahead) {
    constexpr Index tile_keys = KeyValueBlock<T>::tile_keys;
    for (Index key = begin; key < end; key += tile_keys) {
      const Index keys = std::min(tile_keys, end - key);
      const auto next = ahead(key, tile_keys);
      const auto fetch = [&](Index chunk) {
        if (!next.worth_it) return;
        for (Index step = chunk * tile_side; step < (chunk + 1) * tile_side; ++step) {
          next.fetch(step);
        }
      };
      with_row_tiles(keys, [&](auto row_tiles) {
        multiply_tiles<row_tiles(), Packets>(
            registers_, steps / tile_side, block.tile_key_rows(key), {rows_.queries, width},
            weights_ + key * width, width, keys, width, SumInto::replace, fetch);
      });
    }
  }

  /// Calls `body` with the tiles that hold `rows` rows of A, at most two.
  template <class Body>
  static void with_row_tiles(Index rows, Body&& body) {
    if (rows > tile_side) return body(std::integral_constant<int, 2>{});
    body(std::integral_constant<int, 1>{});
  }

  template <class AheadOf>
  void compute_logits_in_lanes(Index begin, Index end, Index steps, const KeyValueBlock<T>& block,
                               const AheadOf& ahead) {
    constexpr Index tile_keys = QueryRows<T>::tile_rows;
    for (Index key = begin; key < end; key += tile_keys) {
      const Index keys = std::min(tile_keys, end - key);
      const auto multiply_by = [&](const auto& columns) {
        multiply_tile<T, tile_keys, Packets, N>(
            steps, block.template key_rows<tile_keys>(key, keys), columns, weights_ + key * width,
            width, keys, width, SumInto::replace);
      };
      if (const auto next = ahead(key, tile_keys); next.worth_it) {
        multiply_by(FetchingColumns<T, N, width, decltype(next)>{rows_.queries, next});
      } else {
        using Width = std::integral_constant<Index, width>;
        multiply_by(PackedColumns<T, N, Width>{rows_.queries, {}});
      }
    }
  }

  void hide_logits(std::span<const Position> key_positions, std::span<const VisibleRun> runs) {
    for (const VisibleRun& run : runs) {
      if (run.to_all) continue;
      const Index end =
          std::min(run.step_end * step_keys, static_cast<Index>(key_positions.size()));
      for (Index key = run.step * step_keys; key < end; ++key) {
        for (Index row = 0; row < rows_.count; ++row) {
          if (!visible(row, key_positions, key)) weights_[key * width + row] = hidden_logit<Sum>;
        }
      }
    }
    // Keys between two runs are seen by none.
    for (std::size_t k = 1; k < runs.size(); ++k) {
      const Index from = runs[k - 1].step_end * step_keys;
      const Index to = runs[k].step * step_keys;
      if (from < to) std::fill_n(weights_ + from * width, (to - from) * width, hidden_logit<Sum>);
    }
  }

  bool visible(Index row, std::span<const Position> key_positions, Index key) const {
    return rows_.mask.visible(rows_.positions[static_cast<std::size_t>(rows_.token(row))],
                              key_positions[static_cast<std::size_t>(key)]);
  }

  /// Turns the logits into weights, and rescales the values accumulated so far.
  void update_states(Index begin, Index end) {
    namespace packet = Eigen::internal;
    using Row = Eigen::Map<Eigen::Array<Sum, Eigen::Dynamic, 1>>;
    for (Index p = 0; p < Packets; ++p) {
      SoftmaxState<Sum>* const states = rows_.states + p * N;
      Sum max[N], sum[N], factor[N];
      for (Index lane = 0; lane < N; ++lane) {
        max[lane] = states[lane].max;
        sum[lane] = states[lane].sum;
      }
      using Packet = typename SoftmaxLanes<Sum, N>::Packet;
      SoftmaxLanes<Sum, N> together{packet::ploadu<Packet>(max), packet::ploadu<Packet>(sum)};
      packet::pstoreu(factor,
                      together.update(weights_ + begin * width + p * N, end - begin, width));
      packet::pstoreu(max, together.max);
      packet::pstoreu(sum, together.sum);
      for (Index lane = 0; lane < N; ++lane) {
        states[lane].max = max[lane];
        states[lane].sum = sum[lane];
        const Index row = p * N + lane;
        if (row < rows_.count && factor[lane] != Sum(1)) {
          Row(rows_.values + row * rows_.value_dim, rows_.value_dim) *= factor[lane];
        }
      }
    }
  }

  /// The weights of keys [begin, end), of whole steps, as elements `[steps, width]`, counted from key
  /// 0, in the same place; those for tiles behind it, `[chunk, width, step]`.
  const Element* weights_as_elements(Index begin, Index end) {
    auto* const elements = reinterpret_cast<Element*>(weights_);
    if constexpr (Format::by_tiles) {
      Element* const chunks = elements + sums_size;
      using Packet = typename Lanes<T, N>::Packet;
      const auto load = [](const Sum* at) { return Eigen::internal::ploadu<Packet>(at); };
      for (Index key = begin; key < end; key += step_keys) {
        for (Index p = 0; p < Packets; ++p) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
          Eigen::internal::PacketBlock<Packet, tile_side> square;
#pragma GCC diagnostic pop
#pragma GCC unroll 16
          for (Index step = 0; step < tile_side; ++step) {
            const Sum* const source = weights_ + (key + 2 * step) * width + p * N;
            const auto pairs = Lanes<T, N>::pair_up(load(source), load(source + width));
            std::memcpy(&square.packet[step], &pairs, sizeof pairs);
          }
          Eigen::internal::ptranspose(square);
          Element* const tile = chunks + key / 2 * width + p * tile_side * tile_side;
#pragma GCC unroll 16
          for (Index row = 0; row < tile_side; ++row) {
            std::memcpy(tile + row * tile_side, &square.packet[row], sizeof(Packet));
          }
        }
      }
      return chunks;
    } else if constexpr (Format::pairs) {
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
  template <class V>
  void accumulate(const Element* elements, Index row, Index count, Index step, Index step_end,
                  const KeyValueBlock<T>& block, const MatrixView<V>& values) {
    block.with_value_columns(values, step, [&](auto&& columns_from) {
      accumulate_columns(elements, row, count, step, step_end, columns_from);
    });
  }

  template <class Columns>
  void accumulate_columns(const Element* all, Index row, Index count, Index step, Index step_end,
                          const Columns& columns_from) {
    if constexpr (Format::by_tiles) {
      return accumulate_by_tiles(all + step * tile_side * width, row, count, step_end - step,
                                 columns_from);
    } else {
      accumulate_in_lanes(all + step * width + row, row, count, step_end - step, columns_from);
    }
  }

  template <class Columns>
  void accumulate_by_tiles(const Element* chunks, Index row, Index count, Index chunk_count,
                           const Columns& columns_from) {
    const TileRowsOfA weights = packed_tile_rows(chunks, width).from(row);
    constexpr Index cols = KeyValueBlock<T>::tile_cols;
    for (Index col = 0; col < rows_.value_dim; col += cols) {
      with_row_tiles(count, [&](auto row_tiles) {
        multiply_tiles<row_tiles(), 2>(registers_, chunk_count, weights, columns_from(col),
                                       rows_.values + row * rows_.value_dim + col, rows_.value_dim,
                                       count, std::min(cols, rows_.value_dim - col), SumInto::go_on,
                                       [](Index) {});
      });
    }
  }

  template <class Columns>
  void accumulate_in_lanes(const Element* elements, Index row, Index count, Index steps,
                           const Columns& columns_from) {
    using One = std::integral_constant<Index, sizeof(Element)>;
    using Step = std::integral_constant<Index, sizeof(Element) * width>;
    constexpr Index cols = KeyValueBlock<T>::tile_cols;
    for (Index col = 0; col < rows_.value_dim; col += cols) {
      for (Index r = 0; r < count; r += value_rows) {
        const TileRows<Element, One, Step> weights{
            reinterpret_cast<const std::byte*>(elements + r), {}, {}};
        multiply_tile<T, value_rows, 2, lanes>(
            steps, weights, columns_from(col), rows_.values + (row + r) * rows_.value_dim + col,
            rows_.value_dim, std::min(value_rows, count - r), std::min(cols, rows_.value_dim - col),
            SumInto::go_on);
      }
    }
  }

  /// The same for keys that some of the panel's tokens see, token by token.
  template <class V>
  void accumulate_by_token(const Element* elements, const VisibleRun& run,
                           const KeyValueBlock<T>& block, std::span<const Position> key_positions,
                           const MatrixView<V>& values) {
    const auto keys = static_cast<Index>(key_positions.size());
    for (Index row = 0; row < rows_.count;) {
      const Index next_token = (rows_.token(row) + 1) * rows_.group_size - rows_.first_member;
      const Index token_rows = std::min(rows_.count, next_token) - row;
      // Which of a step's terms the token sees, a bit each.
      const auto seen = [&](Index step) {
        std::uint32_t which = 0;
        for (Index term = 0; term < step_keys; ++term) {
          const Index key = step * step_keys + term;
          if (key < keys && visible(row, key_positions, key)) which |= 1U << term;
        }
        return which;
      };
      const auto whole = [&](Index step) {
        return std::popcount(seen(step)) == std::min(step_keys, keys - step * step_keys);
      };
      for (Index step = run.step; step < run.step_end;) {
        Index end = step;
        while (end < run.step_end && whole(end)) ++end;
        if (end > step) {
          accumulate(elements, row, token_rows, step, end, block, values);
          step = end;
          continue;
        }
        if (const std::uint32_t which = seen(step); which != 0) {
          const Element* const one = block.value_step(values, step, which);
          accumulate_columns(elements, row, token_rows, step, step + 1,
                             [&](Index col) { return block.packed_columns(one + col); });
        }
        ++step;
      }
      row += token_rows;
    }
  }

  QueryRows<T> rows_;
  Sum* weights_;
  const RegistersFor<T>& registers_;
};

}  // namespace vha::detail
