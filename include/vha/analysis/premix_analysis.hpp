// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/LU>
#include <Eigen/SVD>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>
#include <vha/analysis/singular_values.hpp>
#include <vha/attention/premix.hpp>
#include <vha/core/error.hpp>
#include <vha/core/weight.hpp>

namespace vha {

/// A matrix less the identity. Of a rectangular one, less the matrix with 1 on the main diagonal and
/// 0 elsewhere: the map that keeps the first channels as they are and drops, or leaves 0, the rest.
inline RowMajorMatrix<double> less_identity(RowMajorMatrix<double> matrix) {
  matrix.diagonal().array() -= 1;
  return matrix;
}

/// ‖P - I‖_F, with the I of less_identity.
template <StorageScalar S>
double distance_from_identity(const Weight<S>& map) {
  return less_identity(map.template to<double>()).norm();
}

/// What one map of Premix, `P = U·Σ·Vᵀ`, does to the query channels.
struct PremixMapAnalysis {
  double distance_from_identity = 0;       ///< ‖P - I‖_F, see less_identity
  Eigen::VectorXd singular_values;         ///< the diagonal of Σ, the largest first
  std::optional<double> condition_number;  ///< nothing: the map is singular
  /// The polar factor U·Vᵀ, `[physical_head_dim, head_dim]`: of all matrices with orthonormal columns
  /// (rows, where the map is wider than high) the nearest to P in the Frobenius norm. Its determinant
  /// is not forced to +1. Of a singular map there are several as near; this is one.
  RowMajorMatrix<double> nearest_rotation;
  double distance_from_rotation = 0;  ///< ‖P - U·Vᵀ‖_F = √Σ (σ_k - 1)²
  /// Whether the determinant of the nearest rotation is -1: strictly a rotation with a reflection.
  /// Never of a rectangular one, which has no determinant.
  bool is_reflection = false;
};

/// Throws Error naming `argument` where an element is not finite or there is none.
inline PremixMapAnalysis analyse_map(std::string_view argument, const RowMajorMatrix<double>& map) {
  detail::require_finite(argument, map);
  const Eigen::JacobiSVD<Eigen::MatrixXd> svd(map, Eigen::ComputeThinU | Eigen::ComputeThinV);
  PremixMapAnalysis analysis;
  analysis.distance_from_identity = less_identity(map).norm();
  analysis.singular_values = svd.singularValues();
  analysis.condition_number = condition_number(analysis.singular_values);
  analysis.nearest_rotation = svd.matrixU() * svd.matrixV().transpose();
  analysis.distance_from_rotation = (analysis.singular_values.array() - 1).matrix().norm();
  const bool is_square = map.rows() == map.cols();
  analysis.is_reflection = is_square && analysis.nearest_rotation.determinant() < 0;
  return analysis;
}

/// What a layer's Premix maps do, and how far apart they are.
struct PremixAnalysis {
  std::vector<PremixMapAnalysis> maps;  ///< one per K/V group
  RowMajorMatrix<double> distances;     ///< ‖P_g - P_h‖_F, `[kv_heads, kv_heads]`
  /// ‖P_g - P_h‖_F / (‖P_g - I‖_F + ‖P_h - I‖_F), `[kv_heads, kv_heads]`: 0 where two groups learned
  /// the same, about 0.7 (1/√2) where they learned as much but unrelated things, 1 where opposite ones.
  RowMajorMatrix<double> relative_distances;
};

/// Analyses the maps in double; an activation after them is not looked at. Throws Error naming
/// `argument`, the map and the place where an element is not finite, and where the maps have
/// different shapes or no elements.
template <StorageScalar S, Activation A>
PremixAnalysis analyse_premix(const Premix<S, A>& premix, std::string_view argument = "premix") {
  std::vector<RowMajorMatrix<double>> maps;
  PremixAnalysis analysis;
  for (const auto& map : premix.maps) {
    const auto name = text(argument, ".maps[", maps.size(), "]");
    require_shape(name, map, premix.maps.front().rows(), premix.maps.front().cols());
    maps.push_back(map.template to<double>());
    analysis.maps.push_back(analyse_map(name, maps.back()));
  }
  const auto groups = static_cast<Index>(maps.size());
  analysis.distances.setZero(groups, groups);
  analysis.relative_distances.setZero(groups, groups);
  for (Index g = 0; g < groups; ++g) {
    for (Index h = 0; h < groups; ++h) {
      const auto at_g = static_cast<std::size_t>(g), at_h = static_cast<std::size_t>(h);
      const double distance = (maps[at_g] - maps[at_h]).norm();
      const double farthest =
          analysis.maps[at_g].distance_from_identity + analysis.maps[at_h].distance_from_identity;
      analysis.distances(g, h) = distance;
      if (farthest > 0) analysis.relative_distances(g, h) = distance / farthest;
    }
  }
  return analysis;
}

}  // namespace vha
