// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>
#include <vha/core/sizes.hpp>

namespace vha {

/// 1 / √head_dim, the usual factor of the logits.
inline double softmax_scale(Index head_dim) {
  return 1 / std::sqrt(static_cast<double>(head_dim));
}

/// What an attention layer is, apart from its weights. The fold leaves it as it is: a VHA layer and
/// the GQA layer that serves it have the same heads, the same keys and values, the same RoPE.
struct AttentionConfig {
  Index hidden = 0;    ///< channels of the model, h
  Index head_dim = 0;  ///< channels of a head, d; even, and not always hidden / query_heads
  /// Heads that attend. Of a VHA layer: its virtual query heads, Hv = physical heads * kv_heads.
  Index query_heads = 0;
  Index kv_heads = 0;          ///< K/V heads, G; divides query_heads
  double rope_theta = 10000;   ///< base of the RoPE frequencies
  Index rotary_dim = 0;        ///< leading channels that RoPE turns; even; 0: all of head_dim
  double rms_norm_eps = 1e-6;  ///< of the QK-norm, where the layer has one
  Index window = 0;            ///< a query sees this many newest positions; 0: all before it
  double value_scale = 1;      ///< constant factor of the values

  /// Query heads per K/V head; the physical heads H' of a VHA layer.
  /// Precondition: kv_heads > 0.
  constexpr Index group_size() const { return query_heads / kv_heads; }
  /// Channels of all query heads together, the width of W_O's input.
  constexpr Index query_width() const { return query_heads * head_dim; }
  constexpr Index kv_width() const { return kv_heads * head_dim; }
  constexpr Index rotated_channels() const { return rotary_dim == 0 ? head_dim : rotary_dim; }
  double softmax_scale() const { return vha::softmax_scale(head_dim); }

  /// Throws Error naming the first field that cannot be.
  void validate() const {
    require_positive("hidden", hidden);
    require_positive("head_dim", head_dim);
    require_positive("query_heads", query_heads);
    require_positive("kv_heads", kv_heads);
    if (head_dim % 2 != 0)
      raise("head_dim", "an even number (it must be even for RoPE)", text(head_dim));
    if (query_heads % kv_heads != 0) {
      raise("query_heads", text("a multiple of kv_heads = ", kv_heads), text(query_heads));
    }
    if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
      raise("rotary_dim", text("an even number from 0 to head_dim = ", head_dim), text(rotary_dim));
    }
    if (window < 0) raise("window", "0 (none) or more", text(window));
    if (!is_finite(rope_theta) || rope_theta <= 0) {
      raise("rope_theta", "a positive number", text(rope_theta));
    }
    if (!is_finite(rms_norm_eps) || rms_norm_eps < 0) {
      raise("rms_norm_eps", "0 or more", text(rms_norm_eps));
    }
    if (!is_finite(value_scale)) raise("value_scale", "a finite number", text(value_scale));
    checked_product("hidden * query_heads * head_dim", {hidden, query_heads, head_dim});
  }

  /// The same for a layer that computes in `T`.
  template <ComputeScalar T>
  void validate_for() const {
    validate();
    if (!is_finite(static_cast<T>(value_scale))) {
      raise("value_scale", "a number in the range that the layer computes in", text(value_scale));
    }
    if (rms_norm_eps > 0 && static_cast<T>(rms_norm_eps) == T(0)) {
      raise("rms_norm_eps", "0, or a number in the range that the layer computes in",
            text(rms_norm_eps));
    }
  }
};

}  // namespace vha
