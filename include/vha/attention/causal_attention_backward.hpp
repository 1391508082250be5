// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>
#include <vha/attention/causal_attention.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/matrix_product.hpp>

namespace vha {

namespace detail {

/// One thread's buffers.
template <ComputeScalar T>
struct BackwardMemory {
  ProductWorkspace<T> product;
  Buffer<T> query, upstream, query_gradient, row_dots, weights, logit_gradients;
};

}  // namespace detail

/// The threads and the buffers of `causal_attention_backward`.
template <ComputeScalar T>
struct CausalAttentionBackwardWorkspace {
  Executor executor;
  std::vector<detail::BackwardMemory<T>> thread_memory;
  Buffer<T> partial_gradients;
};

namespace detail {

/// The core's backward pass for one call. Blocks of queries are dealt out to a fixed number of shares,
/// each of which sums the gradients of keys and values by itself; the shares are then added in their
/// order. So the result does not depend on the threads.
template <ComputeScalar T>
class CausalAttentionBackward {
 public:
  const HeadsView<const T>& query;
  const HeadsView<const T>& key;
  const HeadsView<const T>& value;
  const HeadsView<const T>& out;
  const HeadsView<const T>& softmax;
  const HeadsView<const T>& upstream;
  std::span<const Position> query_positions;
  std::span<const Position> key_positions;
  const CausalAttentionOptions& options;
  const HeadsView<T>& query_gradient;
  const HeadsView<T>& key_gradient;
  const HeadsView<T>& value_gradient;
  CausalAttentionBackwardWorkspace<T>& workspace;

  void run() const {
    if (query.tokens == 0 || query.groups == 0 || key.tokens == 0) return;
    const Executor executor = workspace.executor.for_work_of(
        query.tokens * query.groups * query.group_size * key.tokens * key.head_dim);
    const auto threads = static_cast<std::size_t>(executor.threads());
    if (workspace.thread_memory.size() < threads) workspace.thread_memory.resize(threads);
    const Index blocks = pieces(query.tokens, block_tokens());
    const Index shares = std::min(blocks, most_shares);
    const Index share_size = key.tokens * (key.head_dim + value.head_dim);
    T* const partial = workspace.partial_gradients.reserve(query.groups * shares * share_size);
    executor.for_each(query.groups * shares, [&](Index task, Index thread) {
      const Index group = task % query.groups, share = task / query.groups;
      T* const keys = partial + (group * shares + share) * share_size;
      std::fill_n(keys, share_size, T(0));
      for (Index block = share; block < blocks; block += shares) {
        run_block(group, block * block_tokens(), keys, keys + key.tokens * key.head_dim,
                  workspace.thread_memory[static_cast<std::size_t>(thread)]);
      }
    });
    executor.for_each(query.groups * pieces(key.tokens, key_block), [&](Index task, Index) {
      const Index group = task % query.groups, first = task / query.groups * key_block;
      for (Index share = 0; share < shares; ++share) {
        const T* const keys = partial + (group * shares + share) * share_size;
        add_share(group, first, keys, key_gradient);
        add_share(group, first, keys + key.tokens * key.head_dim, value_gradient);
      }
    });
  }

 private:
  static constexpr Index most_shares = 8;
  static constexpr Index rows_per_block = 256;
  static constexpr Index key_block = 128;
  using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;

  Index block_tokens() const { return std::max<Index>(1, rows_per_block / query.group_size); }

  /// Copies the heads of one group, `[tokens * group_size, head_dim]`.
  static void gather(const HeadsView<const T>& heads, Index group, Index first, Index tokens,
                     T* target) {
    for (Index token = first; token < first + tokens; ++token) {
      for (Index member = 0; member < heads.group_size; ++member) {
        target = std::copy_n(heads.head(token, group, member), heads.head_dim, target);
      }
    }
  }

  void run_block(Index group, Index first, T* all_key_gradients, T* all_value_gradients,
                 BackwardMemory<T>& memory) const {
    const Index tokens = std::min(block_tokens(), query.tokens - first);
    const Index rows = tokens * query.group_size;
    const Index head_dim = key.head_dim, value_dim = value.head_dim;
    T* const q = memory.query.reserve(rows * head_dim);
    T* const dout = memory.upstream.reserve(rows * value_dim);
    T* const dq = memory.query_gradient.reserve(rows * head_dim);
    T* const dots = memory.row_dots.reserve(rows);
    T* const weights = memory.weights.reserve(rows * key_block);
    T* const dlogits = memory.logit_gradients.reserve(rows * key_block);
    gather(query, group, first, tokens, q);
    gather(upstream, group, first, tokens, dout);
    std::fill_n(dq, rows * head_dim, T(0));
    for (Index row = 0; row < rows; ++row) {
      using ConstRow = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;
      const T* const head = out.head(first + row / query.group_size, group, row % query.group_size);
      dots[row] = (ConstRow(head, value_dim) * Row(dout + row * value_dim, value_dim)).sum();
    }
    const auto q_rows = row_major_view(static_cast<const T*>(q), rows, head_dim, head_dim);
    const auto dout_rows = row_major_view(static_cast<const T*>(dout), rows, value_dim, value_dim);
    const auto positions = part(query_positions, first, tokens);
    const auto range = PositionRange::of(positions);
    for (Index k = 0; k < key.tokens; k += key_block) {
      const Index keys = std::min(key_block, key.tokens - k);
      const auto block_positions = part(key_positions, k, keys);
      const auto visibility = options.mask.visibility(range, PositionRange::of(block_positions));
      if (visibility == Visibility::none) continue;
      const auto key_rows = key.group_matrix(group).block(k, 0, keys, head_dim);
      const auto value_rows = value.group_matrix(group).block(k, 0, keys, value_dim);
      multiply(q_rows, key_rows.transposed(), weights, keys, false, memory.product);
      multiply(dout_rows, value_rows.transposed(), dlogits, keys, false, memory.product);
      for (Index row = 0; row < rows; ++row) {
        const Index token = row / query.group_size;
        const T* const state = softmax.head(first + token, group, row % query.group_size);
        differentiate(Row(weights + row * keys, keys), Row(dlogits + row * keys, keys), state,
                      dots[row]);
        if (visibility == Visibility::all) continue;
        for (Index j = 0; j < keys; ++j) {
          if (options.mask.visible(positions[static_cast<std::size_t>(token)],
                                   block_positions[static_cast<std::size_t>(j)])) {
            continue;
          }
          weights[row * keys + j] = dlogits[row * keys + j] = T(0);
        }
      }
      const auto weight_rows = row_major_view(static_cast<const T*>(weights), rows, keys, keys);
      const auto dlogit_rows = row_major_view(static_cast<const T*>(dlogits), rows, keys, keys);
      multiply(dlogit_rows, key_rows, dq, head_dim, true, memory.product);
      multiply(dlogit_rows.transposed(), q_rows, all_key_gradients + k * head_dim, head_dim, true,
               memory.product);
      multiply(weight_rows.transposed(), dout_rows, all_value_gradients + k * value_dim, value_dim,
               true, memory.product);
    }
    for (Index row = 0; row < rows; ++row) {
      Row(query_gradient.head(first + row / query.group_size, group, row % query.group_size),
          head_dim) += Row(dq + row * head_dim, head_dim);
    }
  }

  /// Turns a row's products q·k into its softmax weights p, and the gradients of the weights into those
  /// of the products: p · (dp - Σ p·dp) · scale, where Σ p·dp is `dot`.
  void differentiate(Row products, Row gradients, const T* state, T dot) const {
    const T largest = state[0], sum = state[1];
    const T scale = static_cast<T>(options.scale);
    if (sum == T(0)) {  // saw no key
      products.setZero();
      gradients.setZero();
      return;
    }
    products = (products * scale - largest).exp() / sum;
    gradients = products * (gradients - dot) * scale;
  }

  void add_share(Index group, Index first, const T* share, const HeadsView<T>& gradient) const {
    const Index end = std::min(key.tokens, first + key_block);
    for (Index token = first; token < end; ++token) {
      const T* const from = share + token * gradient.head_dim;
      T* const to = gradient.head(token, group, 0);
      for (Index c = 0; c < gradient.head_dim; ++c) to[c] += from[c];
    }
  }
};

}  // namespace detail

/// The gradients of `causal_attention` for `upstream`, that of its result, added to `query_gradient`,
/// `key_gradient` and `value_gradient`. With p the softmax's weights, o the result and do its gradient
/// (Dao et al., FlashAttention, arXiv 2205.14135, appendix B.2),
///
///     dv_t = Σ_s p_st·do_s,   ds_st = scale · p_st · (do_s·v_t - do_s·o_s),
///     dq_s = Σ_t ds_st·k_t,   dk_t = Σ_s ds_st·q_s
///
/// | operand | shape |
/// |---|---|
/// | query, query_gradient | `[tokens, kv_heads, group_size, head_dim]` |
/// | key, key_gradient | `[keys, kv_heads, 1, head_dim]` |
/// | value, value_gradient | `[keys, kv_heads, 1, value_dim]` |
/// | out, upstream | `[tokens, kv_heads, group_size, value_dim]` |
/// | softmax | `[tokens, kv_heads, group_size, 2]`, as the forward gave it |
///
/// The weights are made again block by block, so that memory grows with the tokens and not with their
/// square. A query that saw no key, and a key that no query saw, add zeros. The result is the same to
/// the last bit on any number of threads. Precondition: the shapes fit and nothing overlaps; options,
/// positions and operands are those of the forward.
template <ComputeScalar T>
void causal_attention_backward(
    const HeadsView<const T>& query, const HeadsView<const T>& key, const HeadsView<const T>& value,
    const HeadsView<const T>& out, const HeadsView<const T>& softmax,
    const HeadsView<const T>& upstream, std::span<const Position> query_positions,
    std::span<const Position> key_positions, const CausalAttentionOptions& options,
    const HeadsView<T>& query_gradient, const HeadsView<T>& key_gradient,
    const HeadsView<T>& value_gradient, CausalAttentionBackwardWorkspace<T>& workspace) {
  detail::CausalAttentionBackward<T>{query,           key,
                                     value,           out,
                                     softmax,         upstream,
                                     query_positions, key_positions,
                                     options,         query_gradient,
                                     key_gradient,    value_gradient,
                                     workspace}
      .run();
}

}  // namespace vha
