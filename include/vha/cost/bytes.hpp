// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vha/cost/layer_sizes.hpp>

// Bytes that a layer stores and that a decode step must read: each weight and each visible key and
// value once, whatever the kernel. Activations, norm weights, biases and positions are not counted in
// them.

namespace vha {

/// Elements of the query projection and, where it stands apart, Premix.
constexpr Index query_weight_count(const LayerSizes& sizes, LayerForm form) {
  if (!has_premix(form)) return sizes.hidden * sizes.query_width();
  return sizes.hidden * sizes.physical_width() +
         sizes.kv_heads * sizes.premix_rows() * sizes.head_dim;
}

/// Elements of the projections and maps.
constexpr Index weight_count(const LayerSizes& sizes, LayerForm form) {
  const Index width = sizes.query_width();
  Index count = query_weight_count(sizes, form);
  if (has_postmix(form)) count += 2 * sizes.query_heads * sizes.postmix_rank;
  return count + 2 * sizes.hidden * sizes.kv_width() + width * sizes.hidden;
}

/// Of the keys and values of one token in one layer, of elements of `element_bytes` bytes: 8 of f64, 4
/// of f32, 2 of bf16 and f16.
constexpr Index cache_bytes_per_token(const LayerSizes& sizes, Index element_bytes) {
  return 2 * sizes.kv_width() * element_bytes;
}

/// Of `tokens` rows of the query heads, or of what they attended to: what a kernel over heads reads.
constexpr Index head_bytes(const LayerSizes& sizes, Index tokens, Index element_bytes) {
  return tokens * sizes.query_width() * element_bytes;
}

/// How many of `cached` tokens the next one sees.
constexpr Index visible_tokens(const LayerSizes& sizes, Index cached) {
  return sizes.window == 0 ? cached : std::min(cached, sizes.window - 1);
}

/// What a decode step reads.
struct DecodeBytes {
  Index weights = 0;
  Index cache = 0;

  constexpr Index total() const { return weights + cache; }
};

/// Of a step with `cached` tokens in each of `batch` sequences, which share one reading of the
/// weights. The new token's own key and value are not in memory yet. `Sizes` is LayerSizes or one of
/// layer_kinds.hpp.
template <class Sizes>
constexpr DecodeBytes decode_bytes(const Sizes& sizes, LayerForm form, Index cached,
                                   Index weight_element_bytes, Index cache_element_bytes,
                                   Index batch = 1) {
  return {.weights = weight_count(sizes, form) * weight_element_bytes,
          .cache = batch * visible_tokens(sizes, cached) *
                   cache_bytes_per_token(sizes, cache_element_bytes)};
}

}  // namespace vha
