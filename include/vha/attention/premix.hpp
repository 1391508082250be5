// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <vector>
#include <vha/core/activations.hpp>
#include <vha/core/config.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/activation.hpp>
#include <vha/ops/matrix_product.hpp>

namespace vha {

/// One matrix per K/V group on every physical query head. Virtual head `g·H' + i` is `Q_i · P_g`:
///
///                                    P_0      P_1
///     Q_0 | Q_1   (H' = 2)   ->   Q_0 P_0 | Q_1 P_0 | Q_0 P_1 | Q_1 P_1     (G = 2)
///
/// group after group, so that virtual head `j` reads K/V head `j / H'` as in any GQA layer. A map
/// may be rectangular, `[physical_head_dim, head_dim]`. An activation other than Identity stands
/// after the map, and such a Premix does not fold.
template <StorageScalar S, Activation A = Identity>
struct Premix {
  using Scalar = S;
  using ActivationType = A;

  std::vector<Weight<S>> maps;  ///< P_g, `[physical_head_dim, head_dim]`, one per K/V group
  [[no_unique_address]] A activation = {};

  Index kv_heads() const { return static_cast<Index>(maps.size()); }
  Index physical_head_dim() const { return maps.empty() ? 0 : maps.front().rows(); }
  /// Heads that the query projection gives, each `physical_head_dim` wide.
  Index physical_heads(const AttentionConfig& config) const { return config.group_size(); }
  /// The layer's query heads as the maps write them to `data`.
  template <class T>
  HeadsView<T> virtual_heads(T* data, Index tokens, const AttentionConfig& config) const {
    return group_major_heads(data, tokens, config.kv_heads, config.group_size(), config.head_dim);
  }

  /// Writes the virtual heads of `physical`, token-major `[tokens, H' * physical_head_dim]`, to
  /// `heads`, `[kv_heads, tokens, H', head_dim]`.
  /// Precondition: `heads` is of `virtual_heads`, and the widths are the maps'.
  template <Operand P>
  void operator()(const Compute<P>* physical, const HeadsView<Compute<P>>& heads,
                  ProductWorkspace<P>& workspace) const {
    const Index rows = heads.tokens * heads.group_size;
    const Index width = heads.head_dim;
    const auto physical_rows =
        row_major_view(physical, rows, physical_head_dim(), physical_head_dim());
    for (Index group = 0; group < kv_heads(); ++group) {
      Compute<P>* const target = heads.head(0, group, 0);
      multiply(physical_rows, maps[static_cast<std::size_t>(group)].view(), target, width, false,
               workspace);
      if constexpr (!std::same_as<A, Identity>) {
        for (Index k = 0; k < rows * width; ++k) target[k] = activation(target[k]);
      }
    }
  }

  /// The gradients for that of the virtual heads, `[kv_heads, tokens, H', head_dim]`, which is
  /// overwritten where there is an activation. Adds Σ Q_iᵀ·dQ_(g,i) to the gradient of each map that
  /// has elements, and writes that of a physical head, the sum over its users Σ_g dQ_(g,i)·P_gᵀ, to
  /// `physical_gradient`, token-major `[tokens, H' * physical_head_dim]`.
  /// Precondition: as the forward's, and as many gradients as maps.
  template <ComputeScalar T>
  void backward(const T* physical, const HeadsView<T>& virtual_gradient, T* physical_gradient,
                std::vector<RowMajorMatrix<T>>& gradients, ProductWorkspace<T>& workspace) const {
    static_assert(DifferentiableActivation<A>,
                  "vha::Premix::backward: give the activation a member derivative(x)");
    const Index rows = virtual_gradient.tokens * virtual_gradient.group_size;
    const Index width = virtual_gradient.head_dim;
    const auto heads = row_major_view(physical, rows, physical_head_dim(), physical_head_dim());
    for (Index group = 0; group < kv_heads(); ++group) {
      const auto map = maps[static_cast<std::size_t>(group)].view();
      T* const gradient = virtual_gradient.head(0, group, 0);
      if constexpr (!std::same_as<A, Identity>) {
        RowMajorMatrix<T> before(rows, width);
        multiply(heads, map, before.data(), width, false, workspace);
        for (Index k = 0; k < rows * width; ++k) {
          gradient[k] *= activation.derivative(before.data()[k]);
        }
      }
      const auto rows_of = row_major_view(static_cast<const T*>(gradient), rows, width, width);
      multiply(rows_of, map.transposed(), physical_gradient, physical_head_dim(), group > 0,
               workspace);
      RowMajorMatrix<T>& map_gradient = gradients[static_cast<std::size_t>(group)];
      if (map_gradient.size() == 0) continue;
      multiply(heads.transposed(), rows_of, map_gradient.data(), width, true, workspace);
    }
  }

  /// The virtual heads `[batch, tokens, kv_heads * H', head_dim]` of physical ones
  /// `[batch, tokens, H', physical_head_dim]`. Throws Error where they do not fit the maps.
  Tensor4<Compute<S>> operator()(const Tensor4<Compute<S>>& physical) const {
    using T = Compute<S>;
    if (maps.empty()) raise("premix.maps", "a map for each of kv_heads", "none");
    const Index head_dim = maps.front().cols();
    require_shape(kv_heads(), head_dim);
    require_size("physical.dimension(3)", physical_head_dim(), physical.dimension(3));
    const Index tokens = physical.dimension(0) * physical.dimension(1);
    const Index heads = physical.dimension(2);
    Tensor4<T> result(physical.dimension(0), physical.dimension(1), kv_heads() * heads, head_dim);
    Buffer<T> group_major;
    const auto from =
        group_major_heads(group_major.reserve(result.size()), tokens, kv_heads(), heads, head_dim);
    ProductWorkspace<T> workspace;
    (*this)(physical.data(), from, workspace);
    const auto to = heads_view(result, heads);
    for (Index token = 0; token < tokens; ++token) {
      for (Index group = 0; group < kv_heads(); ++group) {
        std::copy_n(from.head(token, group, 0), heads * head_dim, to.head(token, group, 0));
      }
    }
    return result;
  }

  /// Throws Error unless there is a map for each of the layer's K/V heads, all of one shape that fits.
  void validate(const AttentionConfig& config) const {
    require_shape(config.kv_heads, config.head_dim);
  }

  /// Throws Error unless there are `groups` maps, all `[physical_head_dim, head_dim]`.
  void require_shape(Index groups, Index head_dim) const {
    require_size("premix.maps.size() (one map for each of kv_heads)", groups, kv_heads());
    for (Index group = 0; group < groups; ++group) {
      const auto& map = maps[static_cast<std::size_t>(group)];
      if (map.size() == 0) raise(text("premix.maps[", group, "]"), "a matrix", "none");
      vha::require_shape(text("premix.maps[", group, "]"), map, physical_head_dim(), head_dim);
    }
  }

  template <StorageScalar T>
  Premix<T, A> cast() const {
    Premix<T, A> result{{}, activation};
    for (const auto& map : maps) result.maps.push_back(map.template cast<T>());
    return result;
  }
};

/// The maps of a tensor `[kv_heads, physical_head_dim, head_dim]`, row-major, viewed in place; the
/// memory must live as long as they. Throws Error for a null pointer or a negative size.
template <StorageScalar S, class Bits>
std::vector<Weight<S>> view_premix_maps(const Bits* data, Index kv_heads, Index physical_head_dim,
                                        Index head_dim) {
  const auto stacked = Weight<S>::view_in_out(
      data, checked_product("premix", {kv_heads, physical_head_dim}), head_dim);
  std::vector<Weight<S>> maps;
  for (Index group = 0; group < kv_heads; ++group) {
    maps.push_back(Weight<S>::view_in_out(stacked.view().address(group * physical_head_dim, 0),
                                          physical_head_dim, head_dim));
  }
  return maps;
}

}  // namespace vha
