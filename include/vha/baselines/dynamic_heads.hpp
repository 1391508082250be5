// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/kv_cache.hpp>
#include <vha/attention/layer_forward.hpp>
#include <vha/attention/no_trace.hpp>
#include <vha/attention/norm_and_rope.hpp>
#include <vha/attention/workspace.hpp>
#include <vha/baselines/composed_heads.hpp>
#include <vha/baselines/dynamic_head_weights.hpp>
#include <vha/core/config.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/activation.hpp>
#include <vha/ops/lanes.hpp>
#include <vha/ops/rms_norm.hpp>
#include <vha/ops/rope.hpp>

namespace vha {

/// The memory of a DynamicHeadsAttention's forward.
template <ComputeScalar T>
struct DynamicHeadsWorkspace : AttentionWorkspace<T> {
  Buffer<T> dynamic;     ///< hidden activations of the nets that make maps
  Buffer<T> token_maps;  ///< what they make of a block's tokens
  Buffer<T> cached;      ///< keys as the cache takes them
  Buffer<T> key_maps;    ///< the cached keys' maps, keys side by side
  std::vector<detail::ComposedHeadsMemory<T>> thread_memory;
};

/// Dynamically composable multi-head attention (DCMHA, arXiv 2405.08553): heads exchange their logits,
/// and after the softmax their weights, by maps that the two tokens of a pair make,
///
///     A_j = compose(q_j·kᵀ / √head_dim),   P = compose'(softmax(A)),   y = heads_j(P_j·v)·W_O
///
///     compose(A)[s, t] = A[s, t]·(W_b + M(x_s) + M'(x_t)),   A[s, t] [1, query_heads]
///     M(x) = Σ_r w1_rᵀ·w2_r + diag(tanh(x·W_g)),   r < rank,   w1_r, w2_r [1, query_heads]
///     [w1 | w2] = GELU(x·W_1)·W_2,   then w1_r / √(mean(w1_r²) + rms_norm_eps)
///
/// with a base W_b and nets of its own, one for the query's token s and one for the key's t, in each of
/// the two compositions: the paper's Compose as its authors' code has it (github.com/Caiyun-AI/DCFormer,
/// pytorch/dcformer/modeling_dcformer.py), which makes the maps of the layer's input, divides the
/// logits by √head_dim before they are composed, and hides keys between composition and softmax: a key
/// that is not seen has no part in either. Here:
///
/// - W_b is given whole, where the code has it without the identity;
/// - the norms of w1 and of queries and keys have one eps, where the code has 1e-6 in both;
/// - K/V heads may be fewer than query heads: each composed head attends to the values of its group;
/// - biases, a partial RoPE and a scale of the values are those of GqaAttention;
/// - the cache holds a key's factors and gates, 2 · (2 · rank + 1) numbers for each query head behind
///   the channels of the key, where the code has two matrices [query_heads, query_heads].
///
/// Made for comparison: forward alone. Threads share queries, so that decode of one sequence takes one;
/// each has memory for query_heads rows as long as the cache. No map is a constant, so nothing folds.
/// Immutable, as Attention is.
template <StorageScalar S>
class DynamicHeadsAttention
    : public LayerForward<DynamicHeadsAttention<S>, S, DynamicHeadsWorkspace<Compute<S>>, NoTrace> {
 public:
  using T = Compute<S>;
  using Weights = DynamicHeadsWeights<S>;
  using Workspace = DynamicHeadsWorkspace<T>;

  /// Throws Error where the configuration cannot be or a weight does not fit it.
  DynamicHeadsAttention(const AttentionConfig& config, Weights weights)
      : config_((config.validate_for<T>(), config)),
        weights_((weights.validate(config), std::move(weights))),
        shape_{config.query_heads, weights_.rank(config)},
        rope_(config.rope_theta, config.rotated_channels()),
        factor_norm_{Weight<S>::own(RowMajorMatrix<S>::Constant(1, config.query_heads, S(1))),
                     config.rms_norm_eps} {}
  // Without moves of its own: a layer that was moved from stays what it was.
  DynamicHeadsAttention(const DynamicHeadsAttention&) = default;
  DynamicHeadsAttention& operator=(const DynamicHeadsAttention&) = default;

  const AttentionConfig& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  Index hidden() const { return config_.hidden; }
  Index rank() const { return shape_.rank; }
  /// A key's head has, behind its own channels, the maps' numbers for the query heads that read it.
  KvCacheShape cache_shape(Index batch, Index capacity) const {
    return {.batch = batch,
            .kv_heads = config_.kv_heads,
            .head_dim = config_.head_dim + map_channels(),
            .value_dim = config_.head_dim,
            .capacity = capacity};
  }

  /// The layer with its weights stored as `To`, each element rounded once.
  template <StorageScalar To>
  DynamicHeadsAttention<To> cast() const {
    return {config_, weights_.template cast<To>()};
  }

 private:
  using Base = LayerForward<DynamicHeadsAttention, S, DynamicHeadsWorkspace<T>, NoTrace>;
  friend Base;
  using Map = DynamicMapWeights<S> HeadCompositionWeights<S>::*;

  /// Channels of a cached key behind its own.
  Index map_channels() const { return config_.group_size() * shape_.channels(); }

  template <Operand P, class C>
  void cache_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                   std::span<const Position> positions, KvCache<C>& cache, Workspace& workspace,
                   NoTrace*) const {
    const Index head_dim = config_.head_dim, width = config_.kv_width();
    auto& product = workspace.template of<P>().product;
    T* const key = workspace.key.reserve(x.rows * width);
    T* const value = workspace.value.reserve(x.rows * width);
    weights_.key(x, key, width, product);
    weights_.value(x, value, width, product);
    for (Index k = 0; k < x.rows * width; ++k) value[k] *= static_cast<T>(config_.value_scale);
    const auto keys = token_major_heads(key, x.rows, config_.kv_heads, 1, head_dim);
    detail::norm_and_rope(weights_.k_norm, config_.rms_norm_eps, rope_, keys, positions, workspace);
    const T* const maps = make_maps<P>(x, &HeadCompositionWeights<S>::key, workspace);

    const Index cached_dim = head_dim + map_channels();
    T* const start = workspace.cached.reserve(x.rows * config_.kv_heads * cached_dim);
    const HeadsView<T> cached = token_major_heads(start, x.rows, config_.kv_heads, 1, cached_dim);
    for (Index token = 0; token < x.rows; ++token) {
      for (Index group = 0; group < config_.kv_heads; ++group) {
        T* target = std::copy_n(keys.head(token, group, 0), head_dim, cached.head(token, group, 0));
        // Head by head: a K/V head has the numbers of its own group.
        for (Index member = 0; member < config_.group_size(); ++member) {
          const T* source = maps + token * shape_.width() + group * config_.group_size() + member;
          for (Index c = 0; c < shape_.channels(); ++c) *target++ = source[c * shape_.heads];
        }
      }
    }
    const HeadsView<const T> values =
        token_major_heads(value, x.rows, config_.kv_heads, 1, head_dim);
    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      cache.template write<T>(row, tokens[static_cast<std::size_t>(first)].offset,
                              cached.slice(first, count), values.slice(first, count),
                              part(positions, first, count));
    });
  }

  template <Operand P, class C>
  const T* attend_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                        std::span<const Position> positions, KvCache<C>& cache,
                        Workspace& workspace, NoTrace*) const {
    auto& product = workspace.template of<P>().product;
    const Index width = config_.query_width();
    const auto heads_of = [&](T* data) {
      return token_major_heads(data, x.rows, config_.kv_heads, config_.group_size(),
                               config_.head_dim);
    };
    const auto query = heads_of(workspace.query.reserve(x.rows * width));
    weights_.query(x, query.data, width, product);
    detail::norm_and_rope(weights_.q_norm, config_.rms_norm_eps, rope_, query, positions,
                          workspace);
    const T* const maps = make_maps<P>(x, &HeadCompositionWeights<S>::query, workspace);
    const auto heads = heads_of(workspace.heads.reserve(x.rows * width));

    // For whole caches, so that decode allocates nothing as they fill.
    const Index capacity = cache.capacity();
    auto& thread_memory = workspace.thread_memory;
    const auto threads = static_cast<std::size_t>(workspace.executor.threads());
    if (thread_memory.size() < threads) thread_memory.resize(threads);
    for (auto& memory : thread_memory) memory.reserve(shape_, capacity);
    constexpr Index lanes = detail::ComposedHeadsMemory<T>::lanes;
    workspace.key_maps.reserve(shape_.width() * capacity + lanes);

    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      const Index uncommitted = tokens[static_cast<std::size_t>(first)].row_tokens;
      const auto keys = cache.keys(row, uncommitted), values = cache.values(row, uncommitted);
      const auto row_query = query.slice(first, count), row_heads = heads.slice(first, count);
      const CausalAttentionOptions options{config_.softmax_scale(), {config_.window}};
      const detail::ComposedHeads<T, S, C> core{
          .query = row_query,
          .key = keys,
          .value = values,
          .query_positions = part(positions, first, count),
          .key_positions = cache.positions(row, uncommitted),
          .options = options,
          .out = row_heads,
          .shape = shape_,
          .base_before = weights_.before_softmax.base,
          .base_after = weights_.after_softmax.base,
          .query_maps = maps + first * shape_.width(),
          .key_maps = spread_key_maps(keys, workspace.key_maps.data())};
      const Index pair_work = width + shape_.width();
      workspace.executor.for_work_of(count * keys.tokens * pair_work)
          .for_each(count, [&](Index task, Index thread) {
            // The last queries see the most keys: begun first, they do not end last.
            core.attend(count - 1 - task, capacity,
                        thread_memory[static_cast<std::size_t>(thread)]);
          });
    });
    T* const y = workspace.y.reserve(x.rows * config_.hidden);
    weights_.output(row_major_view(static_cast<const T*>(heads.data), x.rows, width, width), y,
                    config_.hidden, product);
    return y;
  }

  /// The tokens' shares of both compositions, `[tokens, 2, 2 * rank + 1, query_heads]`, on the side of
  /// `map`, in `workspace`.
  template <Operand P>
  const T* make_maps(const MatrixView<T>& x, Map map, Workspace& workspace) const {
    auto& product = workspace.template of<P>().product;
    T* const maps = workspace.token_maps.reserve(x.rows * shape_.width());
    T* target = maps;
    const Index gate_at = 2 * shape_.rank * shape_.heads;
    for (const auto* composition : {&weights_.before_softmax, &weights_.after_softmax}) {
      const DynamicMapWeights<S>& net = composition->*map;
      const Index dynamic_dim = net.dynamic_dim(), width = shape_.width();
      T* const hidden = workspace.dynamic.reserve(x.rows * dynamic_dim);
      multiply(x, net.hidden.view(), hidden, dynamic_dim, false, product);
      workspace.for_each_slice(x.rows, [&](Index first, Index count, Buffer<T>&) {
        T* const start = hidden + first * dynamic_dim;
        std::transform(start, start + count * dynamic_dim, start, Gelu{});
      });
      multiply(row_major_view(static_cast<const T*>(hidden), x.rows, dynamic_dim, dynamic_dim),
               net.factors.view(), target, width, false, product);
      multiply(x, net.gate.view(), target + gate_at, width, false, product);
      auto first_factors = token_major_heads(target, x.rows, 1, shape_.rank, shape_.heads);
      first_factors.token_stride = width;
      workspace.for_each_slice(x.rows, [&](Index first, Index count, Buffer<T>& scratch) {
        factor_norm_(first_factors.slice(first, count), scratch);
        for (Index token = first; token < first + count; ++token) {
          T* const gate = target + token * width + gate_at;
          std::transform(gate, gate + shape_.heads, gate, [](T logit) { return std::tanh(logit); });
        }
      });
      target += shape_.rows() * shape_.heads;
    }
    return maps;
  }

  /// The keys' maps as `[query_heads, 2, 2 * rank + 1, keys]`, with zeros behind for the core to read.
  template <class C>
  const T* spread_key_maps(const HeadsView<const C>& keys, T* target) const {
    const Index size = map_channels() * keys.tokens;
    for (Index group = 0; group < config_.kv_heads; ++group) {
      const auto maps =
          keys.group_matrix(group).block(0, config_.head_dim, keys.tokens, map_channels());
      copy_elements(maps.transposed(), target + group * size);
    }
    std::fill_n(target + config_.kv_heads * size, detail::ComposedHeadsMemory<T>::lanes, T(0));
    return target;
  }

  AttentionConfig config_;
  Weights weights_;
  detail::TokenMapShape shape_;
  Rope<T> rope_;
  RmsNorm<S> factor_norm_;
};

/// Does not compile: there is nothing constant to fold.
template <class To = void, StorageScalar S>
void fold_vha(const DynamicHeadsAttention<S>&, const Executor& = {}) {
  static_assert(
      !std::same_as<S, S>,
      "vha::fold_vha: the maps between this layer's heads are made anew of each pair of "
      "tokens, so no constant matrix can be multiplied into the projections; serve the layer "
      "as it is trained, or train one of constant maps, as vha::VhaAttention");
}

}  // namespace vha
