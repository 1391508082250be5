// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/ops/activation.hpp>
#include <vha/ops/linear.hpp>

namespace vha {

/// Elementwise gate on the mixed heads: Y' ⊙ sigmoid(X·W_gate + b), W_gate
/// `[hidden, query_heads * head_dim]`. Being nonlinear and between Postmix and W_O, it blocks the
/// fold of Postmix.
template <StorageScalar S>
struct SigmoidGate {
  Linear<S> projection;

  /// Multiplies the heads `y`, row-major `[tokens, width]`, by their gates, for x `[tokens, hidden]`;
  /// `logits` is as large as `y`. Precondition: they do not overlap.
  template <Operand P, ComputeScalar T>
  void operator()(const MatrixView<T>& x, T* y, T* logits, ProductWorkspace<P>& workspace) const {
    projection(x, logits, projection.out(), workspace);
    for (Index k = 0; k < x.rows * projection.out(); ++k) y[k] *= sigmoid(logits[k]);
  }

  void require_shape(Index hidden, Index width) const {
    projection.require_shape("gate.projection", hidden, width);
  }

  template <StorageScalar T>
  SigmoidGate<T> cast() const {
    return {projection.template cast<T>()};
  }
};

}  // namespace vha
