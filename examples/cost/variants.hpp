// SPDX-License-Identifier: Apache-2.0
// What a model costs with each kind of attention.
#pragma once

#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/cost/communication.hpp>
#include <vha/cost/model_cost.hpp>
#include <vha/cost/roofline.hpp>

#include "shape.hpp"

namespace cost {

/// What is asked about a model.
struct Work {
  Index tokens = 4096;   ///< of a sequence that is trained or prefilled
  Index context = 4096;  ///< cached tokens of each sequence where decode counts
  Index batch = 1;
  Index element_bytes = 2;  ///< of weights and cache
  std::optional<vha::Machine> machine;
  std::optional<Index> ranks;  ///< that run a layer's attention together
};

/// One rank's part of a layer, and the bytes that it exchanges for each token, of activations in float.
struct RankCosts {
  Index cache_bytes_per_token_layer = 0;
  Index weights_served = 0;
  Index exchanged_as_trained = 0;  ///< in a forward
  Index exchanged_as_served = 0;
  std::optional<Index> exchanged_backward = {};  ///< where the library has the backward pass
};

/// One kind of attention's costs. FLOPs are for one token of the whole model.
struct Variant {
  std::string name;
  Index cache_bytes_per_token_layer = 0;
  Index cache_bytes_per_token = 0;
  Index cache_bytes = 0;            ///< of all layers and sequences at the context
  Index query_weights_trained = 0;  ///< of one layer
  Index query_weights_served = 0;
  Index weights_trained = 0;  ///< of all layers
  Index weights_served = 0;
  Index training_flops = 0;
  Index prefill_flops = 0;
  std::optional<Index> prefill_flops_premix_apart = {};
  Index decode_flops = 0;
  vha::DecodeStep step = {};
  Index cache_dominates_from = 0;
  std::optional<double> step_seconds = {};
  std::optional<RankCosts> rank = {};  ///< where the ranks divide the heads
};

template <class Attention>
RankCosts rank_costs(const Attention& attention, const vha::LayerForms& forms, const Work& work) {
  const Index ranks = *work.ranks;
  constexpr auto float_bytes = static_cast<Index>(sizeof(float));
  const auto exchanged = [&](vha::LayerForm form) {
    return vha::exchanged_bytes_per_token(attention, form, ranks, float_bytes);
  };
  const Attention part = vha::rank_sizes(attention, ranks);
  RankCosts costs{
      .cache_bytes_per_token_layer = vha::cache_bytes_per_token(part, work.element_bytes),
      .weights_served = vha::weight_count(part, forms.decode),
      .exchanged_as_trained = exchanged(forms.training),
      .exchanged_as_served = exchanged(forms.decode)};
  if constexpr (std::same_as<Attention, vha::LayerSizes>) {
    costs.exchanged_backward =
        vha::backward_exchanged_bytes_per_token(attention, forms.training, ranks, float_bytes);
  }
  return costs;
}

template <class Attention>
Variant variant(std::string name, const vha::ModelSizes<Attention>& model, const Work& work) {
  const Attention& attention = model.attention;
  const Index bytes = work.element_bytes;
  Variant result{
      .name = std::move(name),
      .cache_bytes_per_token_layer = vha::cache_bytes_per_token(attention, bytes),
      .cache_bytes_per_token = vha::cache_bytes_per_token(model, bytes),
      .query_weights_trained = vha::query_weight_count(attention, model.forms.training),
      .query_weights_served = vha::query_weight_count(attention, model.forms.decode),
      .weights_trained = vha::weight_count(model, model.forms.training),
      .weights_served = vha::weight_count(model, model.forms.decode),
      .training_flops = vha::training_flops_per_token(model, work.tokens),
      .prefill_flops = vha::prefill_flops_per_token(model, work.tokens),
      .decode_flops = vha::decode_flops_per_token(model, work.context),
      .step = vha::decode_step(model, work.context, work.batch, bytes, bytes),
      .cache_dominates_from = vha::context_where_cache_dominates(model, work.batch, bytes, bytes),
  };
  result.cache_bytes = result.step.bytes.cache;
  if (work.ranks && vha::splits_evenly(attention, *work.ranks)) {
    result.rank = rank_costs(attention, model.forms, work);
  }
  if (work.machine) result.step_seconds = vha::roofline_seconds(*work.machine, result.step);
  return result;
}

struct Comparison {
  std::vector<Variant> variants;
  std::size_t reference = 0;           ///< GQA-8, or MHA where the heads do not make GQA-8
  std::optional<Index> matched_heads;  ///< of the MHA with as many attention weights as GQA-8
};

/// One variant for each kind of attention that the shape's heads allow.
inline Comparison compare(const Shape& shape, const Work& work) {
  using vha::LayerSizes;
  Comparison result;
  const Index n = shape.query_heads, d = shape.head_dim, h = shape.hidden;
  const auto add = [&](std::string name, const auto& attention, vha::LayerForms forms) {
    result.variants.push_back(variant(
        std::move(name),
        vha::ModelSizes<std::remove_cvref_t<decltype(attention)>>{
            .layers = shape.layers, .attention = attention, .mlp = shape.mlp(), .forms = forms},
        work));
  };
  const auto add_gqa = [&](std::string name, Index heads, Index kv_heads) {
    add(std::move(name),
        LayerSizes{.hidden = h, .head_dim = d, .query_heads = heads, .kv_heads = kv_heads},
        vha::without_maps);
  };
  const auto has_groups = [&](Index groups) { return n > groups && n % groups == 0; };
  add_gqa("MHA", n, n);
  if (has_groups(8)) {
    const Index heads = vha::matched_mha_heads(n, 8);
    result.matched_heads = heads;
    add_gqa(vha::text("MHA of ", heads, " heads"), heads, heads);
  }
  add_gqa("MQA", n, 1);
  for (const Index groups : {8, 4, 2}) {
    if (!has_groups(groups)) continue;
    if (groups == 8) result.reference = result.variants.size();
    add_gqa(vha::text("GQA-", groups), n, groups);
  }
  const LayerSizes vha_sizes{.hidden = h,
                             .head_dim = d,
                             .query_heads = n,
                             .kv_heads = shape.kv_heads,
                             .postmix_rank = shape.postmix_rank};
  add("VHA as trained", vha_sizes, vha::never_folded);
  add("VHA folded", vha_sizes, vha::folded_to_serve);
  const vha::ModelSizes<LayerSizes> premix_apart{.layers = shape.layers,
                                                 .attention = vha_sizes,
                                                 .mlp = shape.mlp(),
                                                 .forms = vha::premix_apart_in_prefill};
  result.variants.back().prefill_flops_premix_apart =
      vha::prefill_flops_per_token(premix_apart, work.tokens);
  add("MLA",
      vha::MlaSizes{.hidden = h,
                    .query_heads = n,
                    .content_dim = d,
                    .value_dim = d,
                    .latent_dim = shape.mla_latent_dim,
                    .rope_dim = shape.mla_rope_dim},
      vha::folded_to_decode);
  const vha::MfaSizes mfa{.hidden = h, .query_heads = n, .head_dim = 2 * d};
  add("MFA as trained", mfa, vha::never_folded);
  add("MFA folded", mfa, vha::folded_to_serve);
  add("GVA",
      vha::GvaSizes{.hidden = h,
                    .query_heads = n,
                    .value_dim = d,
                    .content_dim = d - shape.gva_rope_dim,
                    .kv_heads = shape.kv_heads,
                    .rope_dim = shape.gva_rope_dim},
      vha::folded_to_decode);
  return result;
}

}  // namespace cost
