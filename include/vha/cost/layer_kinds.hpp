// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/cost/bytes.hpp>
#include <vha/cost/flops.hpp>
#include <vha/cost/layer_sizes.hpp>

// Costs of the layers that VHA is held against, counted as `LayerSizes`' are: weights of projections
// and maps, two FLOPs for each multiply-add of the matrix products, the cache's elements. MHA, GQA and
// MQA are `LayerSizes` of other `kv_heads`. All attend to the whole context; none has a window.

namespace vha {

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with its query projected in full, as in
/// DeepSeek-V2-Lite. The cache holds the latent and one rotated key for all heads. Unfolded, the keys
/// `[content_dim]` and values `[value_dim]` of each head are made from the latent; folded ("absorbed"),
/// the same up-projections are applied to the query and to the attended latent, and every head attends
/// to the latent itself. Both forms have the same weights.
struct MlaSizes {
  Index hidden = 0;
  Index query_heads = 0;
  Index content_dim = 0;  ///< of the content part of queries and keys, without rope_dim
  Index value_dim = 0;    ///< of a head
  Index latent_dim = 0;   ///< 512 in the paper
  Index rope_dim = 0;     ///< of the rotated part of queries and of the shared key; 64 in the paper

  constexpr Index query_width() const { return query_heads * (content_dim + rope_dim); }
  constexpr Index value_width() const { return query_heads * value_dim; }
  constexpr Index cache_width() const { return latent_dim + rope_dim; }
  /// Multiply-adds of a pair, of scores and values.
  constexpr Index pair_width(LayerForm form) const {
    if (form == LayerForm::folded) return query_heads * (2 * latent_dim + rope_dim);
    return query_width() + value_width();
  }
  constexpr Index query_weights(LayerForm) const { return hidden * query_width(); }
  constexpr Index key_value_weights(LayerForm) const {
    return hidden * cache_width() + latent_dim * query_heads * (content_dim + value_dim);
  }
};

/// Multi-matrix factorisation attention (arXiv 2412.19255): one K/V head as wide as each query head. A
/// query head is a factor `[hidden, head_dim]`, shared by all heads, times a map of its own
/// `[head_dim, head_dim]`. Folded, each head has the product `[hidden, head_dim]` and the layer is MQA,
/// which has more weights; a norm after the factor, as Step-3 has it, blocks that fold.
struct MfaSizes {
  Index hidden = 0;
  Index query_heads = 0;
  Index head_dim = 0;  ///< of queries, keys and values, C

  constexpr Index query_width() const { return query_heads * head_dim; }
  constexpr Index value_width() const { return query_width(); }
  constexpr Index cache_width() const { return 2 * head_dim; }
  constexpr Index pair_width(LayerForm) const { return query_width() + value_width(); }
  constexpr Index query_weights(LayerForm form) const {
    if (form == LayerForm::folded) return hidden * query_width();
    return hidden * head_dim + query_width() * head_dim;
  }
  constexpr Index key_value_weights(LayerForm) const { return 2 * hidden * head_dim; }
};

/// Grouped value attention (arXiv 2609.13285). The cache holds the values of `kv_heads` groups and one
/// rotated key for all heads, which adds to the scores as MLA's does. A query head's content keys are
/// its group's values times a map of the head's own, `[value_dim, content_dim]`. Unfolded, they are
/// made; folded ("absorbed"), the map is applied to the query instead, and every head attends to the
/// values themselves. Both forms have the same weights.
struct GvaSizes {
  Index hidden = 0;
  Index query_heads = 0;
  Index value_dim = 0;    ///< of the cached values
  Index content_dim = 0;  ///< of the content part of queries and keys, without rope_dim
  Index kv_heads = 0;
  Index rope_dim =
      0;  ///< of the rotated part of queries and of the shared key; 16 or 24 in the paper

  constexpr Index query_width() const { return query_heads * (content_dim + rope_dim); }
  constexpr Index value_width() const { return query_heads * value_dim; }
  constexpr Index cache_width() const { return kv_heads * value_dim + rope_dim; }
  /// Multiply-adds of a pair, of scores and values.
  constexpr Index pair_width(LayerForm form) const {
    if (form == LayerForm::folded) return query_heads * (2 * value_dim + rope_dim);
    return query_width() + value_width();
  }
  constexpr Index query_weights(LayerForm) const { return hidden * query_width(); }
  constexpr Index key_value_weights(LayerForm) const {
    return hidden * cache_width() + value_width() * content_dim;
  }
};

/// Dynamically composable heads (DCMHA, arXiv 2405.08553) with the identity for a base. A token has four
/// maps between heads, of low rank and with a gate: as a query and as a key, before and after the
/// softmax. A net makes each; the cache holds a key's two. Nothing folds: both forms are the layer.
struct DynamicHeadsSizes {
  Index hidden = 0;
  Index head_dim = 0;
  Index query_heads = 0;
  Index kv_heads = 0;
  Index rank = 0;         ///< of a map; 2 in the authors' code
  Index dynamic_dim = 0;  ///< hidden channels of a net; 4 * query_heads in the authors' code

  constexpr Index value_width() const { return query_heads * head_dim; }
  constexpr Index cache_width() const {
    return 2 * kv_heads * head_dim + 2 * (2 * rank + 1) * query_heads;
  }
  /// Multiply-adds of a pair, of scores, values and both compositions.
  constexpr Index pair_width(LayerForm) const {
    return 2 * value_width() + 2 * (4 * rank + 1) * query_heads;
  }
  /// Weights of the two nets that a token has as a query, or as a key.
  constexpr Index map_weights() const {
    return 2 * (hidden * (dynamic_dim + query_heads) + dynamic_dim * 2 * rank * query_heads);
  }
  constexpr Index query_weights(LayerForm) const { return hidden * value_width() + map_weights(); }
  constexpr Index key_value_weights(LayerForm) const {
    return 2 * hidden * kv_heads * head_dim + map_weights();
  }
};

/// The sizes of a layer in which each weight is multiplied once for each token.
template <class Sizes>
concept LayerKind = requires(const Sizes& sizes, LayerForm form) {
  sizes.value_width();
  sizes.cache_width();
  sizes.pair_width(form);
  sizes.query_weights(form);
  sizes.key_value_weights(form);
};

/// Elements of what makes the queries of the input: of MFA with its maps, of MLA and GVA without what
/// makes keys of the cached.
template <LayerKind Sizes>
constexpr Index query_weight_count(const Sizes& sizes, LayerForm form) {
  return sizes.query_weights(form);
}

template <LayerKind Sizes>
constexpr Index weight_count(const Sizes& sizes, LayerForm form) {
  return sizes.query_weights(form) + sizes.key_value_weights(form) +
         sizes.value_width() * sizes.hidden;
}

template <LayerKind Sizes>
constexpr Index cache_bytes_per_token(const Sizes& sizes, Index element_bytes) {
  return sizes.cache_width() * element_bytes;
}

template <LayerKind Sizes>
constexpr Index visible_tokens(const Sizes&, Index cached) {
  return cached;
}

/// Of a forward of `work.tokens` new tokens that counts `work.pairs` pairs, for one sequence. The maps
/// count with the projection that they belong to.
template <LayerKind Sizes>
constexpr LayerFlops layer_flops(const Sizes& sizes, LayerForm form, TokenPairs work) {
  return {.query = product_flops(work.tokens, sizes.query_weights(form), 1),
          .key_value = product_flops(work.tokens, sizes.key_value_weights(form), 1),
          .core = product_flops(work.pairs, sizes.pair_width(form), 1),
          .output = product_flops(work.tokens, sizes.value_width(), sizes.hidden)};
}

}  // namespace vha
