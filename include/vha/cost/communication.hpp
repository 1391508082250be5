// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/cost/bytes.hpp>
#include <vha/cost/layer_kinds.hpp>
#include <vha/cost/layer_sizes.hpp>
#include <vha/parallel/head_slice.hpp>

// What ranks that run a layer together (ParallelAttention) exchange, and what each of them has. Counted
// are the numbers that one rank gives to sums over all ranks: none of a rank alone, and the same for any
// other number of ranks. What then runs over a wire depends on how the sum is done: of a ring of n ranks,
// each sends 2·(n - 1)/n of them. The numbers are of the activations' type.

namespace vha {

/// Whether `ranks` ranks can have equal shares of the layer's heads.
constexpr bool splits_evenly(const LayerSizes& sizes, Index ranks) {
  return splits_evenly(sizes.query_heads, sizes.kv_heads, ranks);
}
constexpr bool splits_evenly(const MlaSizes& sizes, Index ranks) {
  return splits_evenly(sizes.query_heads, 1, ranks);
}
constexpr bool splits_evenly(const MfaSizes& sizes, Index ranks) {
  return splits_evenly(sizes.query_heads, 1, ranks);
}
constexpr bool splits_evenly(const GvaSizes& sizes, Index ranks) {
  return splits_evenly(sizes.query_heads, sizes.kv_heads, ranks);
}

namespace detail {

template <class Sizes>
constexpr Sizes with_rank_heads(Sizes sizes, Index kv_heads, Index ranks) {
  const HeadSlice slice = HeadSlice::of(sizes.query_heads, kv_heads, 0, ranks);
  sizes.query_heads = slice.query_heads;
  if constexpr (requires { sizes.kv_heads; }) sizes.kv_heads = slice.kv_heads;
  return sizes;
}

}  // namespace detail

/// One rank's part of the layer, whose weights and cache are counted as a layer's: every rank has MLA's
/// latent, MFA's one K/V head and GVA's rotated key. Precondition: `splits_evenly`.
constexpr LayerSizes rank_sizes(const LayerSizes& sizes, Index ranks) {
  return detail::with_rank_heads(sizes, sizes.kv_heads, ranks);
}
constexpr MlaSizes rank_sizes(const MlaSizes& sizes, Index ranks) {
  return detail::with_rank_heads(sizes, 1, ranks);
}
constexpr MfaSizes rank_sizes(const MfaSizes& sizes, Index ranks) {
  return detail::with_rank_heads(sizes, 1, ranks);
}
constexpr GvaSizes rank_sizes(const GvaSizes& sizes, Index ranks) {
  return detail::with_rank_heads(sizes, sizes.kv_heads, ranks);
}

/// Numbers that Postmix crosses the ranks with, for each token and each sum: Aᵀ·Y.
constexpr Index postmix_exchange(const LayerSizes& sizes, LayerForm form) {
  return has_postmix(form) ? sizes.postmix_rank * sizes.head_dim : 0;
}
template <LayerKind Sizes>
constexpr Index postmix_exchange(const Sizes&, LayerForm) {
  return 0;
}

/// Bytes that a forward exchanges for each token: the partial sums of the output projection and, where it
/// stands apart, Postmix's.
template <class Sizes>
constexpr Index exchanged_bytes_per_token(const Sizes& sizes, LayerForm form, Index ranks,
                                          Index element_bytes) {
  if (ranks == 1) return 0;
  return (sizes.hidden + postmix_exchange(sizes, form)) * element_bytes;
}

/// Bytes that a backward pass exchanges for each token: the gradient of the layer's input and, where it
/// stands apart, Postmix's sums and their gradients.
constexpr Index backward_exchanged_bytes_per_token(const LayerSizes& sizes, LayerForm form,
                                                   Index ranks, Index element_bytes) {
  if (ranks == 1) return 0;
  return (sizes.hidden + 2 * postmix_exchange(sizes, form)) * element_bytes;
}

/// Bytes that a backward pass exchanges once, however many tokens it has, where all weights are trained:
/// the gradients of those that ranks share. W_Q behind Premix serves every group; K, V and the maps are on
/// several ranks where there are more ranks than groups. Norm weights and biases are not counted.
constexpr Index exchanged_gradient_bytes(const LayerSizes& sizes, LayerForm form, Index ranks,
                                         Index element_bytes) {
  if (ranks == 1) return 0;
  Index count = 0;
  if (has_premix(form) && sizes.kv_heads > 1) count += sizes.hidden * sizes.physical_width();
  if (ranks > sizes.kv_heads) {
    count += 2 * sizes.hidden * sizes.kv_width();
    if (has_premix(form)) count += sizes.kv_heads * sizes.premix_rows() * sizes.head_dim;
  }
  return count * element_bytes;
}

}  // namespace vha
