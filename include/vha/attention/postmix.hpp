// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <type_traits>
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
    const Rows<T> rows(*this, rank() * heads.head_dim, scratch);
    for (Index token = 0; token < heads.tokens; ++token) {
      const auto y = heads.slice(token, 1);
      contract(HeadsView<const T>(y), rows.a, rows.rest);
      spread(y, rows.b, rows.rest);
      activate(y);
    }
  }

  /// The same for a block of a layer's tokens, in slices, on all threads of the layer's `workspace`.
  template <ComputeScalar T, class LayerWorkspace>
  void mix(const HeadsView<T>& heads, LayerWorkspace& workspace) const {
    workspace.for_each_slice(heads.tokens, [&](Index first, Index count, Buffer<T>& scratch) {
      (*this)(heads.slice(first, count), scratch);
    });
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
    const Index sums = rank() * y.head_dim;
    const Rows<T> rows(*this, 2 * sums, scratch);
    T* const mixed = rows.rest;
    T* const mixed_gradient = rows.rest + sums;
    for (Index token = 0; token < y.tokens; ++token) {
      const auto before = y.slice(token, 1);
      const auto gradient = dy.slice(token, 1);
      const HeadsView<const T> upstream = gradient;
      contract(before, rows.a, mixed);
      activate_backward(before, rows.b, mixed, gradient);
      contract(upstream, rows.b, mixed_gradient);
      if (a_gradient != nullptr) add_products(before, mixed_gradient, a_gradient);
      if (b_gradient != nullptr) add_products(upstream, mixed, b_gradient);
      spread(gradient, rows.a, mixed_gradient);
    }
  }

  /// The same for all tokens of a layer, in slices, on all threads of the layer's `workspace`.
  template <ComputeScalar T, class BackwardWorkspace>
  void mix_backward(const HeadsView<const T>& y, const HeadsView<T>& dy, T* a_gradient,
                    T* b_gradient, BackwardWorkspace& workspace) const {
    for_each_gradient_slice(
        y.tokens, a_gradient, b_gradient, workspace,
        [&](Index first, Index count, T* a_part, T* b_part, Buffer<T>& scratch) {
          backward(y.slice(first, count), dy.slice(first, count), a_part, b_part, scratch);
        });
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

 protected:
  // The steps of the mixing and of its gradient, over any of the tokens and over the heads that A and B
  // have rows for: all of a layer's, or the part of them that one rank of several has.

  /// A and B as `T`, row-major, at the start of a scratch memory, and the memory behind them.
  template <ComputeScalar T>
  struct Rows {
    Rows(const Postmix& postmix, Index rest_size, Buffer<T>& scratch) {
      const Index size = postmix.a.size();
      T* const memory = scratch.reserve(2 * size + rest_size);
      postmix.a.copy_to(memory);
      postmix.b.copy_to(memory + size);
      a = memory;
      b = memory + size;
      rest = memory + 2 * size;
    }
    const T* a;
    const T* b;
    T* rest;
  };

  template <class T>
  using Channels =
      Eigen::Map<std::conditional_t<std::is_const_v<T>,
                                    const Eigen::Array<std::remove_const_t<T>, Eigen::Dynamic, 1>,
                                    Eigen::Array<T, Eigen::Dynamic, 1>>>;

  /// Calls `body(j, channels)` for each head of the token.
  template <class T, class Body>
  static void each_head(const HeadsView<T>& heads, Index token, Body&& body) {
    for (Index j = 0; j < heads.groups * heads.group_size; ++j) {
      body(j, Channels<T>(heads.head(token, j / heads.group_size, j % heads.group_size),
                          heads.head_dim));
    }
  }

  /// Writes Rᵀ·Y, `[tokens, rank, head_dim]`, to `sums`, for rows R `[heads, rank]` and heads Y.
  template <ComputeScalar T>
  void contract(const HeadsView<const T>& heads, const T* rows, T* sums) const {
    const Index channels = heads.head_dim;
    std::fill_n(sums, heads.tokens * rank() * channels, T(0));
    for (Index token = 0; token < heads.tokens; ++token, sums += rank() * channels) {
      each_head(heads, token, [&](Index j, const auto& y) {
        for (Index k = 0; k < rank(); ++k) {
          Channels<T>(sums + k * channels, channels) += rows[j * rank() + k] * y;
        }
      });
    }
  }

  /// Makes heads Y Y + R·sums, or R·sums where there is no residual, for rows R `[heads, rank]` and
  /// `sums` `[tokens, rank, head_dim]`.
  template <ComputeScalar T>
  void spread(const HeadsView<T>& heads, const T* rows, const T* sums) const {
    const Index channels = heads.head_dim;
    for (Index token = 0; token < heads.tokens; ++token, sums += rank() * channels) {
      each_head(heads, token, [&](Index j, auto y) {
        if (!residual) y.setZero();
        for (Index k = 0; k < rank(); ++k) {
          y += rows[j * rank() + k] * Channels<const T>(sums + k * channels, channels);
        }
      });
    }
  }

  template <ComputeScalar T>
  void activate(const HeadsView<T>& heads) const {
    if constexpr (!std::same_as<Act, Identity>) {
      for_each_head(heads, [&](Index, T* y) {
        for (Index c = 0; c < heads.head_dim; ++c) y[c] = activation(y[c]);
      });
    }
  }

  /// Takes the gradient of what the activation gives to that of what it is given, which is made again
  /// from the heads `y`, B's rows and `mixed`, Aᵀ·Y of all heads.
  template <ComputeScalar T>
  void activate_backward(const HeadsView<const T>& y, const T* b_rows, const T* mixed,
                         const HeadsView<T>& gradient) const {
    static_assert(DifferentiableActivation<Act>,
                  "vha::Postmix::backward: give the activation a member derivative(x)");
    if constexpr (!std::same_as<Act, Identity>) {
      const Index channels = y.head_dim;
      for (Index token = 0; token < y.tokens; ++token, mixed += rank() * channels) {
        each_head(gradient, token, [&](Index j, auto dy) {
          const T* const head = y.head(token, j / y.group_size, j % y.group_size);
          for (Index c = 0; c < channels; ++c) {
            T before = residual ? head[c] : T(0);
            for (Index k = 0; k < rank(); ++k)
              before += b_rows[j * rank() + k] * mixed[k * channels + c];
            dy[c] *= activation.derivative(before);
          }
        });
      }
    }
  }

  /// Adds Y·sumsᵀ over all tokens to `gradient`, row-major `[heads, rank]`.
  template <ComputeScalar T>
  void add_products(const HeadsView<const T>& heads, const T* sums, T* gradient) const {
    const Index channels = heads.head_dim;
    for (Index token = 0; token < heads.tokens; ++token, sums += rank() * channels) {
      each_head(heads, token, [&](Index j, const auto& y) {
        for (Index k = 0; k < rank(); ++k) {
          gradient[j * rank() + k] += (y * Channels<const T>(sums + k * channels, channels)).sum();
        }
      });
    }
  }

  /// Calls `body(first, count, a_part, b_part, scratch)` for slices of the tokens, and adds the parts of
  /// the gradients, in the order of the slices, to those that are not null; their parts are then too.
  template <ComputeScalar T, class BackwardWorkspace, class Body>
  void for_each_gradient_slice(Index tokens, T* a_gradient, T* b_gradient,
                               BackwardWorkspace& workspace, Body&& body) const {
    const Index size = a.size();
    const bool asked = a_gradient != nullptr || b_gradient != nullptr;
    RowMajorMatrix<T> total = RowMajorMatrix<T>::Zero(2, size);
    workspace.for_each_slice(tokens, 2 * size, asked ? total.data() : nullptr,
                             [&](Index first, Index count, T* part, Buffer<T>& scratch) {
                               body(first, count, a_gradient == nullptr ? nullptr : part,
                                    b_gradient == nullptr ? nullptr : part + size, scratch);
                             });
    for (Index k = 0; k < size; ++k) {
      if (a_gradient != nullptr) a_gradient[k] += total(0, k);
      if (b_gradient != nullptr) b_gradient[k] += total(1, k);
    }
  }
};

}  // namespace vha
