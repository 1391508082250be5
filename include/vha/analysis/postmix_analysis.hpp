// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vha/analysis/premix_analysis.hpp>
#include <vha/analysis/singular_values.hpp>
#include <vha/attention/postmix.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/weight.hpp>

namespace vha {

/// What Postmix adds to the heads: M - I in double, `[query_heads, query_heads]`, which is B·Aᵀ where
/// there is a residual. Throws Error where A and B do not fit each other.
template <StorageScalar S, Activation Act>
RowMajorMatrix<double> postmix_change(const Postmix<S, Act>& postmix) {
  if (!postmix.residual) return less_identity(postmix.dense());
  // Not by subtracting the 1 again, which would round small elements.
  return Postmix<S, Act>{postmix.a, postmix.b, false, postmix.activation}.dense();
}

/// Of the sum of squares of M - I, the share of the elements that join heads of two K/V groups; 0
/// where M is the identity. `change` is M - I, `[query_heads, query_heads]`.
/// Precondition: it is square and `kv_heads` divides its rows.
inline double cross_group_share(const RowMajorMatrix<double>& change, Index kv_heads) {
  const double all = change.squaredNorm();
  const Index size = change.rows() / kv_heads;
  double within = 0;
  for (Index first = 0; first < change.rows(); first += size) {
    within += change.block(first, first, size, size).squaredNorm();
  }
  return all == 0 ? 0 : 1 - within / all;
}

/// What a layer's Postmix does to its heads.
struct PostmixAnalysis {
  Eigen::VectorXd singular_values;  ///< of M - I, `[query_heads]`; beyond the rank they are 0
  Index numerical_rank = 0;         ///< of M - I, see numerical_rank
  double effective_rank = 0;        ///< of M - I, see effective_rank
  double cross_group_share = 0;     ///< of M - I, see cross_group_share
  /// Whether A and B have query_heads columns or more: full rank, so that M can be any matrix.
  bool is_full_rank = false;
};

/// Analyses M - I in double; an activation after it is not looked at. Throws Error naming `argument`
/// where an element of M is not finite, where A and B do not fit each other, or where `kv_heads` does
/// not divide the heads.
template <StorageScalar S, Activation Act>
PostmixAnalysis analyse_postmix(const Postmix<S, Act>& postmix, Index kv_heads,
                                std::string_view argument = "postmix") {
  detail::require_finite(text(argument, ".a"), postmix.a.template to<double>());
  detail::require_finite(text(argument, ".b"), postmix.b.template to<double>());
  const auto change = postmix_change(postmix);
  require_positive("kv_heads", kv_heads);
  if (change.rows() % kv_heads != 0) {
    raise(argument, text("a multiple of kv_heads = ", kv_heads, " heads"), text(change.rows()));
  }
  PostmixAnalysis analysis;
  analysis.singular_values = singular_values(argument, change);
  analysis.numerical_rank = numerical_rank(analysis.singular_values);
  analysis.effective_rank = effective_rank(analysis.singular_values);
  analysis.cross_group_share = cross_group_share(change, kv_heads);
  analysis.is_full_rank = postmix.rank() >= change.rows();
  return analysis;
}

}  // namespace vha
