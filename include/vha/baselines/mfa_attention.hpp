// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>
#include <vha/attention/attention.hpp>
#include <vha/attention/premix.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/config.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/matrix_product.hpp>

namespace vha {

/// The query maps of multi-matrix factorisation attention (MFA, arXiv 2412.19255): all query heads
/// are made of one shared factor Q, each by a matrix of its own,
///
///     Q = X·W_Q   [tokens, factor_dim],     query head j = Q·P_j,  P_j [factor_dim, head_dim]
///
/// This is Premix with a "group" for each query head and one physical head, but for one K/V head that
/// all of them read. It stands in Premix's place in a layer's type and weights; the maps are
/// `premix.maps`, one for each query head.
template <StorageScalar S>
struct QueryFactor : Premix<S> {
  using Base = Premix<S>;

  Index physical_heads(const AttentionConfig&) const { return 1; }
  /// Head after head, `[query_heads, tokens, head_dim]`, of one K/V head.
  template <class T>
  HeadsView<T> virtual_heads(T* data, Index tokens, const AttentionConfig& config) const {
    return {.data = data,
            .tokens = tokens,
            .groups = 1,
            .group_size = config.query_heads,
            .head_dim = config.head_dim,
            .token_stride = config.head_dim,
            .group_stride = 0,
            .head_stride = tokens * config.head_dim};
  }

  template <Operand P>
  void operator()(const Compute<P>* factor, const HeadsView<Compute<P>>& heads,
                  ProductWorkspace<P>& workspace) const {
    Base::operator()(factor, heads_as_groups(heads), workspace);
  }

  template <ComputeScalar T>
  void backward(const T* factor, const HeadsView<T>& gradient, T* factor_gradient,
                std::vector<RowMajorMatrix<T>>& gradients, ProductWorkspace<T>& workspace) const {
    Base::backward(factor, heads_as_groups(gradient), factor_gradient, gradients, workspace);
  }

  /// Throws Error unless the layer has one K/V head, and there is a map for each of its query heads.
  void validate(const AttentionConfig& config) const {
    require_size("kv_heads (of a layer with one query factor)", 1, config.kv_heads);
    require_size("premix.maps.size() (one map for each of query_heads)", config.query_heads,
                 Base::kv_heads());
    Base::require_shape(config.query_heads, config.head_dim);
  }

  template <StorageScalar T>
  QueryFactor<T> cast() const {
    return {Base::template cast<T>()};
  }

 private:
  template <class T>
  static HeadsView<T> heads_as_groups(const HeadsView<T>& heads) {
    return {.data = heads.data,
            .tokens = heads.tokens,
            .groups = heads.group_size,
            .group_size = 1,
            .head_dim = heads.head_dim,
            .token_stride = heads.token_stride,
            .group_stride = heads.head_stride,
            .head_stride = 0};
  }
};

/// Multi-matrix factorisation attention (arXiv 2412.19255, eq. 9): one K/V head, as wide as each query
/// head, for more and wider query heads than a multi-head layer has. Its norm, where it has one, stands
/// behind the maps, so `fold_vha` multiplies them into W_Q: what is served is a GqaAttention of one K/V
/// head (MQA).
template <StorageScalar S>
using MfaAttention = Attention<S, QueryFactor<S>, NoPostmix, NoGate>;

}  // namespace vha
