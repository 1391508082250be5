// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vha/cost/layer_sizes.hpp>

// Bytes that a layer stores and that a decode step must read: each weight and each visible key and
// value once, whatever the kernel. Activations, norm weights, biases and positions are not counted.

namespace vha {

/// Elements of the projections and maps.
constexpr Index weight_count(const LayerSizes& sizes, LayerForm form) {
  const Index width = sizes.query_width();
  Index count = sizes.hidden * (has_premix(form) ? sizes.physical_width() : width);
  if (has_premix(form)) count += sizes.kv_heads * sizes.premix_rows() * sizes.head_dim;
  if (has_postmix(form)) count += 2 * sizes.query_heads * sizes.postmix_rank;
  return count + 2 * sizes.hidden * sizes.kv_width() + width * sizes.hidden;
}

/// Of the keys and values of one token in one layer, of elements of `element_bytes` bytes.
constexpr Index cache_bytes_per_token(const LayerSizes& sizes, Index element_bytes) {
  return 2 * sizes.kv_width() * element_bytes;
}

/// What a decode step reads.
struct DecodeBytes {
  Index weights = 0;
  Index cache = 0;

  constexpr Index total() const { return weights + cache; }
};

/// Of a step with `cached` tokens in each of `batch` sequences, which share one reading of the
/// weights. The new token's own key and value are not in memory yet.
constexpr DecodeBytes decode_bytes(const LayerSizes& sizes, LayerForm form, Index cached,
                                   Index weight_element_bytes, Index cache_element_bytes,
                                   Index batch = 1) {
  const Index visible = sizes.window == 0 ? cached : std::min(cached, sizes.window - 1);
  return {.weights = weight_count(sizes, form) * weight_element_bytes,
          .cache = batch * visible * cache_bytes_per_token(sizes, cache_element_bytes)};
}

}  // namespace vha
