// SPDX-License-Identifier: Apache-2.0
// The attention of a model in training: one of the library's layers over weights that an optimiser
// changes where they stand.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>
#include <vha/attention/attention_backward.hpp>
#include <vha/vha.hpp>

#include "random.hpp"

namespace train {

/// With both maps, with either, or with none: plain grouped-query attention.
template <class T, class PremixPart, class PostmixPart>
using Attention = vha::Attention<T, PremixPart, PostmixPart, vha::NoGate>;
template <class T>
using AttentionLayer = std::variant<
    Attention<T, vha::NoPremix, vha::NoPostmix>, Attention<T, vha::Premix<T>, vha::Postmix<T>>,
    Attention<T, vha::Premix<T>, vha::NoPostmix>, Attention<T, vha::NoPremix, vha::Postmix<T>>>;

/// Which maps the layers have.
struct Maps {
  bool premix = true;
  bool postmix = true;
  Index rank = 4;  ///< of Postmix
};

/// A layer at the start of training, as `vha::initialise_vha` makes it, or that without a map: where
/// Premix is absent, W_Q makes all query heads by itself.
template <class T>
AttentionLayer<T> initialise_attention(const vha::AttentionConfig& config, const Maps& maps,
                                       std::uint64_t seed) {
  vha::InitialiseOptions options;
  options.postmix_rank = maps.postmix ? maps.rank : 1;
  options.seed = seed;
  const auto vha = vha::initialise_vha<T>(config, options);
  vha::Linear<T> query = vha.weights().query;
  if (!maps.premix) {
    query.weight =
        normal_matrix<T>(config.hidden, config.query_width(), options.projection_std, ~seed);
  }
  const auto with = [&](auto premix, auto postmix) -> AttentionLayer<T> {
    const auto& weights = vha.weights();
    return Attention<T, decltype(premix), decltype(postmix)>(
        config, weights.template with_parts<T>(query, weights.output, premix, postmix));
  };
  const auto& premix = vha.weights().premix;
  const auto& postmix = vha.weights().postmix;
  if (maps.premix && maps.postmix) return with(premix, postmix);
  if (maps.premix) return with(premix, vha::NoPostmix{});
  if (maps.postmix) return with(vha::NoPremix{}, postmix);
  return with(vha::NoPremix{}, vha::NoPostmix{});
}

/// The same layer with each weight replaced by what `view(weight)` gives, in the order in which
/// vha::AttentionGradients::for_each has them.
template <class Layer, class View>
Layer with_views(const Layer& layer, View&& view) {
  using Weights = typename Layer::Weights;
  Weights weights = layer.weights();
  const auto replace = [&](auto& weight) { weight = view(weight); };
  for (auto* const linear : {&weights.query, &weights.key, &weights.value, &weights.output}) {
    replace(linear->weight);
  }
  replace(weights.q_norm);
  replace(weights.k_norm);
  if constexpr (Weights::has_premix) {
    for (auto& map : weights.premix.maps) replace(map);
  }
  if constexpr (Weights::has_postmix) {
    replace(weights.postmix.a);
    replace(weights.postmix.b);
  }
  return Layer(layer.config(), std::move(weights));
}

/// What a weight of vha::AttentionGradients::for_each is called in a checkpoint.
inline std::string_view checkpoint_name(std::string_view name) {
  static constexpr std::pair<std::string_view, std::string_view> names[] = {
      {"query.weight", "self_attn.q_proj.weight"}, {"key.weight", "self_attn.k_proj.weight"},
      {"value.weight", "self_attn.v_proj.weight"}, {"output.weight", "self_attn.o_proj.weight"},
      {"q_norm", "self_attn.q_norm.weight"},       {"k_norm", "self_attn.k_norm.weight"},
      {"premix", "self_attn.vha_premix_weight"},   {"postmix_a", "self_attn.vha_postmix_U"},
      {"postmix_b", "self_attn.vha_postmix_V"},
  };
  for (const auto& [own, checkpoint] : names) {
    if (name.substr(0, name.find('[')) == own) return checkpoint;
  }
  vha::raise("weight", "one of a layer with neither biases nor a gate", std::string(name));
}

}  // namespace train
