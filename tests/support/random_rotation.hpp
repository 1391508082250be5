// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/core/weight.hpp>

#include "random.hpp"

namespace laws {

inline vha::RowMajorMatrix<double> random_matrix(Random& random, vha::Index rows, vha::Index cols) {
  vha::RowMajorMatrix<double> matrix(rows, cols);
  for (vha::Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = random();
  return matrix;
}

/// A random matrix with orthonormal columns, `cols` of them and no more than `rows`.
inline vha::RowMajorMatrix<double> random_orthonormal(Random& random, vha::Index rows,
                                                      vha::Index cols) {
  auto matrix = random_matrix(random, rows, cols);
  for (vha::Index j = 0; j < cols; ++j) {
    for (int twice = 0; twice < 2; ++twice) {  // once leaves what rounding keeps of other columns
      for (vha::Index k = 0; k < j; ++k) {
        const double along = matrix.col(k).dot(matrix.col(j));
        matrix.col(j) -= along * matrix.col(k);
      }
    }
    matrix.col(j) /= matrix.col(j).norm();
  }
  return matrix;
}

}  // namespace laws
