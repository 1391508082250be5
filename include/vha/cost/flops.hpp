// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vha/cost/layer_sizes.hpp>

// Floating-point operations of the matrix products: two for each multiply-add. Norms, RoPE, softmax,
// biases and gates are not counted, being small beside the products. The core counts pairs of a query
// and a key: those that see each other, unless the caller gives another number, such as `full_pairs`.

namespace vha {

/// Of a product `[rows, depth] · [depth, cols]`.
constexpr Index product_flops(Index rows, Index depth, Index cols) {
  return 2 * rows * depth * cols;
}

/// Pairs of a query and a key that it sees, for `tokens` new queries behind `cached` tokens: the
/// query at position p sees p + 1 keys, or the newest `window` of them.
constexpr Index visible_pairs(Index tokens, Index cached = 0, Index window = 0) {
  const Index end = cached + tokens;
  if (window == 0) window = end;
  const Index growing = std::clamp(window, cached, end) - cached;  // queries that see all keys
  return growing * cached + growing * (growing + 1) / 2 + (tokens - growing) * window;
}

/// Pairs of `tokens` new queries and all keys, seen or not, behind `cached` tokens: what papers count.
constexpr Index full_pairs(Index tokens, Index cached = 0) {
  return tokens * (cached + tokens);
}

/// New tokens of a forward, and how many pairs of a query and a key its core counts.
struct TokenPairs {
  Index tokens = 0;
  Index pairs = 0;
};

/// One layer's, part by part.
struct LayerFlops {
  Index query = 0;
  Index premix = 0;
  Index key_value = 0;
  Index core = 0;
  Index postmix = 0;
  Index output = 0;

  constexpr Index projections() const { return query + key_value + output; }
  constexpr Index total() const { return projections() + premix + core + postmix; }
};

/// Of the core over `pairs` pairs of positions: scores and values, 4 · head_dim for each query head.
constexpr Index core_flops(const LayerSizes& sizes, Index pairs) {
  return 4 * sizes.query_width() * pairs;
}

/// Of a forward of `work.tokens` new tokens that counts `work.pairs` pairs, for one sequence.
constexpr LayerFlops layer_flops(const LayerSizes& sizes, LayerForm form, TokenPairs work) {
  const Index tokens = work.tokens;
  const Index width = sizes.query_width();
  LayerFlops flops;
  flops.query =
      product_flops(tokens, sizes.hidden, has_premix(form) ? sizes.physical_width() : width);
  if (has_premix(form)) flops.premix = product_flops(tokens, sizes.premix_rows(), width);
  flops.key_value = 2 * product_flops(tokens, sizes.hidden, sizes.kv_width());
  flops.core = core_flops(sizes, work.pairs);
  if (has_postmix(form)) flops.postmix = 2 * product_flops(tokens, width, sizes.postmix_rank);
  flops.output = product_flops(tokens, width, sizes.hidden);
  return flops;
}

/// Of a forward of `tokens` new tokens behind `cached` ones, for one sequence.
constexpr LayerFlops layer_flops(const LayerSizes& sizes, LayerForm form, Index tokens,
                                 Index cached = 0) {
  return layer_flops(sizes, form,
                     {.tokens = tokens, .pairs = visible_pairs(tokens, cached, sizes.window)});
}

constexpr LayerFlops prefill_flops(const LayerSizes& sizes, LayerForm form, Index tokens) {
  return layer_flops(sizes, form, tokens);
}

/// Of the backward pass of such a prefill, all weights trained: two products for each of the forward's,
/// five for the core's two, of which one makes the weights again, and the keys projected again.
constexpr LayerFlops backward_flops(const LayerSizes& sizes, LayerForm form, Index tokens) {
  LayerFlops flops = prefill_flops(sizes, form, tokens);
  flops.query *= 2;
  flops.premix *= 2;
  flops.key_value = 2 * flops.key_value + flops.key_value / 2;
  flops.core = flops.core / 2 * 5;
  flops.postmix *= 2;
  flops.output *= 2;
  return flops;
}

/// Of one new token behind `cached` ones.
constexpr LayerFlops decode_flops(const LayerSizes& sizes, LayerForm form, Index cached) {
  return layer_flops(sizes, form, 1, cached);
}

/// True where prefill is cheaper with Premix apart, `H'·d_q·h + Hv·d_q·d` multiplications a token in
/// place of `Hv·d·h`. Postmix is folded either way.
constexpr bool unfolded_prefill_is_cheaper(const LayerSizes& sizes) {
  return prefill_flops(sizes, LayerForm::unfolded_premix, 1).total() <
         prefill_flops(sizes, LayerForm::folded, 1).total();
}

/// Of `fold_vha` of one layer: W_Q times the maps, and M, as a dense matrix, times W_O.
constexpr Index fold_flops(const LayerSizes& sizes) {
  return product_flops(sizes.hidden, sizes.premix_rows(), sizes.query_width()) +
         product_flops(sizes.query_heads, sizes.query_heads, sizes.head_dim * sizes.hidden);
}

}  // namespace vha
