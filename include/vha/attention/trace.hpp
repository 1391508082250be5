// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/attention/weights.hpp>
#include <vha/core/activations.hpp>

namespace vha {

/// What a forward computes on its way, each `[batch, tokens, heads, width]`, zeros for padding. For
/// comparing a trainer with the library step by step, and for the backward pass.
template <ComputeScalar T>
struct AttentionTrace {
  Tensor4<T> q_physical;  ///< of a layer with Premix: query projection, before it
  Tensor4<T> q_virtual;   ///< query heads before norm and RoPE
  Tensor4<T> q_rotated;   ///< query heads after norm and RoPE
  Tensor4<T> k_rotated;   ///< keys of the new tokens after norm and RoPE
  Tensor4<T> v;           ///< values of the new tokens
  Tensor4<T> softmax;     ///< of each query head, width 2: the largest logit, and Σ e^(logit - it)
  Tensor4<T> heads;       ///< what the core gives
  Tensor4<T> heads_mixed;  ///< after Postmix, where the layer has one; before the gate

  template <class Layer>
  void resize(const Layer& layer, Index batch, Index tokens) {
    using Weights = typename Layer::Weights;
    const AttentionConfig& config = layer.config();
    const auto zeros = [&](Tensor4<T>& tensor, Index heads_count, Index width) {
      const Eigen::array<Index, 4> sizes{batch, tokens, heads_count, width};
      if (tensor.dimensions() != sizes) {
        tensor.resize(0, 0, 0, 0);  // else Eigen keeps a freed address where the allocation throws
        tensor.resize(sizes);
      }
      tensor.setZero();
    };
    if constexpr (Weights::has_premix) {
      const auto& premix = layer.weights().premix;
      zeros(q_physical, premix.physical_heads(config), premix.physical_head_dim());
    }
    for (auto* tensor : {&q_virtual, &q_rotated, &heads, &heads_mixed}) {
      zeros(*tensor, config.query_heads, config.head_dim);
    }
    zeros(softmax, config.query_heads, 2);
    for (auto* tensor : {&k_rotated, &v}) zeros(*tensor, config.kv_heads, config.head_dim);
  }
};

}  // namespace vha
