// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <numeric>
#include <span>
#include <type_traits>
#include <vector>
#include <vha/attention/causal_attention.hpp>
#include <vha/attention/token_layout.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/config.hpp>
#include <vha/core/executor.hpp>

namespace vha {

/// How the rows of a batch are attended to.
struct BatchedAttentionOptions {
  double scale = 0;        ///< of the logits; 0: 1 / √head_dim
  Index window = 0;        ///< 0: none
  TokenLayout query = {};  ///< padding and positions of the queries
  TokenLayout key = {};    ///< padding and positions of the keys and values
};

/// The attention core on a batch of tensors, row-major:
///
/// | operand | shape |
/// |---|---|
/// | query | `[batch, tokens, query_heads, head_dim]` |
/// | key | `[batch, keys, kv_heads, head_dim]` |
/// | value | `[batch, keys, kv_heads, value_dim]` |
/// | result | `[batch, tokens, query_heads, value_dim]`, of the queries' scalar |
///
/// Query head `j` reads K/V head `j / (query_heads / kv_heads)`. Without positions, a row's keys
/// stand at 0, 1, … and its queries are the last of them: 2 queries against 5 keys stand at 3
/// and 4. Throws Error where shapes do not fit, where only one side has positions, or where more
/// queries than keys have none.
template <int HeadDim = Eigen::Dynamic, int GroupSize = Eigen::Dynamic, class Query, class Key,
          class Value>
auto causal_attention(
    const Query& query, const Key& key, const Value& value,
    const BatchedAttentionOptions& options = {},
    const Executor& executor = {}) requires(detail::EigenTensor<Query>&& detail::EigenTensor<Key>&&
                                                detail::EigenTensor<Value>) {
  using Element = std::remove_const_t<typename Query::Scalar>;
  using T = Compute<Element>;
  const Index batch = query.dimension(0), tokens = query.dimension(1), heads = query.dimension(2);
  const Index keys = key.dimension(1), kv_heads = key.dimension(2), head_dim = key.dimension(3);
  if (kv_heads <= 0 || heads <= 0 || heads % kv_heads != 0) {
    raise("query.dimension(2)", text("a positive multiple of kv_heads = ", kv_heads), text(heads));
  }
  require_size("query.dimension(3) (head_dim)", head_dim, query.dimension(3));
  require_size("key.dimension(0) (batch)", batch, key.dimension(0));
  for (const std::size_t axis : {0U, 1U, 2U}) {
    require_size(text("value.dimension(", axis, ")"), key.dimension(axis), value.dimension(axis));
  }
  static_assert(
      sizeof(typename Key::Scalar) <= sizeof(T) && sizeof(typename Value::Scalar) <= sizeof(T),
      "vha::causal_attention: keys or values are wider than the queries' arithmetic");
  require_positive("query.dimension(3) (head_dim)", head_dim);
  if (options.window < 0) raise("window", "0 (none) or more", text(options.window));
  if (!is_finite(options.scale) || options.scale < 0) {
    raise("scale", "0 (1 / sqrt(head_dim)) or a positive number", text(options.scale));
  }
  const Index group_size = heads / kv_heads;
  if (HeadDim != Eigen::Dynamic) require_size("head_dim (of the call)", HeadDim, head_dim);
  if (GroupSize != Eigen::Dynamic) {
    require_size("query_heads / kv_heads (of the call)", GroupSize, group_size);
  }
  options.query.validate(batch, tokens);
  options.key.validate(batch, keys);
  if (options.query.positions.empty() != options.key.positions.empty()) {
    raise("positions", "of both queries and keys, or of neither", "of one");
  }
  const double scale = options.scale != 0 ? options.scale : softmax_scale(head_dim);

  Tensor4<Element> out(batch, tokens, heads, value.dimension(3));
  out.setZero();
  using Products =
      ProductsOf<T, typename Query::Scalar, typename Key::Scalar, typename Value::Scalar>;
  CausalAttentionWorkspace<Products> workspace;
  workspace.executor = executor;
  std::vector<Position> counted(static_cast<std::size_t>(keys));
  std::iota(counted.begin(), counted.end(), Position(0));
  for (Index row = 0; row < batch; ++row) {
    const Index row_tokens = options.query.length(row, tokens);
    const Index row_keys = options.key.length(row, keys);
    auto query_positions = options.query.row_positions(row, tokens);
    auto key_positions = options.key.row_positions(row, keys);
    if (options.query.positions.empty()) {
      if (row_tokens > row_keys) {
        raise("query",
              text("at most as many tokens as keys, ", row_keys,
                   ", where no positions are "
                   "given"),
              text(row_tokens));
      }
      key_positions = std::span<const Position>(counted).first(static_cast<std::size_t>(row_keys));
      query_positions = key_positions.last(static_cast<std::size_t>(row_tokens));
    }
    const auto row_of = [&](auto view, const TokenLayout& layout, Index row_length) {
      using Channel = std::remove_pointer_t<decltype(view.data)>;
      const HeadsView<const Channel> heads_of_row = view.slice(
          row * row_length + layout.first(row, row_length), layout.length(row, row_length));
      return heads_of_row;
    };
    causal_attention<HeadDim, GroupSize>(
        row_of(heads_view(query, group_size), options.query, tokens),
        row_of(heads_view(key), options.key, keys), row_of(heads_view(value), options.key, keys),
        query_positions, key_positions, {scale, {options.window}},
        heads_view(out, group_size)
            .slice(row * tokens + options.query.first(row, tokens), row_tokens),
        workspace);
  }
  return out;
}

}  // namespace vha
