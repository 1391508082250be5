// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vha/fold/fold_vha.hpp>

namespace vha {

/// A VHA layer served in two forms over one cache: Premix unfolded for prefill, where the query
/// projection then costs H'·h·d + Hv·d² multiplications per token in place of Hv·h·d, and the stock
/// GQA layer for decode. Both store the same keys and values (but for the rounding of a value_scale,
/// which decode has in its weights), so they take turns as they like; they share the weights that
/// they have in common.
template <class Prefill, class Decode>
struct PrefillDecode {
  using Scalar = typename Decode::Scalar;
  using Workspace = typename Decode::Workspace;

  Prefill prefill;  ///< Premix unfolded, Postmix folded
  Decode decode;    ///< stock GQA

  const AttentionConfig& config() const { return decode.config(); }

  /// The outputs for `x`, whose tokens are put into `cache`: by `decode` where there is one token a
  /// row, else by `prefill`.
  template <Activations X, StorageScalar C>
  auto forward(const X& x, KvCache<C>& cache, const TokenLayout& layout = {}) const {
    return activations_view(x).tokens == 1 ? decode.forward(x, cache, layout)
                                           : prefill.forward(x, cache, layout);
  }
  template <Activations X, StorageScalar C, Activations Out>
  void forward_into(const X& x, KvCache<C>& cache, Out&& out, Workspace& workspace,
                    const TokenLayout& layout = {}) const {
    if (activations_view(x).tokens == 1) {
      decode.forward_into(x, cache, out, workspace, layout);
    } else {
      prefill.forward_into(x, cache, out, workspace, layout);
    }
  }
};

/// Both forms of a VHA layer that has a full fold; any other does not compile. Throws Error where a
/// product of the folds is not finite.
template <class Layer>
auto serve_unfolded_prefill(const Layer& layer) {
  auto prefill = fold_postmix(layer);
  auto decode = fold_vha(prefill);
  return PrefillDecode<decltype(prefill), decltype(decode)>{std::move(prefill), std::move(decode)};
}

}  // namespace vha
