// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>
#include <vha/attention/causal_attention.hpp>
#include <vha/attention/visible_runs.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/matrix_product.hpp>
#include <vha/ops/softmax_state.hpp>

// The core of a layer whose heads are composed for each pair of tokens. A composed logit needs those of
// all heads, so a query's logits stand in memory, `[query_heads, keys]`, for one query at a time.

namespace vha::detail {

/// A token's share of the two compositions: for the one before and the one after the softmax, `rank`
/// first factors, `rank` second factors and a gate, each of a number for each head.
struct TokenMapShape {
  Index heads;
  Index rank;

  constexpr Index rows() const { return 2 * rank + 1; }
  /// Numbers of one head.
  constexpr Index channels() const { return 2 * rows(); }
  constexpr Index width() const { return channels() * heads; }
};

/// The shares of keys in one composition, key after key: row `r` of head `j` at `row(j, r)`.
template <ComputeScalar T>
struct KeyMaps {
  const T* data;
  Index head_stride;
  Index row_stride;

  const T* row(Index head, Index r) const { return data + head * head_stride + r * row_stride; }
  KeyMaps from(Index key) const { return {data + key, head_stride, row_stride}; }
};

/// One thread's memory.
template <ComputeScalar T>
struct ComposedHeadsMemory {
  static constexpr Index lanes = 64;  ///< keys that are composed together

  Buffer<T> rows;   ///< logits, then weights, `[query_heads, capacity]`
  Buffer<T> block;  ///< those of `lanes` keys
  Buffer<T> inner;  ///< what the first factors make of them, `[2 * rank, lanes]`
  std::vector<VisibleRun> runs;
  ProductWorkspace<T> product;

  void reserve(const TokenMapShape& shape, Index capacity) {
    rows.reserve(shape.heads * capacity);
    block.reserve(shape.heads * lanes);
    inner.reserve(2 * shape.rank * lanes);
    runs.reserve(static_cast<std::size_t>(capacity));
    // Which thread takes part is chance; that another does next time must not make it allocate.
    ProductTile<T>::panels(product.a_panels, ProductTile<T>::row_block);
    ProductTile<T>::panels(product.b_panels, ProductTile<T>::col_block);
  }
};

/// Composes the `count` columns of `rows`, `[heads, count]`, `stride` apart, in place:
///
///     to[n] = Σ_m from[m]·base[m, n] + from[n]·(gate_q[n] + gate_k[n])
///           + Σ_r (Σ_m from[m]·first_q[r, m])·second_q[r, n]
///           + Σ_r (Σ_m from[m]·first_k[r, m])·second_k[r, n]
///
/// with the query's share `[2 * rank + 1, heads]` at `query` and those of the columns' keys in `keys`.
/// Precondition: behind the last key's numbers others, or zeros, can be read, as far as `lanes`.
template <ComputeScalar T, StorageScalar S>
void compose_heads(const TokenMapShape& shape, const Weight<S>& base, const T* query,
                   const KeyMaps<T>& keys, T* rows, Index stride, Index count,
                   ComposedHeadsMemory<T>& memory) {
  // Whole blocks of lanes, whatever the count: a number's bits do not depend on where it stands.
  constexpr Index lanes = ComposedHeadsMemory<T>::lanes;
  using Lanes = Eigen::Array<T, lanes, 1>;
  using Block = Eigen::Map<Lanes, Eigen::AlignedMax>;
  using Keys = Eigen::Map<const Lanes>;
  const Index heads = shape.heads, rank = shape.rank;
  const auto from = [&](Index head) { return Block(memory.block.data() + head * lanes); };
  const auto inner = [&](Index r) { return Block(memory.inner.data() + r * lanes); };
  for (Index first = 0; first < count; first += lanes) {
    const Index size = std::min(lanes, count - first);
    const auto block_keys = keys.from(first);
    for (Index head = 0; head < heads; ++head) {
      T* const block = from(head).data();
      std::fill(std::copy_n(rows + head * stride + first, size, block), block + lanes, T(0));
    }
    for (Index r = 0; r < rank; ++r) {
      auto of_query = inner(r), of_keys = inner(rank + r);
      of_query.setZero();
      of_keys.setZero();
      for (Index head = 0; head < heads; ++head) {
        of_query += from(head) * query[r * heads + head];
        of_keys += from(head) * Keys(block_keys.row(head, r));
      }
    }
    for (Index head = 0; head < heads; ++head) {
      Lanes to;
      if (base.empty()) {
        to = from(head);
      } else {
        to.setZero();
        for (Index m = 0; m < heads; ++m) to += from(m) * convert<T>(base(m, head));
      }
      to += from(head) * (Keys(block_keys.row(head, 2 * rank)) + query[2 * rank * heads + head]);
      for (Index r = 0; r < rank; ++r) {
        to += inner(r) * query[(rank + r) * heads + head];
        to += inner(rank + r) * Keys(block_keys.row(head, rank + r));
      }
      std::copy_n(to.data(), size, rows + head * stride + first);
    }
  }
}

/// The core for one sequence: softmax(compose(scale · q·kᵀ)), composed again, times V, over the keys
/// that the mask lets a query see; what a query does not see is not read. Logits and values are
/// multiplied in `T`, however the keys are stored. Operands are those of `causal_attention`; keys may
/// be wider than queries.
template <ComputeScalar T, StorageScalar S, class C>
struct ComposedHeads {
  const HeadsView<T>& query;
  const HeadsView<const C>& key;
  const HeadsView<const C>& value;
  std::span<const Position> query_positions;
  std::span<const Position> key_positions;
  const CausalAttentionOptions& options;
  const HeadsView<T>& out;

  TokenMapShape shape;
  const Weight<S>& base_before;
  const Weight<S>& base_after;
  const T* query_maps;  ///< `[tokens, 2, 2 * rank + 1, heads]`
  const T* key_maps;    ///< `[heads, 2, 2 * rank + 1, keys]`, and `lanes` numbers behind

  /// Attends with one token. Precondition: `memory` has room for rows of `capacity` keys, at least as
  /// many as there are.
  void attend(Index token, Index capacity, ComposedHeadsMemory<T>& memory) const {
    list_visible_runs(options.mask, part(query_positions, token, 1), key_positions,
                      Visibility::some, 1, memory.runs);
    T* const rows = memory.rows.data();
    // The keys that are seen stand side by side in the rows.
    const Index seen = for_each_run(memory, [&](Index first, Index count, Index column) {
      for (Index group = 0; group < query.groups; ++group) {
        const auto keys = key.group_matrix(group).block(first, 0, count, query.head_dim);
        multiply(query_rows(token, group), keys.transposed(),
                 rows + group * query.group_size * capacity + column, capacity, false,
                 memory.product);
      }
    });
    const auto row = [&](Index head) {
      return Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(rows + head * capacity, seen);
    };
    for (Index head = 0; head < shape.heads; ++head) row(head) *= static_cast<T>(options.scale);
    compose(token, 0, base_before, capacity, memory);
    for (Index head = 0; head < shape.heads && seen > 0; ++head) {
      SoftmaxState<T> softmax;
      softmax.update(row(head));
      row(head) *= softmax.normalizer();
    }
    compose(token, 1, base_after, capacity, memory);

    for_each_head(out.slice(token, 1),
                  [&](Index, T* head) { std::fill_n(head, out.head_dim, T(0)); });
    for_each_run(memory, [&](Index first, Index count, Index column) {
      for (Index group = 0; group < query.groups; ++group) {
        const T* const weights = rows + group * query.group_size * capacity + column;
        multiply(row_major_view(weights, query.group_size, count, capacity),
                 value.group_matrix(group).block(first, 0, count, value.head_dim),
                 out.head(token, group, 0), out.head_stride, true, memory.product);
      }
    });
  }

 private:
  MatrixView<T> query_rows(Index token, Index group) const {
    return row_major_view(static_cast<const T*>(query.head(token, group, 0)), query.group_size,
                          query.head_dim, query.head_stride);
  }

  /// Calls `body(first_key, count, column)` for each run of visible keys; returns how many there are.
  template <class Body>
  static Index for_each_run(const ComposedHeadsMemory<T>& memory, Body&& body) {
    Index column = 0;
    for (const auto& run : memory.runs) {
      body(run.step, run.step_end - run.step, column);
      column += run.step_end - run.step;
    }
    return column;
  }

  /// The composition before (0) or after (1) the softmax.
  void compose(Index token, Index side, const Weight<S>& base, Index capacity,
               ComposedHeadsMemory<T>& memory) const {
    const Index map_rows = shape.rows();
    const KeyMaps<T> maps{key_maps + side * map_rows * key.tokens, shape.channels() * key.tokens,
                          key.tokens};
    for_each_run(memory, [&](Index first, Index count, Index column) {
      compose_heads(shape, base, query_maps + token * shape.width() + side * map_rows * shape.heads,
                    maps.from(first), memory.rows.data() + column, capacity, count, memory);
    });
  }
};

}  // namespace vha::detail
