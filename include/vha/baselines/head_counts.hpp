// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/core/config.hpp>

// The layers that differ from GqaAttention in their head counts alone.

namespace vha {

/// Grouped-query attention (GQA, arXiv 2305.13245): `kv_heads` K/V heads, each read by as many query
/// heads.
constexpr AttentionConfig gqa_config(Index hidden, Index head_dim, Index query_heads,
                                     Index kv_heads) {
  return {.hidden = hidden, .head_dim = head_dim, .query_heads = query_heads, .kv_heads = kv_heads};
}

/// Multi-head attention (MHA, arXiv 1706.03762): each head has keys and values of its own.
constexpr AttentionConfig mha_config(Index hidden, Index head_dim, Index heads) {
  return gqa_config(hidden, head_dim, heads, heads);
}

/// Multi-query attention (MQA, arXiv 1911.02150): all query heads read one K/V head.
constexpr AttentionConfig mqa_config(Index hidden, Index head_dim, Index query_heads) {
  return gqa_config(hidden, head_dim, query_heads, 1);
}

}  // namespace vha
