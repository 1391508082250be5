// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/core/config.hpp>

namespace vha {

/// The sizes that a layer's cost depends on.
struct LayerSizes {
  Index hidden = 0;
  Index head_dim = 0;
  Index query_heads = 0;  ///< that attend: of a VHA layer, its virtual heads
  Index kv_heads = 0;
  Index physical_head_dim = 0;  ///< Premix's input width; 0: head_dim
  Index postmix_rank = 0;
  Index window = 0;  ///< 0: none

  static constexpr LayerSizes of(const AttentionConfig& config, Index postmix_rank = 0) {
    return {.hidden = config.hidden,
            .head_dim = config.head_dim,
            .query_heads = config.query_heads,
            .kv_heads = config.kv_heads,
            .postmix_rank = postmix_rank,
            .window = config.window};
  }

  constexpr Index query_width() const { return query_heads * head_dim; }
  constexpr Index kv_width() const { return kv_heads * head_dim; }
  constexpr Index premix_rows() const {
    return physical_head_dim == 0 ? head_dim : physical_head_dim;
  }
  /// Channels of the physical query heads together, `H' * physical_head_dim`.
  constexpr Index physical_width() const { return query_heads / kv_heads * premix_rows(); }
};

/// Which maps stand by themselves, not multiplied into the projection beside them.
enum class LayerForm {
  folded,           ///< none: a GQA layer, of any kind
  unfolded,         ///< both: a VHA layer as it is trained
  unfolded_premix,  ///< Premix alone, as `serve_unfolded_prefill` prefills
};

constexpr bool has_premix(LayerForm form) {
  return form != LayerForm::folded;
}
constexpr bool has_postmix(LayerForm form) {
  return form == LayerForm::unfolded;
}

}  // namespace vha
