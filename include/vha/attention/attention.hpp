// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <utility>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/causal_attention.hpp>
#include <vha/attention/kv_cache.hpp>
#include <vha/attention/layer_forward.hpp>
#include <vha/attention/norm_and_rope.hpp>
#include <vha/attention/token_layout.hpp>
#include <vha/attention/trace.hpp>
#include <vha/attention/weights.hpp>
#include <vha/attention/workspace.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/config.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/rope.hpp>

namespace vha {

/// An attention layer: projections, Premix, QK-norm, RoPE, the core, Postmix, gate, output
/// projection, each where its type or its weights have it.
///
///     x -> query -> Premix -> norm -> RoPE -> |      |
///     x -> key ------------> norm -> RoPE -> | core | -> Postmix -> gate -> output
///     x -> value ---------------------------> |      |
///
/// Used by the names VhaAttention and GqaAttention. Immutable: one layer serves any number of
/// threads, each with its own workspace. A copy shares the weights.
template <StorageScalar S, class PremixPart, class PostmixPart, class GatePart,
          int HeadDim = Eigen::Dynamic, int GroupSize = Eigen::Dynamic>
class Attention
    : public LayerForward<Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>, S,
                          AttentionWorkspace<Compute<S>>, AttentionTrace<Compute<S>>> {
 public:
  using T = Compute<S>;
  using Weights = AttentionWeights<S, PremixPart, PostmixPart, GatePart>;
  using Workspace = AttentionWorkspace<T>;
  static constexpr int head_dim_at_compile_time = HeadDim;
  static constexpr int group_size_at_compile_time = GroupSize;
  static_assert(HeadDim == Eigen::Dynamic || (HeadDim > 0 && HeadDim % 2 == 0),
                "vha::Attention: HeadDim must be even and positive, or Eigen::Dynamic");
  static_assert(GroupSize == Eigen::Dynamic || GroupSize > 0,
                "vha::Attention: GroupSize must be positive, or Eigen::Dynamic");

  /// Throws Error where the configuration cannot be or a weight does not fit it.
  Attention(const AttentionConfig& config, Weights weights)
      : config_(validated(config)),
        weights_((weights.validate(config), std::move(weights))),
        rope_(config.rope_theta, config.rotated_channels()) {}
  // Without moves of its own: a layer that was moved from stays what it was.
  Attention(const Attention&) = default;
  Attention& operator=(const Attention&) = default;

  const AttentionConfig& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  Index hidden() const { return config_.hidden; }
  KvCacheShape cache_shape(Index batch, Index capacity) const {
    return KvCacheShape::of(config_, batch, capacity);
  }

  /// A layer of the same sizes with other weights.
  template <StorageScalar To, class NewPremix, class NewPostmix, class NewGate>
  static auto with(const AttentionConfig& config,
                   AttentionWeights<To, NewPremix, NewPostmix, NewGate> weights) {
    return Attention<To, NewPremix, NewPostmix, NewGate, HeadDim, GroupSize>(config,
                                                                             std::move(weights));
  }

  /// The layer with its weights stored as `To`, each element rounded once.
  template <StorageScalar To>
  auto cast() const {
    return with(config_, weights_.template cast<To>());
  }

 private:
  static const AttentionConfig& validated(const AttentionConfig& config) {
    config.validate_for<T>();
    if (HeadDim != Eigen::Dynamic) require_size("head_dim (of the type)", HeadDim, config.head_dim);
    if (GroupSize != Eigen::Dynamic) {
      require_size("query_heads / kv_heads (of the type)", GroupSize, config.group_size());
    }
    return config;
  }

 public:
  // The steps that LayerForward is made of, also for a layer that is made of this one. They check
  // nothing: see LayerForward.

  /// Writes the block's keys and values behind the ends of the cache's sequences.
  template <Operand P, class C>
  void cache_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                   std::span<const Position> positions, KvCache<C>& cache, Workspace& workspace,
                   AttentionTrace<T>* trace) const {
    const Index width = config_.kv_width();
    T* const key = workspace.key.reserve(x.rows * width);
    T* const value = workspace.value.reserve(x.rows * width);
    auto& product = workspace.template of<P>().product;
    weights_.key(x, key, width, product);
    weights_.value(x, value, width, product);
    const auto keys = token_major_heads(key, x.rows, config_.kv_heads, 1, config_.head_dim);
    const auto values = token_major_heads(value, x.rows, config_.kv_heads, 1, config_.head_dim);
    detail::norm_and_rope(weights_.k_norm, config_.rms_norm_eps, rope_, keys, positions, workspace);
    if (config_.value_scale != 1) {
      const T scale = static_cast<T>(config_.value_scale);
      for (Index k = 0; k < x.rows * width; ++k) value[k] *= scale;
    }
    record(trace, &AttentionTrace<T>::k_rotated, keys, tokens);
    record(trace, &AttentionTrace<T>::v, values, tokens);
    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      cache.template write<T>(row, tokens[static_cast<std::size_t>(first)].offset,
                              keys.slice(first, count), values.slice(first, count),
                              part(positions, first, count));
    });
  }

  /// The block's outputs, `[tokens, hidden]`, in `workspace`.
  template <Operand P, class C>
  T* attend_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                  std::span<const Position> positions, KvCache<C>& cache, Workspace& workspace,
                  AttentionTrace<T>* trace) const {
    auto& product = workspace.template of<P>().product;
    const auto query = project_query<P>(x, tokens, workspace, trace);
    detail::norm_and_rope(weights_.q_norm, config_.rms_norm_eps, rope_, query, positions,
                          workspace);
    record(trace, &AttentionTrace<T>::q_rotated, query, tokens);

    const Index width = config_.query_width();
    T* const mixed = workspace.heads.reserve(x.rows * width);
    const auto heads =
        token_major_heads(mixed, x.rows, config_.kv_heads, config_.group_size(), config_.head_dim);
    const Index saved = trace == nullptr ? 0 : 2 * config_.query_heads;
    const auto softmax = token_major_heads(workspace.softmax.reserve(x.rows * saved), x.rows,
                                           config_.kv_heads, config_.group_size(), 2);
    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      const Index uncommitted = tokens[static_cast<std::size_t>(first)].row_tokens;
      // The keys are multiplied as they are stored, in the layer's products or in wider ones.
      using CoreProducts = ProductsOf<T, C, P>;
      causal_attention<HeadDim, GroupSize>(
          HeadsView<const T>(query.slice(first, count)), cache.keys(row, uncommitted),
          cache.values(row, uncommitted), part(positions, first, count),
          cache.positions(row, uncommitted), {config_.softmax_scale(), {config_.window}},
          heads.slice(first, count), workspace.template of<CoreProducts>().core,
          trace == nullptr ? HeadsView<T>{} : softmax.slice(first, count));
    });
    record(trace, &AttentionTrace<T>::softmax, softmax, tokens);
    record(trace, &AttentionTrace<T>::heads, heads, tokens);

    if constexpr (Weights::has_postmix) weights_.postmix.mix(heads, workspace);
    record(trace, &AttentionTrace<T>::heads_mixed, heads, tokens);
    if constexpr (Weights::has_gate) {
      weights_.gate(x, mixed, workspace.gate.reserve(x.rows * width), product);
    }
    T* const y = workspace.y.reserve(x.rows * config_.hidden);
    weights_.output(row_major_view(static_cast<const T*>(mixed), x.rows, width, width), y,
                    config_.hidden, product);
    return y;
  }

 private:
  /// The virtual query heads before norm and RoPE.
  template <Operand P>
  HeadsView<T> project_query(const MatrixView<T>& x, detail::BatchTokens tokens,
                             Workspace& workspace, AttentionTrace<T>* trace) const {
    auto& product = workspace.template of<P>().product;
    T* const query = workspace.query.reserve(x.rows * config_.query_width());
    HeadsView<T> heads;
    if constexpr (Weights::has_premix) {
      const Index physical_heads = weights_.premix.physical_heads(config_);
      const Index physical_head_dim = weights_.premix.physical_head_dim();
      const Index physical_width = physical_heads * physical_head_dim;
      T* const physical = workspace.physical.reserve(x.rows * physical_width);
      weights_.query(x, physical, physical_width, product);
      record(trace, &AttentionTrace<T>::q_physical,
             token_major_heads(physical, x.rows, 1, physical_heads, physical_head_dim), tokens);
      heads = weights_.premix.virtual_heads(query, x.rows, config_);
      weights_.premix(static_cast<const T*>(physical), heads, product);
    } else {
      heads = token_major_heads(query, x.rows, config_.kv_heads, config_.group_size(),
                                config_.head_dim);
      weights_.query(x, query, config_.query_width(), product);
    }
    record(trace, &AttentionTrace<T>::q_virtual, heads, tokens);
    return heads;
  }

  static void record(AttentionTrace<T>* trace, Tensor4<T> AttentionTrace<T>::*step,
                     const HeadsView<T>& heads, detail::BatchTokens tokens) {
    if (trace != nullptr) detail::record_heads(trace->*step, heads, tokens);
  }

  AttentionConfig config_;
  Weights weights_;
  Rope<T> rope_;
};

/// A Virtual Head Attention layer as it is trained (arXiv 2610.17959): Premix on the
/// queries, Postmix on the outputs of the heads.
template <StorageScalar S, class GatePart = NoGate, Activation PremixActivation = Identity,
          Activation PostmixActivation = Identity, int HeadDim = Eigen::Dynamic,
          int GroupSize = Eigen::Dynamic>
using VhaAttention = Attention<S, Premix<S, PremixActivation>, Postmix<S, PostmixActivation>,
                               GatePart, HeadDim, GroupSize>;

/// A grouped-query attention layer, what is served. `kv_heads == query_heads` makes it multi-head
/// attention, `kv_heads == 1` multi-query attention.
template <StorageScalar S, class GatePart = NoGate, int HeadDim = Eigen::Dynamic,
          int GroupSize = Eigen::Dynamic>
using GqaAttention = Attention<S, NoPremix, NoPostmix, GatePart, HeadDim, GroupSize>;

}  // namespace vha
