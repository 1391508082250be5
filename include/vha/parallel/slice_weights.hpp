// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <vha/attention/attention.hpp>
#include <vha/attention/premix.hpp>
#include <vha/attention/weights.hpp>
#include <vha/ops/linear.hpp>
#include <vha/parallel/communicator.hpp>
#include <vha/parallel/head_slice.hpp>
#include <vha/parallel/parallel_postmix.hpp>

// The weights of a rank's heads, as views of the whole layer's: what a rank does not own it does not read.
//
// | weight | rank k of n has |
// |---|---|
// | query, with Premix | the columns of its physical heads, which are all where n <= kv_heads |
// | query, without; gate | the columns of its query heads |
// | key, value | the columns of its K/V heads |
// | premix | the maps of its K/V heads |
// | q_norm, k_norm | all |
// | postmix | the rows of A and B of its query heads |
// | output | the rows of its query heads; the bias on rank 0 alone, to be added once |

namespace vha {

namespace detail {

template <class PostmixPart, class Comm>
struct ParallelPart {
  using Type = PostmixPart;
};
template <StorageScalar S, class Act, class Comm>
struct ParallelPart<Postmix<S, Act>, Comm> {
  using Type = ParallelPostmix<S, Act, Comm>;
};

// Premix by K/V group goes with its group; of other maps nothing here knows which rank needs which.
template <class PremixPart>
inline constexpr bool splits_by_group = std::same_as<PremixPart, NoPremix>;
template <StorageScalar S, class Act>
inline constexpr bool splits_by_group<Premix<S, Act>> = true;

template <StorageScalar S>
Linear<S> columns(const Linear<S>& linear, Index first, Index count) {
  Linear<S> part{linear.weight.block(0, first, linear.in(), count)};
  if (!linear.bias.empty()) part.bias = linear.bias.block(0, first, 1, count);
  return part;
}

}  // namespace detail

/// The weights of the heads in `slice`, rank `slice.rank`'s, in the memory of `weights`; the
/// Postmix, where there is one, adds up over `communicator`, which must live as long.
/// Precondition: `weights` fit `config`, and `slice` is one of it.
template <StorageScalar S, class PremixPart, class PostmixPart, class GatePart, Communicator Comm>
auto slice_weights(const AttentionWeights<S, PremixPart, PostmixPart, GatePart>& weights,
                   const AttentionConfig& config, const HeadSlice& slice, Comm& communicator) {
  static_assert(
      detail::splits_by_group<PremixPart>,
      "vha::slice_weights: a layer whose query maps are not one for each K/V group, as MFA's, is "
      "not split over ranks as it is trained; fold it first with vha::fold_vha");
  using Whole = AttentionWeights<S, PremixPart, PostmixPart, GatePart>;
  using RankPostmix = typename detail::ParallelPart<PostmixPart, Comm>::Type;
  const Index width = config.head_dim;
  const Index first_query = slice.first_query_head * width, query = slice.query_heads * width;
  const Index first_kv = slice.first_kv_head * width, kv = slice.kv_heads * width;
  AttentionWeights<S, PremixPart, RankPostmix, GatePart> part;
  if constexpr (Whole::has_premix) {
    const Index physical = weights.premix.physical_head_dim();
    part.query =
        detail::columns(weights.query, slice.first_member * physical, slice.members * physical);
    const auto first = weights.premix.maps.begin() + slice.first_kv_head;
    part.premix = {{first, first + slice.kv_heads}, weights.premix.activation};
  } else {
    part.query = detail::columns(weights.query, first_query, query);
  }
  part.key = detail::columns(weights.key, first_kv, kv);
  part.value = detail::columns(weights.value, first_kv, kv);
  part.output.weight = weights.output.weight.block(first_query, 0, query, config.hidden);
  if (slice.rank == 0) part.output.bias = weights.output.bias;
  part.q_norm = weights.q_norm;
  part.k_norm = weights.k_norm;
  if constexpr (Whole::has_postmix) {
    part.postmix = {weights.postmix, slice.first_query_head, slice.query_heads, communicator};
  }
  if constexpr (Whole::has_gate) {
    part.gate = {detail::columns(weights.gate.projection, first_query, query)};
  }
  return part;
}

}  // namespace vha
