// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <vha/core/activations.hpp>
#include <vha/core/weight.hpp>

namespace vha {

/// y_c = x_c · w_c / √(mean(x²) + eps), over the channels of each head by itself (Qwen3's QK-norm).
template <StorageScalar S>
struct RmsNorm {
  Weight<S> weight;  ///< `[1, head_dim]`; shared by all heads
  double eps = 1e-6;

  /// Normalises every head in place. `scratch` holds the weight as `T`.
  /// Precondition: the weight is as wide as the heads.
  template <ComputeScalar T>
  void operator()(const HeadsView<T>& heads, Buffer<T>& scratch) const {
    using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
    const Index channels = heads.head_dim;
    Row scale(scratch.reserve(channels), channels);
    weight.copy_to(scale.data());
    for_each_head(heads, [&](Index, T* head) {
      Row x(head, channels);
      const T mean_square = x.square().sum() / static_cast<T>(channels);
      x *= scale * (T(1) / std::sqrt(mean_square + static_cast<T>(eps)));
    });
  }

  /// The gradients for `dy`, that of the normalised heads, which becomes that of the heads `x` before
  /// the norm. With r = 1 / √(mean(x²) + eps), x̂ = r·x and g = w·dy:
  ///
  ///     dw += Σ x̂·dy,   dx = r·(g - x̂·mean(g·x̂))
  ///
  /// `weight_gradient`, `[head_dim]`, may be null. Precondition: both views have the same heads.
  template <ComputeScalar T>
  void backward(const HeadsView<const T>& x, const HeadsView<T>& dy, T* weight_gradient,
                Buffer<T>& scratch) const {
    using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
    using ConstRow = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;
    const Index channels = x.head_dim;
    Row scale(scratch.reserve(2 * channels), channels);
    Row normalised(scale.data() + channels, channels);
    weight.copy_to(scale.data());
    for (Index token = 0; token < x.tokens; ++token) {
      for (Index group = 0; group < x.groups; ++group) {
        for (Index member = 0; member < x.group_size; ++member) {
          const ConstRow input(x.head(token, group, member), channels);
          Row gradient(dy.head(token, group, member), channels);
          const T mean_square = input.square().sum() / static_cast<T>(channels);
          const T factor = T(1) / std::sqrt(mean_square + static_cast<T>(eps));
          normalised = factor * input;
          if (weight_gradient != nullptr) {
            Row(weight_gradient, channels) += normalised * gradient;
          }
          gradient *= scale;
          const T along = (gradient * normalised).sum() / static_cast<T>(channels);
          gradient = factor * (gradient - along * normalised);
        }
      }
    }
  }

  /// The normalised heads of a tensor `[batch, tokens, heads, head_dim]`. Throws Error where the
  /// weight is of another width.
  Tensor4<Compute<S>> operator()(Tensor4<Compute<S>> heads) const {
    require_vector("rms_norm.weight", weight, heads.dimension(3));
    Buffer<Compute<S>> scratch;
    (*this)(heads_view(heads), scratch);
    return heads;
  }
};

}  // namespace vha
