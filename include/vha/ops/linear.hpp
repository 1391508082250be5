// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <string_view>
#include <vha/core/weight.hpp>
#include <vha/ops/matrix_product.hpp>

namespace vha {

/// Where the gradients of a Linear are added. A matrix without elements is not asked for, and costs
/// nothing.
template <ComputeScalar T>
struct LinearGradients {
  RowMajorMatrix<T> weight;  ///< `[in, out]`
  RowMajorMatrix<T> bias;    ///< `[1, out]`
};

/// Y = X·W + b with W `[in, out]` and b `[1, out]`, which may be absent.
template <StorageScalar S>
struct Linear {
  Weight<S> weight;
  Weight<S> bias = {};

  Index in() const { return weight.rows(); }
  Index out() const { return weight.cols(); }

  /// Writes X·W + b for X `[rows, in]` to `y`, row-major `[rows, out]`, rows `y_stride` apart.
  /// Products are taken in `P`. Precondition: X has `in()` columns; `y` does not overlap it.
  template <Operand P, StorageScalar X>
  void operator()(const MatrixView<X>& x, Compute<P>* y, Index y_stride,
                  ProductWorkspace<P>& workspace) const {
    multiply(x, weight.view(), y, y_stride, false, workspace);
    if (bias.empty()) return;
    for (Index row = 0; row < x.rows; ++row) {
      Compute<P>* const target = y + row * y_stride;
      for (Index j = 0; j < out(); ++j) target[j] += convert<Compute<P>>(bias(0, j));
    }
  }

  /// The gradients for `dy`, that of Y: adds Xᵀ·dY to the weight's and the sum of dY's rows to the
  /// bias's, where they are asked for, and writes dY·Wᵀ to `dx`, row-major `[rows, in]`, or adds it
  /// where `accumulate` is set; not where `dx` is null. Precondition: shapes fit, nothing overlaps.
  template <ComputeScalar T>
  void backward(const MatrixView<T>& x, const MatrixView<T>& dy, T* dx, bool accumulate,
                LinearGradients<T>& gradients, ProductWorkspace<T>& workspace) const {
    if (gradients.weight.size() != 0) {
      multiply(x.transposed(), dy, gradients.weight.data(), out(), true, workspace);
    }
    if (gradients.bias.size() != 0) {
      for (Index row = 0; row < dy.rows; ++row) {
        for (Index j = 0; j < out(); ++j) gradients.bias(0, j) += dy(row, j);
      }
    }
    if (dx != nullptr) multiply(dy, weight.view().transposed(), dx, in(), accumulate, workspace);
  }

  /// X·W + b for an Eigen matrix of `S`'s compute scalar, `[rows, in]`. Throws Error where the
  /// widths differ.
  template <class Derived>
  requires std::same_as<typename Derived::Scalar, Compute<S>> RowMajorMatrix<Compute<S>>
  operator()(const Eigen::MatrixBase<Derived>& x) const {
    require_bias_fits("linear");
    require_size("x.cols()", in(), x.cols());
    const RowMajorMatrix<Compute<S>> rows = x;
    RowMajorMatrix<Compute<S>> y(x.rows(), out());
    ProductWorkspace<Compute<S>> workspace;
    (*this)(row_major_view(rows.data(), rows.rows(), rows.cols(), rows.cols()), y.data(), out(),
            workspace);
    return y;
  }

  /// Throws Error naming `name`'s part unless W is `[in, out]` and the bias, if any, fits it.
  void require_shape(std::string_view name, Index in_channels, Index out_channels) const {
    vha::require_shape(text(name, ".weight"), weight, in_channels, out_channels);
    require_bias_fits(name);
  }

  template <StorageScalar T>
  Linear<T> cast() const {
    return {weight.template cast<T>(), bias.template cast<T>()};
  }

 private:
  void require_bias_fits(std::string_view name) const {
    if (!bias.empty()) require_vector(text(name, ".bias"), bias, out());
  }
};

}  // namespace vha
