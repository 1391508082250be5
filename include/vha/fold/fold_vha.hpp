// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vha/attention/attention.hpp>
#include <vha/fold/fold_weights.hpp>

// The fold of whole layers. A fold takes a map out of the layer's type, so folding twice, or
// folding what the layer does not have, does not compile.

namespace vha {

namespace detail {

/// The scalar that is asked for, or else the layer's own.
template <class To, StorageScalar S>
struct StoredAsTrait {
  using Type = std::conditional_t<std::is_void_v<To>, S, To>;
  static_assert(StorageScalar<Type>,
                "vha: a fold is stored as double, float, bfloat16 or half; name one of them");
};
template <class To, StorageScalar S>
using StoredAs = typename StoredAsTrait<To, S>::Type;

template <StorageScalar To, StorageScalar S>
Linear<To> fold_if_any(const Linear<S>& query, const NoPremix&, const Executor&) {
  return query.template cast<To>();
}
template <StorageScalar To, StorageScalar S, Activation A>
Linear<To> fold_if_any(const Linear<S>& query, const Premix<S, A>& premix,
                       const Executor& executor) {
  return fold_premix<To>(query, premix, executor);
}
template <StorageScalar To, StorageScalar S>
Linear<To> fold_if_any(const Linear<S>& output, const NoPostmix&, const Executor&) {
  return output.template cast<To>();
}
template <StorageScalar To, StorageScalar S, Activation A>
Linear<To> fold_if_any(const Linear<S>& output, const Postmix<S, A>& postmix,
                       const Executor& executor) {
  return fold_postmix<To>(output, postmix, executor);
}

/// `linear` times `scale`, summed wide and rounded once.
template <StorageScalar To, StorageScalar S>
Linear<To> scaled(std::string_view name, const Linear<S>& linear, double scale) {
  const auto scale_one = [&](std::string_view part, const Weight<S>& weight) {
    if (weight.empty()) return Weight<To>();
    const RowMajorMatrix<double> products = weight.template to<double>() * scale;
    RowMajorMatrix<To> stored(weight.rows(), weight.cols());
    for (Index row = 0; row < weight.rows(); ++row) {
      store_rounded(text(name, part), &products(row, 0), weight.cols(), &stored(row, 0), row, 0);
    }
    return Weight<To>::own(std::move(stored));
  };
  return {scale_one(".weight", linear.weight), scale_one(".bias", linear.bias)};
}

}  // namespace detail

/// The layer with Premix multiplied into its query projection (block `g·H' + i` of W_Q' is
/// W_Q^(i)·P_g) and everything else as it was. This is all the folding that a gated layer has: it
/// serves as GQA with a separate Postmix. `To` is the scalar that the weights are stored in, the
/// layer's own by default. Throws Error where a product is not finite.
template <class To = void, StorageScalar S, class PremixPart, class PostmixPart, class GatePart,
          int HeadDim, int GroupSize>
auto fold_premix(const Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>& layer,
                 const Executor& executor = {}) {
  static_assert(
      !std::same_as<PremixPart, NoPremix>,
      "vha::fold_premix: the layer has no Premix: it was folded already, or it is a plain "
      "GQA layer");
  using Stored = detail::StoredAs<To, S>;
  const auto& w = layer.weights();
  return layer.with(layer.config(),
                    w.template with_parts<Stored>(fold_premix<Stored>(w.query, w.premix, executor),
                                                  w.output.template cast<Stored>(), NoPremix{},
                                                  w.postmix.template cast<Stored>()));
}

/// The layer with Postmix multiplied into its output projection (block `j` of W_O' is
/// Σ_i M[i,j]·(block i of W_O)) and everything else as it was: Premix stays unfolded, for cheap
/// prefill. Throws Error where a product is not finite.
template <class To = void, StorageScalar S, class PremixPart, class PostmixPart, class GatePart,
          int HeadDim, int GroupSize>
auto fold_postmix(const Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>& layer,
                  const Executor& executor = {}) {
  static_assert(!std::same_as<PostmixPart, NoPostmix>,
                "vha::fold_postmix: the layer has no Postmix: it was folded already, or it is a "
                "plain GQA layer");
  static_assert(std::same_as<GatePart, NoGate>,
                "vha::fold_postmix: a gate stands between Postmix and W_O, so Postmix does not "
                "fold; use fold_premix, and serve the layer with a separate Postmix");
  using Stored = detail::StoredAs<To, S>;
  const auto& w = layer.weights();
  return layer.with(layer.config(), w.template with_parts<Stored>(
                                        w.query.template cast<Stored>(),
                                        fold_postmix<Stored>(w.output, w.postmix, executor),
                                        w.premix.template cast<Stored>(), NoPostmix{}));
}

/// True where `fold_vha` has an answer: the layer has a map, and nothing nonlinear stands between a
/// map and its neighbour.
template <class Layer>
inline constexpr bool has_full_fold =
    (Layer::Weights::has_premix || Layer::Weights::has_postmix) &&
    !(Layer::Weights::has_postmix && Layer::Weights::has_gate) &&
    std::same_as<typename decltype(Layer::Weights::premix)::ActivationType, Identity> &&
    std::same_as<typename decltype(Layer::Weights::postmix)::ActivationType, Identity>;

/// The stock GQA layer that computes what the VHA layer does: Premix folded into W_Q, Postmix into
/// W_O, a constant scale of the values into W_V. Keys, norms and RoPE, and the values without a
/// scale, stay byte for byte, and are shared with `layer` where they are stored alike.
///
///     auto served = vha::fold_vha(layer);                  // stored as the layer is
///     auto half_size = vha::fold_vha<vha::bfloat16>(layer);  // each element rounded once
///     auto faster = vha::fold_vha(layer, device);  // on an Eigen::ThreadPoolDevice; the same bits
///
/// Does not compile for a layer with a gate, with an activation after a map, or without maps.
/// Throws Error where a product is not finite.
template <class To = void, StorageScalar S, class PremixPart, class PostmixPart, class GatePart,
          int HeadDim, int GroupSize>
auto fold_vha(const Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>& layer,
              const Executor& executor = {}) {
  static_assert(
      !std::same_as<PremixPart, NoPremix> || !std::same_as<PostmixPart, NoPostmix>,
      "vha::fold_vha: the layer has neither Premix nor Postmix: it was folded already, or "
      "it is a plain GQA layer");
  static_assert(std::same_as<PostmixPart, NoPostmix> || std::same_as<GatePart, NoGate>,
                "vha::fold_vha: a gate stands between Postmix and W_O, so the layer has no full "
                "fold; use fold_premix, and serve the layer with a separate Postmix");
  using Stored = detail::StoredAs<To, S>;
  const auto& w = layer.weights();
  auto folded = w.template with_parts<Stored>(
      detail::fold_if_any<Stored>(w.query, w.premix, executor),
      detail::fold_if_any<Stored>(w.output, w.postmix, executor), NoPremix{}, NoPostmix{});
  AttentionConfig config = layer.config();
  if (config.value_scale != 1) {
    folded.value = detail::scaled<Stored>("value", w.value, std::exchange(config.value_scale, 1.0));
  }
  return layer.with(config, std::move(folded));
}

}  // namespace vha
