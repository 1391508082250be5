// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#include <Eigen/SVD>
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/attention/attention.hpp>
#include <vha/attention/initialise.hpp>
#include <vha/fold/fold_vha.hpp>

// The inverse of the fold: from a trained GQA layer to the VHA layer nearest to it, which a training
// can start from.

namespace vha {

struct VirtualiseOptions {
  Index postmix_rank = 4;
  Index physical_head_dim = 0;  ///< 0: as wide as head_dim (a square Premix)
  double postmix_std = 0.01;    ///< of A's elements; B starts at 0
  Index max_sweeps = 8;         ///< of alternating least squares, after the SVD
  double tolerance = 1e-14;     ///< of ‖W_Q'‖: a smaller gain, or error, ends the sweeps
  std::uint64_t seed = 0;       ///< of Postmix A
};

/// What of W_Q' (and its bias, a further row) the VHA layer does not have. The errors are those of
/// the weights as stored, multiplied in double; absolute where what they are relative to is 0.
struct VirtualiseReport {
  double relative_error = 0;  ///< ‖W_Q' - W_Q·P‖ / ‖W_Q'‖ (Frobenius) over all query heads
  std::vector<double> group_errors;  ///< the same over the query heads of each K/V group
  Index sweeps = 0;                  ///< of alternating least squares that were taken
};

template <class Layer>
struct Virtualised {
  Layer layer;
  VirtualiseReport report;
};

namespace detail {

// Templates, so that Eigen's decompositions are compiled where virtualise is called, not with every
// source that includes this.

template <ComputeScalar T>
using ColumnMajorMatrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;

template <ComputeScalar T>
MatrixView<T> dense_view(const RowMajorMatrix<T>& matrix) {
  return row_major_view(matrix.data(), matrix.rows(), matrix.cols(), matrix.cols());
}

template <ComputeScalar T>
RowMajorMatrix<T> product(const MatrixView<T>& a, const MatrixView<T>& b,
                          ProductWorkspace<T>& workspace) {
  RowMajorMatrix<T> c(a.rows, b.cols);
  multiply(a, b, c.data(), b.cols, false, workspace);
  return c;
}

/// Orthonormal columns, `count` or as many as there are rows, whose first span those of `matrix`,
/// whatever its rank. Householder reflections keep every column to its own round-off, so that
/// columns of very different lengths do no harm.
template <ComputeScalar T>
RowMajorMatrix<T> orthonormal_columns(const RowMajorMatrix<T>& matrix, Index count) {
  const Eigen::HouseholderQR<ColumnMajorMatrix<T>> qr(matrix);
  return qr.householderQ() *
         ColumnMajorMatrix<T>::Identity(matrix.rows(), std::min(count, matrix.rows()));
}

/// `left · rightᵀ`, where `right` has orthonormal columns.
template <ComputeScalar T>
struct LowRankProduct {
  RowMajorMatrix<T> left;   ///< `[rows, rank]`
  RowMajorMatrix<T> right;  ///< `[cols, rank]`
};

/// The product of this rank, at most `c.cols()`, that is nearest to C in the Frobenius norm, and how
/// many sweeps it took.
template <ComputeScalar T>
std::pair<LowRankProduct<T>, Index> nearest_of_rank(const RowMajorMatrix<T>& c, Index rank,
                                                    const VirtualiseOptions& options,
                                                    ProductWorkspace<T>& workspace) {
  if (rank == c.cols()) return {{c, RowMajorMatrix<T>::Identity(rank, rank)}, 0};
  const auto with_right = [&](RowMajorMatrix<T> right) {
    auto left = product(dense_view(c), dense_view(right), workspace);
    return LowRankProduct<T>{std::move(left), std::move(right)};
  };
  const auto error_of = [&](const LowRankProduct<T>& p) {
    return (c - product(dense_view(p.left), dense_view(p.right).transposed(), workspace)).norm();
  };
  const Eigen::SelfAdjointEigenSolver<ColumnMajorMatrix<T>> eigen(
      product(dense_view(c).transposed(), dense_view(c), workspace));
  LowRankProduct<T> best = with_right(
      orthonormal_columns<T>(eigen.eigenvectors().rightCols(rank).rowwise().reverse(), rank));
  T error = error_of(best);
  Index sweeps = 0;
  const T negligible = static_cast<T>(options.tolerance) * c.norm();
  for (bool gains = true; gains && error > negligible && sweeps < options.max_sweeps; ++sweeps) {
    // Least squares for the right factor, given what the left one spans, then for the left one.
    const auto basis = orthonormal_columns(best.left, rank);
    const auto right = product(dense_view(c).transposed(), dense_view(basis), workspace);
    best = with_right(orthonormal_columns(right, rank));
    const T next_error = error_of(best);
    gains = error - next_error > negligible;
    error = next_error;
  }
  return {std::move(best), sweeps};
}

/// W_Q' over its bias, the groups side by side: row `r·H' + i` of `[(hidden + 1)·H', G·head_dim]` is
/// row `r` of the query heads `g·H' + i` for g = 0, 1, …. Throws Error where a number is not finite.
template <StorageScalar S>
RowMajorMatrix<double> groups_side_by_side(const Linear<S>& query, const AttentionConfig& config) {
  const Index heads = config.group_size(), head_dim = config.head_dim;
  RowMajorMatrix<double> c((query.in() + query.bias.rows()) * heads, config.kv_width());
  const auto copy = [&](std::string_view name, const Weight<S>& weight, Index first_row) {
    const RowMajorMatrix<double> wide = weight.template to<double>();
    for (Index row = 0; row < wide.rows(); ++row) {
      for (Index col = 0; col < wide.cols(); ++col) {
        const double value = wide(row, col);
        if (!is_finite(value)) {
          raise(name, "finite numbers", text(value, " at ", shape_text(row, col)));
        }
        const Index head = col / head_dim;
        c((first_row + row) * heads + head % heads, head / heads * head_dim + col % head_dim) =
            value;
      }
    }
  };
  copy("query.weight", query.weight, 0);
  copy("query.bias", query.bias, query.in());
  return c;
}

/// The R of virtualise's P = R·rightᵀ, which is `scale` times a rotation.
template <ComputeScalar T>
RowMajorMatrix<T> gauge(const RowMajorMatrix<T>& right, Index head_dim, T scale) {
  const Index rank = right.cols(), common = std::min(rank, head_dim);
  ColumnMajorMatrix<T> sum = ColumnMajorMatrix<T>::Zero(rank, rank);  // of I·P_gᵀ over the groups
  for (Index first = 0; first < right.rows(); first += head_dim) {
    sum.topRows(common) += right.middleRows(first, common);
  }
  // The rotation R for which tr(R·sumᵀ) is largest.
  const Eigen::JacobiSVD<ColumnMajorMatrix<T>> svd(sum, Eigen::ComputeFullU | Eigen::ComputeFullV);
  const ColumnMajorMatrix<T> turn = svd.matrixU() * svd.matrixV().transpose();
  // Many small rotations have made it: a step of Newton and Schulz takes their round-off away.
  return scale * (T(1.5) * turn - T(0.5) * turn * (turn.transpose() * turn));
}

/// `matrix · 2^exponent` stored as `To`. Throws Error naming `name` where that is beyond its range.
template <StorageScalar To>
Weight<To> stored_in_range(std::string_view name, const RowMajorMatrix<double>& matrix,
                           int exponent = 0) {
  RowMajorMatrix<To> stored(matrix.rows(), matrix.cols());
  for (Index row = 0; row < matrix.rows(); ++row) {
    for (Index col = 0; col < matrix.cols(); ++col) {
      const double value = std::ldexp(matrix(row, col), exponent);
      stored(row, col) = convert<To>(value);
      if (!is_finite(stored(row, col))) {
        raise(text("virtualised ", name), "numbers in the range of their stored type",
              text(value, " at ", shape_text(row, col)));
      }
    }
  }
  return Weight<To>::own(std::move(stored));
}

inline void validate(const VirtualiseOptions& options, const AttentionConfig& config) {
  require_positive("postmix_rank", options.postmix_rank);
  checked_product("postmix", {config.query_heads, options.postmix_rank, sizeof(double)});
  if (options.physical_head_dim < 0 || options.physical_head_dim > config.kv_width()) {
    raise("physical_head_dim", text("0 to kv_heads * head_dim = ", config.kv_width()),
          text(options.physical_head_dim));
  }
  if (options.max_sweeps < 0) raise("max_sweeps", "0 or more", text(options.max_sweeps));
  for (const auto& [name, value] :
       {std::pair("postmix_std", options.postmix_std), std::pair("tolerance", options.tolerance)}) {
    if (!is_finite(value) || value < 0) raise(name, "a number of 0 or more", text(value));
  }
}

}  // namespace detail

/// The VHA layer nearest to a GQA layer: the W_Q `[hidden, H'·d_q]` and the maps P_g `[d_q, head_dim]`
/// with the least
///
///     Σ_{g,i} ‖W_Q'^(g·H'+i) - W_Q^(i)·P_g‖²
///
/// where a query bias counts as a further row, and a Postmix of I: A = N(0, postmix_std²), the same
/// for a seed on every platform, and B = 0. All else is the GQA layer's, shared where it is stored
/// alike. So fold_vha (of a gated layer, fold_premix) gives the GQA layer back but for the error
/// reported: round-off where it came from a fold or has one K/V head.
///
///     const auto [layer, report] = vha::virtualise(gqa);
///     std::cout << report.relative_error;
///
/// Heads are taken as they stand: those in the same place of every group share a W_Q^(i).
///
/// With the groups side by side, C = [C_0 … C_{G-1}] where C_g has W_Q'^(g·H'+i) one below the other
/// for each i, this is the product A·[P_0 … P_{G-1}] of rank d_q nearest to C: by Eckart and Young, its
/// truncated SVD. That starts from the eigenvectors of CᵀC, which is small but has squared singular
/// values: in double, directions below 1e-8 of the largest are lost in its round-off. Sweeps of
/// alternating least squares, P for A and then A for P on bases by Householder reflections, find
/// them in C itself: one where C nearly has the rank d_q. Elsewhere the first finds nothing to gain, and
/// ends them.
///
/// A and P are given but for an R: A·R⁻¹ and R·P are as good. The one taken has
///
///     Σ_g P_g·P_gᵀ = (G·head_dim / d_q)·I   and with it the least   Σ_g ‖P_g - I‖²:
///
/// the first is what P_g = I has, and makes every other choice a rotation of this one, so that no
/// direction of W_Q is blown up where the groups differ; the second has the training start near the
/// identity, and P_g = I where all groups are equal.
///
/// `To` is the scalar that the weights are stored in, the layer's own by default; arithmetic is in
/// double. The number of threads does not change the result. Does not compile for a layer that has
/// Premix or Postmix. Throws Error where a number of W_Q' or its bias is not finite, an option cannot
/// be (d_q above G·head_dim would leave channels without use), or a result is beyond `To`'s range.
template <class To = void, StorageScalar S, class PremixPart, class PostmixPart, class GatePart,
          int HeadDim, int GroupSize>
auto virtualise(const Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>& layer,
                const VirtualiseOptions& options = {}, const Executor& executor = {}) {
  static_assert(std::same_as<PremixPart, NoPremix> && std::same_as<PostmixPart, NoPostmix>,
                "vha::virtualise: the layer has Premix or Postmix: it is a VHA layer already; fold "
                "it first to start anew");
  using Stored = detail::StoredAs<To, S>;
  const AttentionConfig& config = layer.config();
  const auto& w = layer.weights();
  detail::validate(options, config);
  const Index head_dim = config.head_dim;
  const Index rank = options.physical_head_dim == 0 ? head_dim : options.physical_head_dim;

  // Times a power of two, so that squares stay in the range of double.
  RowMajorMatrix<double> c = detail::groups_side_by_side(w.query, config);
  const double largest = c.cwiseAbs().maxCoeff();
  const int exponent = largest == 0 ? 0 : std::clamp(std::ilogb(largest), -1000, 1000);
  c *= std::ldexp(1.0, -exponent);

  ProductWorkspace<double> workspace;
  workspace.executor = executor;
  const auto [factors, sweeps] = detail::nearest_of_rank(c, rank, options, workspace);
  const double square = static_cast<double>(config.kv_width()) / static_cast<double>(rank);
  const RowMajorMatrix<double> turn = detail::gauge(factors.right, head_dim, std::sqrt(square));
  const auto turn_view = detail::dense_view(turn);
  const RowMajorMatrix<double> left =
      detail::product(detail::dense_view(factors.left), turn_view.transposed(), workspace) / square;

  Linear<Stored> query;
  const auto rows =
      left.reshaped<Eigen::RowMajor>(left.rows() / config.group_size(), config.group_size() * rank);
  query.weight =
      detail::stored_in_range<Stored>("query.weight", rows.topRows(w.query.in()), exponent);
  if (!w.query.bias.empty()) {
    query.bias = detail::stored_in_range<Stored>("query.bias", rows.bottomRows(1), exponent);
  }
  Premix<Stored> premix;
  for (Index first = 0; first < c.cols(); first += head_dim) {
    const auto group = detail::dense_view(factors.right).block(first, 0, head_dim, rank);
    premix.maps.push_back(detail::stored_in_range<Stored>(
        "premix", detail::product(turn_view, group.transposed(), workspace)));
  }

  VirtualiseReport report;
  report.sweeps = sweeps;
  const RowMajorMatrix<double> difference =
      c - std::ldexp(1.0, -exponent) *
              detail::groups_side_by_side(fold_premix<double>(query, premix, executor), config);
  const auto relative = [](double error, double norm) { return norm > 0 ? error / norm : error; };
  report.relative_error = relative(difference.norm(), c.norm());
  for (Index first = 0; first < c.cols(); first += head_dim) {
    report.group_errors.push_back(relative(difference.middleCols(first, head_dim).norm(),
                                           c.middleCols(first, head_dim).norm()));
  }

  NormalGenerator normal(options.seed);
  Postmix<Stored> postmix;
  postmix.a = Weight<Stored>::own(detail::normal_matrix<Stored>(
      config.query_heads, options.postmix_rank, options.postmix_std, normal));
  postmix.b = Weight<Stored>::own(RowMajorMatrix<Stored>::Constant(
      config.query_heads, options.postmix_rank, convert<Stored>(0.0)));
  auto virtualised = layer.with(
      config, w.template with_parts<Stored>(std::move(query), w.output.template cast<Stored>(),
                                            std::move(premix), std::move(postmix)));
  return Virtualised<decltype(virtualised)>{std::move(virtualised), std::move(report)};
}

}  // namespace vha
