// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vha/attention/attention.hpp>
#include <vha/ops/normal.hpp>

namespace vha {

/// How a VHA layer starts its training.
struct InitialiseOptions {
  Index postmix_rank = 4;
  Index physical_head_dim = 0;   ///< 0: as wide as head_dim (a square Premix)
  double projection_std = 0.02;  ///< of the projections' elements
  double premix_std = 0.1;       ///< of (P_g - I)·√head_dim's elements, of a square Premix
  double postmix_std = 0.01;     ///< of A's elements; B starts at 0
  bool qk_norm = true;           ///< with weights of 1, or without
  std::uint64_t seed = 0;
};

namespace detail {

/// A matrix of N(0, std²), plus `diagonal` on the diagonal. `std` is cut to 24 bits: its product with
/// a sample, of 27, is then exact in double, and no fused multiply-add can change the sum.
template <StorageScalar S>
RowMajorMatrix<S> normal_matrix(Index rows, Index cols, double std, NormalGenerator& normal,
                                double diagonal = 0) {
  const double exact_std = static_cast<float>(std);
  RowMajorMatrix<S> matrix(rows, cols);
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < cols; ++j) {
      matrix(i, j) = convert<S>(exact_std * normal() + (i == j ? diagonal : 0.0));
    }
  }
  return matrix;
}

/// A matrix `[rows, cols]` with orthogonal rows (rows <= cols) or columns, each of the length
/// `scale`: Gram-Schmidt, twice, on normal numbers. Every product goes through memory, so that
/// contraction cannot make platforms differ.
template <StorageScalar S>
RowMajorMatrix<S> orthogonal_matrix(Index rows, Index cols, double scale, NormalGenerator& normal) {
  const Index count = std::min(rows, cols), length = std::max(rows, cols);
  RowMajorMatrix<double> q = normal_matrix<double>(count, length, 1, normal);
  const auto dot = [&](Index a, Index b) {
    double sum = 0;
    for (Index k = 0; k < length; ++k) {
      const volatile double product = q(a, k) * q(b, k);
      sum += product;
    }
    return sum;
  };
  for (Index i = 0; i < count; ++i) {
    for (Index again = 0; again < 2; ++again) {
      for (Index j = 0; j < i; ++j) {
        const double overlap = dot(i, j);
        for (Index k = 0; k < length; ++k) {
          const volatile double product = overlap * q(j, k);
          q(i, k) -= product;
        }
      }
    }
    const double norm = std::sqrt(dot(i, i));
    for (Index k = 0; k < length; ++k) q(i, k) /= norm;
  }
  RowMajorMatrix<S> matrix(rows, cols);
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < cols; ++j) {
      matrix(i, j) = convert<S>(scale * (rows <= cols ? q(i, j) : q(j, i)));
    }
  }
  return matrix;
}

}  // namespace detail

/// A VHA layer at the start of training, the same for a seed on every platform: projections
/// N(0, projection_std²); P_g = I + (premix_std/√d)·N(0,1), or orthogonal times √(d/d_q) where it is
/// rectangular; Postmix A = N(0, postmix_std²) and B = 0. It computes nearly what a plain GQA layer with
/// the physical heads repeated in every group does. Throws Error where a size cannot be.
template <StorageScalar S>
VhaAttention<S> initialise_vha(const AttentionConfig& config,
                               const InitialiseOptions& options = {}) {
  config.validate();
  require_positive("postmix_rank", options.postmix_rank);
  const Index head_dim = config.head_dim;
  const Index physical_head_dim =
      options.physical_head_dim == 0 ? head_dim : options.physical_head_dim;
  require_positive("physical_head_dim", physical_head_dim);
  for (const double std : {options.projection_std, options.premix_std, options.postmix_std}) {
    if (!is_finite(std) || std < 0) raise("standard deviation", "a number of 0 or more", text(std));
  }
  checked_product("query", {config.hidden, config.group_size(), physical_head_dim, sizeof(S)});
  checked_product("postmix", {config.query_heads, options.postmix_rank, sizeof(S)});

  NormalGenerator normal(options.seed);
  const auto projection = [&](Index in, Index out) {
    return Linear<S>{
        Weight<S>::own(detail::normal_matrix<S>(in, out, options.projection_std, normal))};
  };
  typename VhaAttention<S>::Weights weights;
  weights.query = projection(config.hidden, config.group_size() * physical_head_dim);
  weights.key = projection(config.hidden, config.kv_width());
  weights.value = projection(config.hidden, config.kv_width());
  weights.output = projection(config.query_width(), config.hidden);
  const double width = static_cast<double>(head_dim);
  for (Index group = 0; group < config.kv_heads; ++group) {
    weights.premix.maps.push_back(Weight<S>::own(
        physical_head_dim == head_dim
            ? detail::normal_matrix<S>(head_dim, head_dim, options.premix_std / std::sqrt(width),
                                       normal, 1.0)
            : detail::orthogonal_matrix<S>(
                  physical_head_dim, head_dim,
                  std::sqrt(width / static_cast<double>(physical_head_dim)), normal)));
  }
  weights.postmix.a = Weight<S>::own(detail::normal_matrix<S>(
      config.query_heads, options.postmix_rank, options.postmix_std, normal));
  weights.postmix.b = Weight<S>::own(
      RowMajorMatrix<S>::Constant(config.query_heads, options.postmix_rank, convert<S>(0.0)));
  if (options.qk_norm) {
    const RowMajorMatrix<S> ones = RowMajorMatrix<S>::Constant(1, head_dim, convert<S>(1.0));
    weights.q_norm = Weight<S>::own(ones);
    weights.k_norm = Weight<S>::own(ones);
  }
  return VhaAttention<S>(config, std::move(weights));
}

}  // namespace vha
