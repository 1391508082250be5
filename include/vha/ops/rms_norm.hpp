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
