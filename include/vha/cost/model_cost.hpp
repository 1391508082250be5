// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/cost/bytes.hpp>
#include <vha/cost/flops.hpp>
#include <vha/cost/layer_kinds.hpp>
#include <vha/cost/layer_sizes.hpp>

// Costs of a model of equal layers, each attention and a SwiGLU MLP. Embedding, LM head, norms and
// biases are not counted. FLOPs are those of the matrix products, for one token.

namespace vha {

/// Three projections of `width` channels, or as many experts of them behind a router.
struct MlpSizes {
  Index hidden = 0;
  Index width = 0;           ///< of one expert; 0: the layer has no MLP
  Index experts = 1;         ///< 1: dense
  Index active_experts = 1;  ///< that one token uses

  constexpr Index router_weights() const { return experts > 1 ? hidden * experts : 0; }
  constexpr Index expert_weights() const { return 3 * hidden * width; }
};

constexpr Index weight_count(const MlpSizes& mlp) {
  return mlp.router_weights() + mlp.experts * mlp.expert_weights();
}

constexpr Index mlp_flops(const MlpSizes& mlp, Index tokens) {
  return product_flops(tokens, mlp.router_weights() + mlp.active_experts * mlp.expert_weights(), 1);
}

/// The weights that a step of `tokens` tokens reads: of the experts at most all, and no more than when
/// no two tokens share one.
constexpr Index weights_read(const MlpSizes& mlp, Index tokens) {
  const Index most = mlp.experts / mlp.active_experts;  // tokens beyond which there are no others
  const Index read = tokens > most ? mlp.experts : tokens * mlp.active_experts;
  return mlp.router_weights() + read * mlp.expert_weights();
}

/// The form in which a layer does each of its tasks.
struct LayerForms {
  LayerForm training = LayerForm::folded;
  LayerForm prefill = LayerForm::folded;
  LayerForm decode = LayerForm::folded;
};

/// Of GQA, MHA and MQA, which have no maps.
inline constexpr LayerForms without_maps = {};
/// Of VHA and MFA: trained with their maps, served without.
inline constexpr LayerForms folded_to_serve = {.training = LayerForm::unfolded};
/// Of MLA and GVA: training and prefill make the keys, and decode attends to what is cached.
inline constexpr LayerForms folded_to_decode = {.training = LayerForm::unfolded,
                                                .prefill = LayerForm::unfolded};
/// Of VHA and MFA where they are run as they are trained.
inline constexpr LayerForms never_folded = {
    .training = LayerForm::unfolded, .prefill = LayerForm::unfolded, .decode = LayerForm::unfolded};
/// Of VHA with its Premix apart in prefill alone, as `serve_unfolded_prefill` serves it.
inline constexpr LayerForms premix_apart_in_prefill = {.training = LayerForm::unfolded,
                                                       .prefill = LayerForm::unfolded_premix};

/// `Attention` is LayerSizes, MlaSizes, MfaSizes or GvaSizes.
template <class Attention>
struct ModelSizes {
  Index layers = 0;
  Attention attention;
  MlpSizes mlp;
  LayerForms forms;
};

/// Heads n of the MHA whose attention has as many weights as the GQA layer:
/// `4·h·n·d = 2·h·query_heads·d + 2·h·kv_heads·d`.
/// Precondition: query_heads + kv_heads is even.
constexpr Index matched_mha_heads(Index query_heads, Index kv_heads) {
  return (query_heads + kv_heads) / 2;
}

/// Weights of all layers, of attention in the given form.
template <class Attention>
constexpr Index weight_count(const ModelSizes<Attention>& model, LayerForm form) {
  return model.layers * (weight_count(model.attention, form) + weight_count(model.mlp));
}

/// Bytes of keys and values of one token in all layers.
template <class Attention>
constexpr Index cache_bytes_per_token(const ModelSizes<Attention>& model, Index element_bytes) {
  return model.layers * cache_bytes_per_token(model.attention, element_bytes);
}

template <class Attention>
constexpr Index forward_flops(const ModelSizes<Attention>& model, LayerForm form, TokenPairs work) {
  return model.layers *
         (layer_flops(model.attention, form, work).total() + mlp_flops(model.mlp, work.tokens));
}

/// Of one of `tokens` tokens, which counts all `tokens` keys, not half of them for causality: the
/// papers' convention.
template <class Attention>
constexpr Index prefill_flops_per_token(const ModelSizes<Attention>& model, Index tokens) {
  return forward_flops(model, model.forms.prefill, {.tokens = 1, .pairs = tokens});
}

/// Three times the forward's, which counts all `tokens` keys: the backward pass counts as two forwards,
/// without what an implementation computes again.
template <class Attention>
constexpr Index training_flops_per_token(const ModelSizes<Attention>& model, Index tokens) {
  return 3 * forward_flops(model, model.forms.training, {.tokens = 1, .pairs = tokens});
}

/// Of one new token of one sequence, behind `cached` ones.
template <class Attention>
constexpr Index decode_flops_per_token(const ModelSizes<Attention>& model, Index cached) {
  return forward_flops(model, model.forms.decode,
                       {.tokens = 1, .pairs = visible_tokens(model.attention, cached) + 1});
}

}  // namespace vha
