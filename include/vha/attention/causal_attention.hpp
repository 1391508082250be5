// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/matrix_product.hpp>
#include <vha/ops/softmax_state.hpp>

namespace vha {

/// What the core computes besides its operands.
struct CausalAttentionOptions {
  double scale = 1;      ///< factor of the logits, as a rule 1 / √head_dim
  CausalMask mask = {};  ///< which keys a query sees
};

/// Queries [query, query_end) and keys [key, key_end) that they all see.
struct VisibleRectangle {
  Index query;
  Index query_end;
  Index key;
  Index key_end;
};

/// The buffers of `causal_attention`.
template <ComputeScalar T>
struct CausalAttentionWorkspace {
  Executor executor;
  ProductWorkspace<T> product;
  Buffer<T> query;
  Buffer<T> logits;
  Buffer<T> accumulated;
  std::vector<SoftmaxState<T>> states;
  std::vector<VisibleRectangle> rectangles;
};

namespace detail {

/// The queries of one K/V head's group, a block of tokens at a time, against all keys.
///
/// A rectangle of queries and keys that see each other whole is a pair of matrix products; a
/// rectangle that the mask cuts is split until its parts are whole or hidden. So no hidden key or
/// value, were it NaN, touches a result, and a query's result is the same to the last bit whatever
/// other queries are in the block.
///
///     query tokens
///       |  # # # # . . .
///       |  # # # # # . .
///       |  # # # # # # .
///       v  # # # # # # #
///          keys ->
template <int HeadDim, int GroupSize, ComputeScalar T, class K, class V>
class QueryBlock {
 public:
  QueryBlock(std::span<const Position> query_positions, std::span<const Position> key_positions,
             const HeadsView<const K>& keys, const HeadsView<const V>& values, Index group,
             Index group_size, const CausalMask& mask, CausalAttentionWorkspace<T>& workspace)
      : query_positions_(query_positions),
        key_positions_(key_positions),
        keys_(keys.group_matrix(group)),
        values_(values.group_matrix(group)),
        group_(group),
        group_size_(group_size),
        mask_(mask),
        workspace_(workspace) {
    const Index rows = static_cast<Index>(query_positions.size()) * this->group_size();
    query_ = workspace.query.reserve(rows * head_dim());
    logits_ = workspace.logits.reserve(rows * key_block);
    accumulated_ = workspace.accumulated.reserve(rows * values_.cols);
    std::fill_n(accumulated_, rows * values_.cols, T(0));
    workspace.states.assign(static_cast<std::size_t>(rows), SoftmaxState<T>{});
  }

  /// Copies the block's queries, times `scale`, as rows `[tokens * group_size, head_dim]`.
  template <class Q>
  void load_queries(const HeadsView<const Q>& query, T scale) {
    T* target = query_;
    for_each_token_head([&](Index token, Index member) {
      const Q* const head = query.head(token, group_, member);
      for (Index c = 0; c < head_dim(); ++c) *target++ = scale * convert<T>(head[c]);
    });
  }

  void attend() {
    const auto queries = static_cast<Index>(query_positions_.size());
    const auto keys = static_cast<Index>(key_positions_.size());
    for (Index key = 0; key < keys; key += key_block) {
      auto& rectangles = workspace_.rectangles;
      rectangles.clear();
      split({0, queries, key, std::min(keys, key + key_block)});
      if (rectangles.empty()) continue;
      std::fill_n(logits_, queries * group_size() * key_block, SoftmaxState<T>::hidden);
      for (const auto& rectangle : rectangles) compute_logits(rectangle, key);
      update_states();
      for (const auto& rectangle : rectangles) accumulate_values(rectangle, key);
    }
  }

  template <class O>
  void store(const HeadsView<O>& out) const {
    const T* source = accumulated_;
    std::size_t row = 0;
    for_each_token_head([&](Index token, Index member) {
      const T normalizer = workspace_.states[row++].normalizer();
      O* const head = out.head(token, group_, member);
      for (Index c = 0; c < values_.cols; ++c) head[c] = convert<O>(*source++ * normalizer);
    });
  }

 private:
  static constexpr Index key_block = 256;

  Index head_dim() const { return HeadDim == Eigen::Dynamic ? keys_.cols : HeadDim; }
  Index group_size() const { return GroupSize == Eigen::Dynamic ? group_size_ : GroupSize; }

  template <class Body>
  void for_each_token_head(Body&& body) const {
    for (Index token = 0; token < static_cast<Index>(query_positions_.size()); ++token) {
      for (Index member = 0; member < group_size(); ++member) body(token, member);
    }
  }

  /// Lists the rectangles of `area` that are seen whole, keys from left to right.
  void split(const VisibleRectangle& area) {
    const auto& [query, query_end, key, key_end] = area;
    switch (mask_.visibility(part(query_positions_, query, query_end - query),
                             part(key_positions_, key, key_end - key))) {
      case Visibility::none:
        return;
      case Visibility::all:
        return workspace_.rectangles.push_back(area);
      case Visibility::some:
        break;
    }
    if (query_end - query >= key_end - key) {
      const Index middle = query + (query_end - query) / 2;
      split({query, middle, key, key_end});
      split({middle, query_end, key, key_end});
    } else {
      const Index middle = key + (key_end - key) / 2;
      split({query, query_end, key, middle});
      split({query, query_end, middle, key_end});
    }
  }

  /// Writes the rectangle's logits to their places in `logits_`, `[rows, key_block]`, whose first
  /// column is `first_key`'s.
  void compute_logits(const VisibleRectangle& rectangle, Index first_key) {
    const auto& [query, query_end, key, key_end] = rectangle;
    const Index row = query * group_size();
    multiply(row_major_view<T>(query_ + row * head_dim(), (query_end - query) * group_size(),
                               head_dim(), head_dim()),
             keys_.block(key, 0, key_end - key, head_dim()).transposed(),
             logits_ + row * key_block + key - first_key, key_block, false, workspace_.product);
  }

  /// Turns the logits into weights, relative to each row's largest so far.
  void update_states() {
    using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
    const Index width = values_.cols;
    for (Index row = 0; row < static_cast<Index>(workspace_.states.size()); ++row) {
      auto& state = workspace_.states[static_cast<std::size_t>(row)];
      const T factor = state.update(Row(logits_ + row * key_block, key_block));
      if (factor != T(1)) Row(accumulated_ + row * width, width) *= factor;
    }
  }

  /// Adds the rectangle's values, weighted.
  void accumulate_values(const VisibleRectangle& rectangle, Index first_key) {
    const auto& [query, query_end, key, key_end] = rectangle;
    const Index row = query * group_size();
    const Index width = values_.cols;
    multiply(row_major_view<T>(logits_ + row * key_block + key - first_key,
                               (query_end - query) * group_size(), key_end - key, key_block),
             values_.block(key, 0, key_end - key, width), accumulated_ + row * width, width, true,
             workspace_.product);
  }

  std::span<const Position> query_positions_;
  std::span<const Position> key_positions_;
  MatrixView<K> keys_;
  MatrixView<V> values_;
  Index group_;
  Index group_size_;
  CausalMask mask_;
  CausalAttentionWorkspace<T>& workspace_;
  T* query_;
  T* logits_;
  T* accumulated_;
};

}  // namespace detail

/// The attention core, the only one in the library: for each query head,
///
///     out = softmax(scale · q·kᵀ) · V     over the keys that the mask lets the query see,
///
/// with an online softmax (FlashAttention, arXiv 2205.14135), for one sequence.
///
/// | operand | shape |
/// |---|---|
/// | query | `[tokens, kv_heads, group_size, head_dim]` |
/// | key | `[keys, kv_heads, 1, head_dim]` |
/// | value | `[keys, kv_heads, 1, value_dim]` |
/// | query_positions, key_positions | `[tokens]`, `[keys]` |
/// | out | `[tokens, kv_heads, group_size, value_dim]` |
///
/// Query and key counts may differ, positions may come in any order. A query that sees no key gives
/// zeros; a logit below half the lowest number of `T` counts as unseen. Operands and result may be of
/// any storage scalars; the arithmetic is in `T`. `HeadDim` and `GroupSize` may be given where they
/// are known. Precondition: the shapes fit, HeadDim and GroupSize too; `out` does not overlap the
/// operands.
template <int HeadDim = Eigen::Dynamic, int GroupSize = Eigen::Dynamic, ComputeScalar T, class Q,
          class K, class V, class O>
void causal_attention(const HeadsView<const Q>& query, const HeadsView<const K>& key,
                      const HeadsView<const V>& value, std::span<const Position> query_positions,
                      std::span<const Position> key_positions,
                      const CausalAttentionOptions& options, const HeadsView<O>& out,
                      CausalAttentionWorkspace<T>& workspace) {
  static constexpr Index rows_per_block = 512;
  const Index tokens_per_block = std::max<Index>(1, rows_per_block / query.group_size);
  for (Index group = 0; group < query.groups; ++group) {
    for (Index first = 0; first < query.tokens; first += tokens_per_block) {
      const Index tokens = std::min(query.tokens - first, tokens_per_block);
      detail::QueryBlock<HeadDim, GroupSize, T, K, V> block(
          part(query_positions, first, tokens), key_positions, key, value, group, query.group_size,
          options.mask, workspace);
      block.load_queries(query.slice(first, tokens), static_cast<T>(options.scale));
      block.attend();
      block.store(out.slice(first, tokens));
    }
  }
}

}  // namespace vha
