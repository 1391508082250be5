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

  /// The gradients for `dy`, that of the gated heads, which becomes that of the heads `y` before the
  /// gate. `y` and `dy` are `[tokens, width]`, `logits` as large; adds the projection's gradients where
  /// they are asked for, and that of x to `dx`, `[tokens, hidden]`. Precondition: none overlap.
  template <ComputeScalar T>
  void backward(const MatrixView<T>& x, const T* y, T* dy, T* logits, T* dx,
                LinearGradients<T>& gradients, ProductWorkspace<T>& workspace) const {
    projection(x, logits, projection.out(), workspace);
    for (Index k = 0; k < x.rows * projection.out(); ++k) {
      const T gate = sigmoid(logits[k]);
      logits[k] = dy[k] * y[k] * gate * (T(1) - gate);
      dy[k] *= gate;
    }
    const auto dlogits =
        row_major_view(static_cast<const T*>(logits), x.rows, projection.out(), projection.out());
    projection.backward(x, dlogits, dx, true, gradients, workspace);
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
