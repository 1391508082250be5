// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/linear.hpp>

namespace vha {

/// Where a backward pass adds the gradients of a layer's weights, each row-major and of its weight's
/// shape. One without elements is not asked for and costs nothing: a frozen weight's.
///
///     auto gradients = vha::AttentionGradients<float>::zeros_like(layer);
///     gradients.premix.clear();  // the maps are frozen
template <ComputeScalar T>
struct AttentionGradients {
  LinearGradients<T> query, key, value, output;
  RowMajorMatrix<T> q_norm, k_norm;       ///< `[1, head_dim]`
  std::vector<RowMajorMatrix<T>> premix;  ///< kv_heads times `[physical_head_dim, head_dim]`
  RowMajorMatrix<T> postmix_a, postmix_b;
  LinearGradients<T> gate;

  /// Zeros for every weight that the layer has.
  template <class Layer>
  static AttentionGradients zeros_like(const Layer& layer) {
    AttentionGradients gradients;
    gradients.for_each(layer, [](const std::string&, const auto& weight, RowMajorMatrix<T>& zeros) {
      zeros.setZero(weight.rows(), weight.cols());
    });
    return gradients;
  }

  /// Throws Error naming the first gradient that is neither without elements nor of its weight's shape.
  template <class Layer>
  void require_fit(const Layer& layer) {
    const std::size_t maps = premix.size();
    if constexpr (Layer::Weights::has_premix) {
      if (maps != 0 && maps != layer.weights().premix.maps.size()) {
        raise("gradients.premix.size()", text("0 or ", layer.weights().premix.maps.size()),
              text(maps));
      }
    }
    for_each(layer, [](const std::string& name, const auto& weight, RowMajorMatrix<T>& gradient) {
      if (gradient.size() == 0) return;
      if (gradient.rows() != weight.rows() || gradient.cols() != weight.cols()) {
        raise("gradients." + name, shape_text(weight.rows(), weight.cols()),
              shape_text(gradient.rows(), gradient.cols()));
      }
    });
  }

  /// Calls `body(name, weight, gradient)` for every weight of the layer and its gradient. Where there
  /// are no gradients of Premix's maps, they are made, without elements.
  template <class Layer, class Body>
  void for_each(const Layer& layer, Body&& body) {
    using Weights = typename Layer::Weights;
    const Weights& weights = layer.weights();
    const auto linear = [&](const std::string& name, const auto& from, LinearGradients<T>& to) {
      body(name + ".weight", from.weight, to.weight);
      if (!from.bias.empty()) body(name + ".bias", from.bias, to.bias);
    };
    linear("query", weights.query, query);
    linear("key", weights.key, key);
    linear("value", weights.value, value);
    linear("output", weights.output, output);
    if (weights.has_qk_norm()) {
      body("q_norm", weights.q_norm, q_norm);
      body("k_norm", weights.k_norm, k_norm);
    }
    if constexpr (Weights::has_premix) {
      premix.resize(weights.premix.maps.size());
      for (std::size_t group = 0; group < premix.size(); ++group) {
        body(text("premix[", group, "]"), weights.premix.maps[group], premix[group]);
      }
    }
    if constexpr (Weights::has_postmix) {
      body("postmix_a", weights.postmix.a, postmix_a);
      body("postmix_b", weights.postmix.b, postmix_b);
    }
    if constexpr (Weights::has_gate) linear("gate", weights.gate.projection, gate);
  }
};

}  // namespace vha
