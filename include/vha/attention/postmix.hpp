// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <utility>
#include <vha/core/activations.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/activation.hpp>

namespace vha {

/// Mixing of the head outputs along the head axis, token by token:
///
///     Y' = M·Y = Y + B·(Aᵀ·Y),   M = I + B·Aᵀ
///
/// with A and B `[query_heads, rank]` and Y `[query_heads, head_dim]`.
/// In public trainers' files A is `vha_postmix_U` and B is `vha_postmix_V`. Without `residual` the
/// I is left out, which is how `from_dense` holds any M. An activation other than Identity stands
/// after the mixing, and such a Postmix does not fold.
template <StorageScalar S, Activation Act = Identity>
struct Postmix {
  using Scalar = S;
  using ActivationType = Act;

  Weight<S> a;
  Weight<S> b;
  bool residual = true;
  [[no_unique_address]] Act activation = {};

  /// The mixing by a given M `[query_heads, query_heads]`.
  static Postmix from_dense(Weight<S> mixing) {
    const Index heads = mixing.rows();
    vha::require_shape("postmix", mixing, heads, heads);
    RowMajorMatrix<S> identity(heads, heads);
    for (Index i = 0; i < heads; ++i) {
      for (Index j = 0; j < heads; ++j) identity(i, j) = convert<S>(i == j ? 1.0 : 0.0);
    }
    return {Weight<S>::own(std::move(identity)), std::move(mixing), false};
  }

  Index rank() const { return a.cols(); }

  /// M in double, `[query_heads, query_heads]`. Throws Error where A and B do not fit each other.
  RowMajorMatrix<double> dense() const {
    require_shape(a.rows());
    RowMajorMatrix<double> mixing = b.template to<double>() * a.template to<double>().transpose();
    if (residual) mixing.diagonal().array() += 1;
    return mixing;
  }

  /// Mixes the heads in place; `scratch` holds A and B as `T` and the rank's channels.
  /// Precondition: A and B have a row for each head.
  template <ComputeScalar T>
  void operator()(const HeadsView<T>& heads, Buffer<T>& scratch) const {
    const Index channels = heads.head_dim;
    const Index count = heads.groups * heads.group_size;
    T* const a_rows = scratch.reserve(2 * count * rank() + rank() * channels);
    T* const b_rows = a_rows + count * rank();
    T* const mixed = b_rows + count * rank();
    a.copy_to(a_rows);
    b.copy_to(b_rows);
    using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
    for (Index token = 0; token < heads.tokens; ++token) {
      const auto each_head = [&](auto&& body) {
        for (Index j = 0; j < count; ++j) {
          body(j, Row(heads.head(token, j / heads.group_size, j % heads.group_size), channels));
        }
      };
      std::fill_n(mixed, rank() * channels, T(0));
      each_head([&](Index j, const Row& y) {
        for (Index k = 0; k < rank(); ++k) {
          Row(mixed + k * channels, channels) += a_rows[j * rank() + k] * y;
        }
      });
      each_head([&](Index j, Row y) {
        if (!residual) y.setZero();
        for (Index k = 0; k < rank(); ++k) {
          y += b_rows[j * rank() + k] * Row(mixed + k * channels, channels);
        }
        if constexpr (!std::same_as<Act, Identity>) {
          for (Index c = 0; c < channels; ++c) y[c] = activation(y[c]);
        }
      });
    }
  }

  /// The gradients for `dy`, that of the mixed heads, which becomes that of the heads `y` before:
  ///
  ///     dY = dY' + A·(Bᵀ·dY'),   dA += Y·(Bᵀ·dY')ᵀ,   dB += dY'·(Aᵀ·Y)ᵀ
  ///
  /// (without the first dY' where there is no residual). `a_gradient` and `b_gradient`, row-major
  /// `[query_heads, rank]`, may be null. Precondition: as the forward's, and both views have the same heads.
  template <ComputeScalar T>
  void backward(const HeadsView<const T>& y, const HeadsView<T>& dy, T* a_gradient, T* b_gradient,
                Buffer<T>& scratch) const {
    static_assert(DifferentiableActivation<Act>,
                  "vha::Postmix::backward: give the activation a member derivative(x)");
    const Index channels = y.head_dim;
    const Index count = y.groups * y.group_size;
    using Matrix = Eigen::Map<RowMajorMatrix<T>>;
    T* memory = scratch.reserve(2 * count * rank() + 2 * rank() * channels + 2 * count * channels);
    const auto take = [&](Index rows, Index cols) {
      T* const begin = memory;
      memory += rows * cols;
      return Matrix(begin, rows, cols);
    };
    Matrix a_rows = take(count, rank()), b_rows = take(count, rank());
    Matrix mixed = take(rank(), channels), mixed_gradient = take(rank(), channels);
    Matrix heads = take(count, channels), gradient = take(count, channels);
    a.copy_to(a_rows.data());
    b.copy_to(b_rows.data());
    for (Index token = 0; token < y.tokens; ++token) {
      for (Index j = 0; j < count; ++j) {
        const Index group = j / y.group_size, member = j % y.group_size;
        std::copy_n(y.head(token, group, member), channels, heads.row(j).data());
        std::copy_n(dy.head(token, group, member), channels, gradient.row(j).data());
      }
      mixed.noalias() = a_rows.transpose().lazyProduct(heads);
      if constexpr (!std::same_as<Act, Identity>) {
        for (Index j = 0; j < count; ++j) {
          for (Index c = 0; c < channels; ++c) {
            const T before = (residual ? heads(j, c) : T(0)) + b_rows.row(j).dot(mixed.col(c));
            gradient(j, c) *= activation.derivative(before);
          }
        }
      }
      mixed_gradient.noalias() = b_rows.transpose().lazyProduct(gradient);
      if (a_gradient != nullptr) {
        Matrix(a_gradient, count, rank()) += heads.lazyProduct(mixed_gradient.transpose());
      }
      if (b_gradient != nullptr) {
        Matrix(b_gradient, count, rank()) += gradient.lazyProduct(mixed.transpose());
      }
      if (!residual) gradient.setZero();
      gradient += a_rows.lazyProduct(mixed_gradient);
      for (Index j = 0; j < count; ++j) {
        std::copy_n(gradient.row(j).data(), channels,
                    dy.head(token, j / y.group_size, j % y.group_size));
      }
    }
  }

  /// The mixed heads of a tensor `[batch, tokens, query_heads, head_dim]`. Throws Error where A and
  /// B have other heads.
  Tensor4<Compute<S>> operator()(Tensor4<Compute<S>> heads) const {
    require_shape(heads.dimension(2));
    Buffer<Compute<S>> scratch;
    (*this)(heads_view(heads), scratch);
    return heads;
  }

  /// Throws Error unless A and B are `[query_heads, rank]` with the same rank.
  void require_shape(Index query_heads) const {
    if (a.size() == 0) {
      raise("postmix.a", text("[", query_heads, ", rank], rank 1 or more"),
            shape_text(a.rows(), a.cols()));
    }
    vha::require_shape("postmix.a", a, query_heads, rank());
    vha::require_shape("postmix.b", b, query_heads, rank());
  }

  template <StorageScalar T>
  Postmix<T, Act> cast() const {
    return {a.template cast<T>(), b.template cast<T>(), residual, activation};
  }
};

}  // namespace vha
