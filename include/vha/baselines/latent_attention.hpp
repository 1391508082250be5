// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>
#include <utility>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/causal_attention.hpp>
#include <vha/attention/kv_cache.hpp>
#include <vha/attention/layer_forward.hpp>
#include <vha/attention/no_trace.hpp>
#include <vha/attention/workspace.hpp>
#include <vha/baselines/latent_weights.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/lanes.hpp>
#include <vha/ops/rms_norm.hpp>
#include <vha/ops/rope.hpp>

namespace vha {

/// How a layer attends to the latents in its cache.
enum class LatentForm {
  plain,    ///< to the keys and values that each head makes of them, as it is trained
  absorbed  ///< to the latents themselves: the maps go onto the queries and the attended latents
};

/// The memory of a LatentAttention's forward.
template <ComputeScalar T>
struct LatentWorkspace : AttentionWorkspace<T> {
  Buffer<T> core_query;  ///< queries as the core takes them
  Buffer<T> core_heads;  ///< what the core gives, where maps follow
};

/// An attention layer that caches, for each token, its latents and one rotated key for all heads, with
/// "decoupled" RoPE: a head's logits are those of its content and of its position together,
///
///     C_g = norm(X·W_C)_g          the latents, kv_heads of them
///     R   = rope(X·W_R)            the key of all heads
///     q_j = [content_j | rope(position_j)] = X·W_Q
///     k_j = [C_g·K_j | R],  v_j = C_g·V_j,   g = j / group_size
///     y   = heads_j(softmax(q_j·k_jᵀ / √(content_dim + rope_dim))·v_j)·W_O
///
/// by one core, in one of two forms. The plain one makes every head's keys and values of the cached
/// latents, as a training does. The absorbed one uses that q·(C·K)ᵀ = (q·Kᵀ)·Cᵀ and that
/// p·(C·V) = (p·C)·V: all heads attend to the latents, which are read once for all of them. Both have
/// the same weights and the same cache, and either goes on in a cache that the other filled.
///
/// Used by the names MlaAttention and GvaAttention. `MapsValues`: each head has a V_j; without, the
/// latents are the values. Immutable, as Attention is.
template <StorageScalar S, bool MapsValues, LatentForm Form>
class LatentAttention : public LayerForward<LatentAttention<S, MapsValues, Form>, S,
                                            LatentWorkspace<Compute<S>>, NoTrace> {
 public:
  using T = Compute<S>;
  using Weights = LatentWeights<S>;
  using Workspace = LatentWorkspace<T>;

  /// Throws Error where the configuration cannot be or a weight does not fit it.
  LatentAttention(const LatentConfig& config, Weights weights)
      : config_((config.validate_for<T>(), config)),
        weights_((weights.validate(config, MapsValues), std::move(weights))),
        rope_(config.rope_theta, config.rope_dim) {}
  // Without moves of its own: a layer that was moved from stays what it was.
  LatentAttention(const LatentAttention&) = default;
  LatentAttention& operator=(const LatentAttention&) = default;

  const LatentConfig& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  Index hidden() const { return config_.hidden; }
  /// One head: a token's latents and its rotated key; the latents are what values are made of.
  KvCacheShape cache_shape(Index batch, Index capacity) const {
    return {.batch = batch,
            .kv_heads = 1,
            .head_dim = config_.cache_width(),
            .value_dim = config_.latent_width(),
            .capacity = capacity,
            .values_in_keys = true};
  }

  /// The layer with its weights stored as `To`, each element rounded once.
  template <StorageScalar To>
  LatentAttention<To, MapsValues, Form> cast() const {
    return {config_, weights_.template cast<To>()};
  }

 private:
  using Base = LayerForward<LatentAttention, S, LatentWorkspace<T>, NoTrace>;
  friend Base;

  template <Operand P, class C>
  void cache_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                   std::span<const Position> positions, KvCache<C>& cache, Workspace& workspace,
                   NoTrace*) const {
    const Index width = config_.cache_width();
    T* const cached = workspace.key.reserve(x.rows * width);
    weights_.latent(x, cached, width, workspace.template of<P>().product);
    HeadsView<T> latents =
        token_major_heads(cached, x.rows, config_.kv_heads, 1, config_.latent_dim);
    HeadsView<T> keys =
        token_major_heads(cached + config_.latent_width(), x.rows, 1, 1, config_.rope_dim);
    latents.token_stride = keys.token_stride = width;
    workspace.for_each_slice(x.rows, [&](Index first, Index count, Buffer<T>& scratch) {
      if (!weights_.latent_norm.empty()) {
        RmsNorm<S>{weights_.latent_norm, config_.rms_norm_eps}(latents.slice(first, count),
                                                               scratch);
      }
      rope_(keys.slice(first, count), part(positions, first, count), scratch);
    });
    const HeadsView<const T> rows = token_major_heads(cached, x.rows, 1, 1, width);
    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      const auto row_tokens = rows.slice(first, count);
      cache.template write<T>(row, tokens[static_cast<std::size_t>(first)].offset, row_tokens,
                              row_tokens, part(positions, first, count));
    });
  }

  template <Operand P, class C>
  const T* attend_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                        std::span<const Position> positions, KvCache<C>& cache,
                        Workspace& workspace, NoTrace*) const {
    auto& product = workspace.template of<P>().product;
    const auto query = token_major_heads(
        workspace.query.reserve(x.rows * config_.query_heads * config_.query_dim()), x.rows,
        config_.kv_heads, config_.group_size(), config_.query_dim());
    weights_.query(x, query.data, query.token_stride, product);
    workspace.for_each_slice(x.rows, [&](Index first, Index count, Buffer<T>& scratch) {
      auto turned = query.slice(first, count);
      turned.data += config_.content_dim;
      turned.head_dim = config_.rope_dim;
      rope_(turned, part(positions, first, count), scratch);
    });

    const auto heads =
        token_major_heads(workspace.heads.reserve(x.rows * config_.value_width()), x.rows,
                          config_.kv_heads, config_.group_size(), config_.value_dim);
    if constexpr (Form == LatentForm::plain) {
      attend_to_heads<P>(query, tokens, positions, cache, heads, workspace);
    } else {
      attend_to_latents<P>(query, tokens, positions, cache, heads, workspace);
    }
    T* const y = workspace.y.reserve(x.rows * config_.hidden);
    weights_.output(row_major_view(static_cast<const T*>(heads.data), x.rows, config_.value_width(),
                                   config_.value_width()),
                    y, config_.hidden, product);
    return y;
  }

  /// Calls `body(head, group, member)` for every query head.
  template <class Body>
  void for_each_query_head(Body&& body) const {
    for (Index head = 0; head < config_.query_heads; ++head) {
      body(head, head / config_.group_size(), head % config_.group_size());
    }
  }

  /// The plain form.
  template <Operand P, class C>
  void attend_to_heads(const HeadsView<T>& query, detail::BatchTokens tokens,
                       std::span<const Position> positions, const KvCache<C>& cache,
                       const HeadsView<T>& heads, Workspace& workspace) const {
    auto& memory = workspace.template of<P>();
    // Each head has keys and values of its own: as many groups as heads.
    const auto one_each = [](HeadsView<T> grouped) {
      return HeadsView<T>{.data = grouped.data,
                          .tokens = grouped.tokens,
                          .groups = grouped.groups * grouped.group_size,
                          .head_dim = grouped.head_dim,
                          .token_stride = grouped.token_stride,
                          .group_stride = grouped.head_stride};
    };
    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      const Index uncommitted = tokens[static_cast<std::size_t>(first)].row_tokens;
      const auto cached = cache.keys(row, uncommitted).group_matrix(0);
      const auto key = token_major_heads(
          workspace.key.reserve(cached.rows * config_.query_heads * config_.query_dim()),
          cached.rows, config_.query_heads, 1, config_.query_dim());
      const auto value =
          token_major_heads(workspace.value.reserve(cached.rows * config_.value_width()),
                            cached.rows, config_.query_heads, 1, config_.value_dim);
      for_each_query_head([&](Index head, Index group, Index) {
        const auto at = static_cast<std::size_t>(head);
        const auto latents =
            cached.block(0, group * config_.latent_dim, cached.rows, config_.latent_dim);
        multiply(latents, weights_.key_maps[at].view(), key.head(0, head, 0), key.token_stride,
                 false, memory.product);
        if constexpr (MapsValues) {
          multiply(latents, weights_.value_maps[at].view(), value.head(0, head, 0),
                   value.token_stride, false, memory.product);
        }
        for (Index token = 0; token < cached.rows; ++token) {
          T* const rotated = key.head(token, head, 0) + config_.content_dim;
          for (Index c = 0; c < config_.rope_dim; ++c) {
            rotated[c] = convert<T>(cached(token, config_.latent_width() + c));
          }
          if constexpr (!MapsValues) {
            T* const own_value = value.head(token, head, 0);
            for (Index c = 0; c < config_.value_dim; ++c) {
              own_value[c] = convert<T>(latents(token, c));
            }
          }
        }
      });
      causal_attention<Eigen::Dynamic, 1>(
          HeadsView<const T>(one_each(query.slice(first, count))), HeadsView<const T>(key),
          HeadsView<const T>(value), part(positions, first, count),
          cache.positions(row, uncommitted), {config_.softmax_scale(), {config_.window}},
          one_each(heads.slice(first, count)), workspace.template of<T>().core);
    });
  }

  /// The absorbed form. Where there are several latents, the query of a head has its content in the
  /// place of its own latent and zeros in the others', so that one view of the cache serves all.
  template <Operand P, class C>
  void attend_to_latents(const HeadsView<T>& query, detail::BatchTokens tokens,
                         std::span<const Position> positions, const KvCache<C>& cache,
                         const HeadsView<T>& heads, Workspace& workspace) const {
    auto& product = workspace.template of<P>().product;
    const Index latent_dim = config_.latent_dim;
    const Index size = query.tokens * config_.query_heads * config_.cache_width();
    const auto absorbed =
        token_major_heads(workspace.core_query.reserve(size), query.tokens, config_.kv_heads,
                          config_.group_size(), config_.cache_width());
    if (config_.kv_heads > 1) std::fill_n(absorbed.data, size, T(0));
    for_each_query_head([&](Index head, Index group, Index member) {
      const auto content = row_major_view(static_cast<const T*>(query.head(0, group, member)),
                                          query.tokens, config_.content_dim, query.token_stride);
      multiply(content, weights_.key_maps[static_cast<std::size_t>(head)].view().transposed(),
               absorbed.head(0, group, member) + group * latent_dim, absorbed.token_stride, false,
               product);
      for (Index token = 0; token < query.tokens; ++token) {
        std::copy_n(query.head(token, group, member) + config_.content_dim, config_.rope_dim,
                    absorbed.head(token, group, member) + config_.latent_width());
      }
    });

    HeadsView<T> attended = heads;
    if constexpr (MapsValues) {
      attended = token_major_heads(
          workspace.core_heads.reserve(query.tokens * config_.query_heads * latent_dim),
          query.tokens, config_.kv_heads, config_.group_size(), latent_dim);
    }
    detail::for_each_row(tokens, [&](Index row, Index first, Index count) {
      const Index uncommitted = tokens[static_cast<std::size_t>(first)].row_tokens;
      auto key = cache.keys(row, uncommitted), value = cache.values(row, uncommitted);
      key.groups = value.groups = config_.kv_heads;
      key.group_stride = 0;
      value.group_stride = value.head_dim = latent_dim;
      causal_attention(HeadsView<const T>(absorbed.slice(first, count)), key, value,
                       part(positions, first, count), cache.positions(row, uncommitted),
                       {config_.softmax_scale(), {config_.window}}, attended.slice(first, count),
                       workspace.template of<ProductsOf<T, C, P>>().core);
    });
    if constexpr (MapsValues) {
      for_each_query_head([&](Index head, Index group, Index member) {
        const auto rows = row_major_view(static_cast<const T*>(attended.head(0, group, member)),
                                         query.tokens, latent_dim, attended.token_stride);
        multiply(rows, weights_.value_maps[static_cast<std::size_t>(head)].view(),
                 heads.head(0, group, member), heads.token_stride, false, product);
      });
    }
  }

  LatentConfig config_;
  Weights weights_;
  Rope<T> rope_;
};

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eqs. 9 to 19), with one latent for all
/// heads and the queries projected in full, as in DeepSeek-V2-Lite. RoPE turns pairs half of `rope_dim`
/// apart, as everywhere here: weights of DeepSeek's own, for pairs side by side, need these columns of
/// `query` and `latent` put into that order.
template <StorageScalar S>
using MlaAttention = LatentAttention<S, true, LatentForm::plain>;

/// Grouped value attention (arXiv 2609.13285): the latents are the values of `kv_heads` groups, and the
/// content keys are linear maps of the values, one for each query head. `value_dim` is `latent_dim`. In the
/// absorbed form, scores take kv_heads · latent_dim + rope_dim multiply-adds for each pair.
template <StorageScalar S>
using GvaAttention = LatentAttention<S, false, LatentForm::plain>;

/// The layer that attends to the cached latents themselves. It computes what `layer` does, with the same
/// weights, which both share, and the same cache.
template <StorageScalar S, bool MapsValues, LatentForm Form>
auto absorb(const LatentAttention<S, MapsValues, Form>& layer) {
  static_assert(Form == LatentForm::plain,
                "vha::absorb: the layer is in its absorbed form already; serve it as it is");
  return LatentAttention<S, MapsValues, LatentForm::absorbed>(layer.config(), layer.weights());
}

/// Does not compile: there is nothing to fold.
template <class To = void, StorageScalar S, bool MapsValues, LatentForm Form>
void fold_vha(const LatentAttention<S, MapsValues, Form>&, const Executor& = {}) {
  static_assert(!std::same_as<S, S>,
                "vha::fold_vha: a layer that caches latents is served with the weights that it is "
                "trained with; take its form for serving by vha::absorb");
}

}  // namespace vha
