// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/SVD>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>
#include <vha/core/weight.hpp>

namespace vha {

namespace detail {

/// Throws Error naming `argument` and the place of the first element that is not finite, or where
/// there are no elements.
inline void require_finite(std::string_view argument, const RowMajorMatrix<double>& matrix) {
  if (matrix.size() == 0) {
    raise(argument, "a matrix with elements", shape_text(matrix.rows(), matrix.cols()));
  }
  for (Index i = 0; i < matrix.rows(); ++i) {
    for (Index j = 0; j < matrix.cols(); ++j) {
      if (!is_finite(matrix(i, j))) {
        raise(text(argument, " at ", shape_text(i, j)), "a finite number", "an infinity or NaN");
      }
    }
  }
}

}  // namespace detail

/// The singular values of a matrix, the largest first, as many as its shorter side. By two-sided
/// Jacobi rotations, which keep the small ones accurate and hold under -ffast-math.
/// Throws Error naming `argument` where an element is not finite or there is none.
inline Eigen::VectorXd singular_values(std::string_view argument,
                                       const RowMajorMatrix<double>& matrix) {
  detail::require_finite(argument, matrix);
  return Eigen::JacobiSVD<Eigen::MatrixXd>(matrix).singularValues();
}

/// How many singular values are more than rounding makes of 0: above `n·ε·σ_max`, with n of them and
/// double's ε. `values` as singular_values gives them.
inline Index numerical_rank(const Eigen::VectorXd& values) {
  const double rounding =
      values[0] * static_cast<double>(values.size()) * std::numeric_limits<double>::epsilon();
  return (values.array() > rounding).count();
}

/// The largest singular value over the smallest; nothing where the smallest is 0 but for rounding, as
/// numerical_rank has it: the matrix is singular. `values` as singular_values gives them.
inline std::optional<double> condition_number(const Eigen::VectorXd& values) {
  if (numerical_rank(values) < values.size()) return std::nullopt;
  return values[0] / values[values.size() - 1];
}

/// The effective rank of Roy and Vetterli (EUSIPCO 2007): exp of the Shannon entropy, in nats, of
/// the singular values divided by their sum,
///
///     erank = exp(-Σ p_k ln p_k),   p_k = σ_k / Σ σ
///
/// from 1 for one direction alone to n for n equally strong ones; 0 where all values are 0.
inline double effective_rank(const Eigen::VectorXd& values) {
  const double sum = values.sum();
  if (!(sum > 0)) return 0;
  double entropy = 0;
  for (const double value : values) {
    const double share = value / sum;
    if (share > 0) entropy -= share * std::log(share);
  }
  return std::exp(entropy);
}

}  // namespace vha
