// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vha/attention/postmix.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/weight.hpp>
#include <vha/parallel/communicator.hpp>

namespace vha {

/// The part of a Postmix for one rank's heads, by the same rows of A and B:
///
///     Y'_k = Y_k + B_k·(Σ over ranks of A_kᵀ·Y_k)
///
/// which exchanges rank · head_dim numbers for each token, and for the gradient as many twice. The ranks
/// add up once for a block of tokens, on the thread that called the layer.
template <StorageScalar S, Activation Act, Communicator Comm>
class ParallelPostmix : private Postmix<S, Act> {
  using Base = Postmix<S, Act>;

 public:
  using Base::a;
  using Base::b;
  using Base::rank;
  using Base::require_shape;
  using typename Base::ActivationType;
  using typename Base::Scalar;

  ParallelPostmix() = default;
  /// The part that has the heads [first_head, first_head + heads). `communicator` must live as long.
  /// Precondition: `whole` has these heads.
  ParallelPostmix(const Base& whole, Index first_head, Index heads, Comm& communicator)
      : Base(whole), communicator_(&communicator) {
    for (Weight<S>* const weight : {&a, &b}) {
      *weight = weight->block(first_head, 0, heads, weight->cols());
    }
  }

  template <ComputeScalar T, class LayerWorkspace>
  void mix(const HeadsView<T>& heads, LayerWorkspace& workspace) const {
    const Index width = rank() * heads.head_dim;
    T* const sums = workspace.head_sums.reserve(heads.tokens * width);
    workspace.for_each_slice(heads.tokens, [&](Index first, Index count, Buffer<T>& scratch) {
      this->contract(HeadsView<const T>(heads.slice(first, count)), rows(scratch).a,
                     sums + first * width);
    });
    add_up(sums, heads.tokens * width);
    workspace.for_each_slice(heads.tokens, [&](Index first, Index count, Buffer<T>& scratch) {
      const auto slice = heads.slice(first, count);
      this->spread(slice, rows(scratch).b, sums + first * width);
      this->activate(slice);
    });
  }

  /// Adds to the gradients of this rank's rows of A and B.
  template <ComputeScalar T, class BackwardWorkspace>
  void mix_backward(const HeadsView<const T>& y, const HeadsView<T>& dy, T* a_gradient,
                    T* b_gradient, BackwardWorkspace& workspace) const {
    const Index width = rank() * y.head_dim;
    T* const sums = workspace.head_sums.reserve(y.tokens * width);
    T* const sum_gradients = workspace.head_sum_gradients.reserve(y.tokens * width);
    const auto each_slice = [&](const auto& body) {
      workspace.for_each_slice(y.tokens, 0, static_cast<T*>(nullptr),
                               [&](Index first, Index count, T*, Buffer<T>& scratch) {
                                 body(first, y.slice(first, count), dy.slice(first, count),
                                      rows(scratch));
                               });
    };
    each_slice([&](Index first, const auto& heads, const auto&, const auto& rows_of) {
      this->contract(heads, rows_of.a, sums + first * width);
    });
    add_up(sums, y.tokens * width);
    each_slice([&](Index first, const auto& heads, const auto& gradient, const auto& rows_of) {
      this->activate_backward(heads, rows_of.b, sums + first * width, gradient);
      this->contract(HeadsView<const T>(gradient), rows_of.b, sum_gradients + first * width);
    });
    add_up(sum_gradients, y.tokens * width);
    this->for_each_gradient_slice(
        y.tokens, a_gradient, b_gradient, workspace,
        [&](Index first, Index count, T* a_part, T* b_part, Buffer<T>& scratch) {
          const auto gradient = dy.slice(first, count);
          const T* const slice_gradients = sum_gradients + first * width;
          if (a_part != nullptr) {
            this->add_products(y.slice(first, count), slice_gradients, a_part);
          }
          if (b_part != nullptr) {
            this->add_products(HeadsView<const T>(gradient), sums + first * width, b_part);
          }
          this->spread(gradient, rows(scratch).a, slice_gradients);
        });
  }

 private:
  template <ComputeScalar T>
  auto rows(Buffer<T>& scratch) const {
    return typename Base::template Rows<T>(*this, 0, scratch);
  }
  template <ComputeScalar T>
  void add_up(T* values, Index size) const {
    communicator_->sum(std::span<T>(values, static_cast<std::size_t>(size)));
  }

  Comm* communicator_ = nullptr;
};

}  // namespace vha
