// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>
#include <vha/core/config.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/linear.hpp>

namespace vha {

/// What a layer is that caches latents in place of keys and values, apart from its weights.
struct LatentConfig {
  Index hidden = 0;       ///< channels of the model
  Index query_heads = 0;  ///< heads that attend
  Index kv_heads = 1;     ///< latents of a token; divides query_heads
  Index latent_dim = 0;   ///< channels of a latent
  Index content_dim = 0;  ///< channels of a query and key that have no position
  Index value_dim = 0;    ///< channels of a value
  Index rope_dim = 0;     ///< channels of a query and of the token's one key that RoPE turns; even
  double rope_theta = 10000;
  double rms_norm_eps = 1e-6;  ///< of the norm of the latents, where the layer has one
  Index window = 0;            ///< a query sees this many newest positions; 0: all before it

  /// Query heads that read one latent. Precondition: kv_heads > 0.
  constexpr Index group_size() const { return query_heads / kv_heads; }
  /// Channels of a head's query as it is projected, content before RoPE.
  constexpr Index query_dim() const { return content_dim + rope_dim; }
  /// Channels of all latents of a token.
  constexpr Index latent_width() const { return kv_heads * latent_dim; }
  /// Channels of a token in the cache: its latents, then its rotated key.
  constexpr Index cache_width() const { return latent_width() + rope_dim; }
  constexpr Index value_width() const { return query_heads * value_dim; }
  double softmax_scale() const { return vha::softmax_scale(query_dim()); }

  /// Throws Error naming the first field that cannot be in a layer that computes in `T`.
  template <ComputeScalar T>
  void validate_for() const {
    require_positive("latent_dim", latent_dim);
    require_positive("content_dim", content_dim);
    require_positive("value_dim", value_dim);
    if (rope_dim <= 0 || rope_dim % 2 != 0) {
      raise("rope_dim", "an even number of 2 or more (it must be even)", text(rope_dim));
    }
    AttentionConfig{.hidden = hidden,
                    .head_dim = rope_dim,
                    .query_heads = query_heads,
                    .kv_heads = kv_heads,
                    .rope_theta = rope_theta,
                    .rms_norm_eps = rms_norm_eps,
                    .window = window}
        .validate_for<T>();
    checked_product("query_heads * query_dim", {query_heads, content_dim, 2, rope_dim, sizeof(T)});
    checked_product("query_heads * value_dim", {query_heads, value_dim, sizeof(T)});
    checked_product("query_heads * cache_width",
                    {query_heads, kv_heads, latent_dim, 2, rope_dim, sizeof(T)});
  }
};

/// The trained weights of a LatentAttention.
///
/// | weight      | shape |
/// |-------------|-------|
/// | query       | `[hidden, query_heads * (content_dim + rope_dim)]` |
/// | latent      | `[hidden, kv_heads * latent_dim + rope_dim]`, the latents before the key |
/// | latent_norm | `[1, latent_dim]`, or absent |
/// | key_maps    | query_heads times `[latent_dim, content_dim]` |
/// | value_maps  | query_heads times `[latent_dim, value_dim]`; none where latents are values |
/// | output      | `[query_heads * value_dim, hidden]` |
template <StorageScalar S>
struct LatentWeights {
  Linear<S> query;
  Linear<S> latent;
  Weight<S> latent_norm = {};
  std::vector<Weight<S>> key_maps;
  std::vector<Weight<S>> value_maps = {};
  Linear<S> output;

  /// Throws Error naming the first weight that does not fit `config`, and both shapes.
  void validate(const LatentConfig& config, bool maps_values) const {
    query.require_shape("query", config.hidden, config.query_heads * config.query_dim());
    latent.require_shape("latent", config.hidden, config.cache_width());
    output.require_shape("output", config.value_width(), config.hidden);
    if (!latent_norm.empty()) require_vector("latent_norm", latent_norm, config.latent_dim);
    require_maps("key_maps", key_maps, config.query_heads, config.latent_dim, config.content_dim);
    if (maps_values) {
      require_maps("value_maps", value_maps, config.query_heads, config.latent_dim,
                   config.value_dim);
    } else {
      require_size("value_dim (the latents are the values)", config.latent_dim, config.value_dim);
      require_size("value_maps.size() (the latents are the values)", 0,
                   static_cast<Index>(value_maps.size()));
    }
  }

  /// The weights stored as `T`, each element rounded once.
  template <StorageScalar T>
  LatentWeights<T> cast() const {
    LatentWeights<T> result{
        query.template cast<T>(), latent.template cast<T>(), latent_norm.template cast<T>(), {}, {},
        output.template cast<T>()};
    for (const auto& map : key_maps) result.key_maps.push_back(map.template cast<T>());
    for (const auto& map : value_maps) result.value_maps.push_back(map.template cast<T>());
    return result;
  }

 private:
  static void require_maps(std::string_view name, const std::vector<Weight<S>>& maps, Index heads,
                           Index rows, Index cols) {
    require_size(text(name, ".size() (one map for each of query_heads)"), heads,
                 static_cast<Index>(maps.size()));
    for (Index head = 0; head < heads; ++head) {
      require_shape(text(name, "[", head, "]"), maps[static_cast<std::size_t>(head)], rows, cols);
    }
  }
};

}  // namespace vha
