// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>
#include <vha/analysis/premix_analysis.hpp>

#include "error_of.hpp"
#include "random.hpp"
#include "random_rotation.hpp"
#include "tolerance.hpp"

namespace {

using laws::array_of;
using laws::close;
using laws::random_matrix;
using laws::random_orthonormal;
using support::error_of;
using vha::analyse_map;
using vha::Index;
using Matrix = vha::RowMajorMatrix<double>;

constexpr double allowed = 1e-13;

Matrix diagonal(std::vector<double> values) {
  return Eigen::Map<Eigen::VectorXd>(values.data(), static_cast<Index>(values.size())).asDiagonal();
}

std::vector<double> values_of(const Eigen::VectorXd& vector) {
  return {vector.begin(), vector.end()};
}

template <class S = double>
vha::Premix<S> premix_of(const std::vector<Matrix>& maps) {
  vha::Premix<S> premix;
  for (const Matrix& map : maps) {
    premix.maps.push_back(vha::Weight<double>::own(map).template cast<S>());
  }
  return premix;
}

TEST(PremixAnalysis, TheIdentityHasLearnedNothing) {
  const Matrix identity = Matrix::Identity(5, 5);
  const auto analysis = analyse_map("map", identity);
  EXPECT_EQ(analysis.distance_from_identity, 0);
  EXPECT_TRUE(close(array_of(analysis.singular_values), {1, 1, 1, 1, 1}, allowed));
  EXPECT_NEAR(analysis.condition_number.value_or(0), 1, allowed);
  EXPECT_TRUE(close(array_of(analysis.nearest_rotation), array_of(identity), allowed));
  EXPECT_NEAR(analysis.distance_from_rotation, 0, allowed);
  EXPECT_FALSE(analysis.is_reflection);
}

TEST(PremixAnalysis, ARotationIsItsOwnNearest) {
  laws::Random random(1);
  for (const double factor : {1.0, 0.25, 3.0}) {
    const Matrix rotation = random_orthonormal(random, 12, 12);
    const auto analysis = analyse_map("map", factor * rotation);
    EXPECT_TRUE(close(array_of(analysis.nearest_rotation), array_of(rotation), allowed));
    EXPECT_TRUE(
        close(array_of(analysis.singular_values), std::vector<double>(12, factor), allowed));
    EXPECT_NEAR(analysis.distance_from_rotation, std::abs(factor - 1) * std::sqrt(12.0), allowed);
    EXPECT_NEAR(analysis.condition_number.value_or(0), 1, allowed);
    // ‖cQ - I‖² = c²n - 2c tr Q + n
    EXPECT_NEAR(analysis.distance_from_identity,
                std::sqrt((factor * factor + 1) * 12 - 2 * factor * rotation.trace()), 1e-12);
  }
}

TEST(PremixAnalysis, OfADiagonalMap) {
  const auto analysis = analyse_map("map", diagonal({0.5, -2, 3}));
  EXPECT_TRUE(close(array_of(analysis.singular_values), {3, 2, 0.5}, allowed));
  EXPECT_NEAR(analysis.condition_number.value_or(0), 6, allowed);
  EXPECT_NEAR(analysis.distance_from_identity, std::sqrt(0.25 + 9 + 4), allowed);
  EXPECT_TRUE(close(array_of(analysis.nearest_rotation), array_of(diagonal({1, -1, 1})), allowed));
  EXPECT_NEAR(analysis.distance_from_rotation, std::sqrt(0.25 + 1 + 4), allowed);
  EXPECT_TRUE(analysis.is_reflection);
  EXPECT_FALSE(analyse_map("map", diagonal({-0.5, -2, 3})).is_reflection);
}

TEST(PremixAnalysis, SmallSingularValuesKeepTheirDigits) {
  laws::Random random(2);
  const auto graded = diagonal({1, 1e-4, 1e-8, 1e-12});
  const auto analysis = analyse_map("map", graded);
  EXPECT_NEAR(analysis.condition_number.value_or(0), 1e12, 1e12 * allowed);
  const Matrix turned = random_orthonormal(random, 4, 4) * diagonal({1, 1e-3, 1e-6, 1e-9}) *
                        random_orthonormal(random, 4, 4);
  EXPECT_NEAR(analyse_map("map", turned).condition_number.value_or(0), 1e9, 1e9 * 1e-6);
}

TEST(PremixAnalysis, ASingularMapHasNoConditionNumber) {
  Matrix map = Matrix::Identity(6, 6);
  map.row(4) = 2 * map.row(1) - map.row(0);
  const auto analysis = analyse_map("map", map);
  EXPECT_FALSE(analysis.condition_number.has_value());
  EXPECT_EQ(vha::numerical_rank(analysis.singular_values), 5);
  EXPECT_EQ(vha::numerical_rank(analyse_map("map", Matrix::Zero(3, 3)).singular_values), 0);
  // Also then the polar factor is a rotation.
  const Matrix& rotation = analysis.nearest_rotation;
  EXPECT_TRUE(close(array_of(Matrix(rotation * rotation.transpose())),
                    array_of(Matrix(Matrix::Identity(6, 6))), allowed));
}

TEST(PremixAnalysis, OfRectangularMaps) {
  // Orthogonal scaled by √(d / d_q), as they start.
  laws::Random random(3);
  const double scale = std::sqrt(7.0 / 4);
  const Matrix rows = random_orthonormal(random, 7, 4).transpose();
  for (const bool is_wide : {true, false}) {
    const Matrix orthonormal = is_wide ? rows : rows.transpose();
    const auto analysis = analyse_map("map", scale * orthonormal);
    EXPECT_TRUE(close(array_of(analysis.singular_values), std::vector<double>(4, scale), allowed));
    EXPECT_TRUE(close(array_of(analysis.nearest_rotation), array_of(orthonormal), allowed));
    EXPECT_NEAR(analysis.distance_from_rotation, (scale - 1) * 2, allowed);
    EXPECT_FALSE(analysis.is_reflection);
  }
  Matrix kept = Matrix::Identity(2, 3);
  EXPECT_EQ(analyse_map("map", kept).distance_from_identity, 0);
  kept(0, 2) = 3;
  kept(1, 1) = -3;
  EXPECT_NEAR(analyse_map("map", kept).distance_from_identity, 5, allowed);
}

TEST(PremixAnalysis, SingularValuesAreThoseOfAnyRotatedMap) {
  laws::Random random(4);
  const Matrix map = random_matrix(random, 9, 9);
  const Matrix turned = random_orthonormal(random, 9, 9) * map * random_orthonormal(random, 9, 9);
  const auto plain = analyse_map("map", map), rotated = analyse_map("map", turned);
  EXPECT_TRUE(close(array_of(rotated.singular_values), array_of(plain.singular_values), allowed));
  EXPECT_NEAR(rotated.distance_from_rotation, plain.distance_from_rotation, 1e-12);
  EXPECT_NEAR(plain.singular_values.norm(), map.norm(), 1e-12);
  for (Index k = 1; k < 9; ++k) EXPECT_GE(plain.singular_values[k - 1], plain.singular_values[k]);
}

TEST(PremixAnalysis, NoRotationIsNearerThanTheNearest) {
  laws::Random random(5);
  for (int map_number = 0; map_number < 4; ++map_number) {
    const Matrix map = random_matrix(random, 6, 6);
    const auto analysis = analyse_map("map", map);
    const double nearest = analysis.distance_from_rotation;
    EXPECT_NEAR((map - analysis.nearest_rotation).norm(), nearest, 1e-12);
    for (int k = 0; k < 50; ++k) {
      EXPECT_GT((map - random_orthonormal(random, 6, 6)).norm(), nearest);
      // And close by: turned by a small angle in the plane of two channels.
      const double angle = 0.01 * random();
      Matrix turn = Matrix::Identity(6, 6);
      const Index i = k % 5, j = i + 1;
      turn(i, i) = turn(j, j) = std::cos(angle);
      turn(i, j) = -(turn(j, i) = std::sin(angle));
      EXPECT_GE((map - analysis.nearest_rotation * turn).norm(), nearest - 1e-14);
    }
  }
}

TEST(PremixAnalysis, DistancesBetweenGroups) {
  Matrix one = Matrix::Identity(3, 3), other = one, opposite = one;
  one(0, 1) += 3;
  other(2, 0) += 4;
  opposite(0, 1) -= 3;
  const auto analysis = vha::analyse_premix(premix_of({one, other, opposite, one}));
  ASSERT_EQ(analysis.maps.size(), 4U);
  EXPECT_EQ(analysis.maps[1].distance_from_identity, 4);
  const std::vector<double> distances{0, 5, 6, 0, 5, 0, 5, 5, 6, 5, 0, 6, 0, 5, 6, 0};
  EXPECT_TRUE(close(array_of(analysis.distances), distances, allowed));
  const double of_unrelated = 5.0 / 7;
  EXPECT_TRUE(close(array_of(analysis.relative_distances),
                    {0, of_unrelated, 1, 0, of_unrelated, 0, of_unrelated, of_unrelated, 1,
                     of_unrelated, 0, 1, 0, of_unrelated, 1, 0},
                    allowed));
}

TEST(PremixAnalysis, MapsThatLearnedNothingAreNotApart) {
  const Matrix identity = Matrix::Identity(2, 2);
  const auto analysis = vha::analyse_premix(premix_of({identity, identity}));
  EXPECT_EQ(analysis.distances, Matrix::Zero(2, 2));
  EXPECT_EQ(analysis.relative_distances, Matrix::Zero(2, 2));
}

TEST(PremixAnalysis, TakesMapsAsTheyAreStored) {
  laws::Random random(6);
  const Matrix map = random_matrix(random, 4, 4);
  const auto premix = premix_of<vha::bfloat16>({map});
  const auto stored = premix.maps.front().to<double>();
  ASSERT_NE(stored, map);
  const auto analysis = vha::analyse_premix(premix);
  EXPECT_EQ(values_of(analysis.maps.front().singular_values),
            values_of(vha::singular_values("map", stored)));
  EXPECT_EQ(analysis.maps.front().distance_from_identity,
            vha::distance_from_identity(premix.maps.front()));
}

TEST(PremixAnalysis, RefusesWhatIsNotFinite) {
  for (const double value :
       {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
        std::numeric_limits<double>::quiet_NaN()}) {
    Matrix map = Matrix::Identity(3, 3);
    map(2, 1) = value;
    const auto premix = premix_of<float>({Matrix::Identity(3, 3), map});
    EXPECT_EQ(error_of([&] { vha::analyse_premix(premix, "layer 7"); }),
              "layer 7.maps[1] at [2, 1]: expected a finite number, got an infinity or NaN");
    EXPECT_EQ(error_of([&] { vha::singular_values("map", map); }),
              "map at [2, 1]: expected a finite number, got an infinity or NaN");
  }
}

TEST(PremixAnalysis, RefusesMapsOfOtherShapesAndEmptyOnes) {
  const Matrix map = Matrix::Identity(3, 3);
  EXPECT_EQ(error_of([&] {
              vha::analyse_premix(premix_of({map, Matrix::Identity(3, 4)}));
            }),
            "premix.maps[1]: expected [3, 3], got [3, 4]");
  EXPECT_EQ(error_of([&] { vha::analyse_premix(premix_of({Matrix(0, 0)})); }),
            "premix.maps[0]: expected a matrix with elements, got [0, 0]");
}

}  // namespace
