// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>
#include <vha/analysis/postmix_analysis.hpp>

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
using vha::analyse_postmix;
using vha::Index;
using Matrix = vha::RowMajorMatrix<double>;
using Postmix = vha::Postmix<double>;

Postmix postmix_of(const Matrix& a, const Matrix& b) {
  return {vha::Weight<double>::own(a), vha::Weight<double>::own(b)};
}

TEST(PostmixAnalysis, WithoutBNothingIsMixed) {
  laws::Random random(1);
  const auto analysis =
      analyse_postmix(postmix_of(random_matrix(random, 6, 2), Matrix::Zero(6, 2)), 3);
  EXPECT_TRUE(close(array_of(analysis.singular_values), std::vector<double>(6, 0), 0));
  EXPECT_EQ(analysis.numerical_rank, 0);
  EXPECT_EQ(analysis.effective_rank, 0);
  EXPECT_EQ(analysis.cross_group_share, 0);
  EXPECT_FALSE(analysis.is_full_rank);
}

TEST(PostmixAnalysis, OfRankOne) {
  laws::Random random(2);
  const Matrix a = random_matrix(random, 8, 1), b = random_matrix(random, 8, 1);
  const auto analysis = analyse_postmix(postmix_of(a, b), 2);
  EXPECT_TRUE(
      close(array_of(analysis.singular_values), {a.norm() * b.norm(), 0, 0, 0, 0, 0, 0, 0}, 1e-14));
  EXPECT_EQ(analysis.numerical_rank, 1);
  EXPECT_NEAR(analysis.effective_rank, 1, 1e-12);
  EXPECT_FALSE(analysis.is_full_rank);
}

TEST(PostmixAnalysis, OfKnownSingularValues) {
  laws::Random random(3);
  const Matrix a = random_orthonormal(random, 6, 2);
  Matrix b = random_orthonormal(random, 6, 2);
  b.col(0) *= 3;
  const auto analysis = analyse_postmix(postmix_of(a, b), 2);
  EXPECT_TRUE(close(array_of(analysis.singular_values), {3, 1, 0, 0, 0, 0}, 1e-14));
  EXPECT_EQ(analysis.numerical_rank, 2);
  // Shares 3/4 and 1/4: exp(ln 4 - 3/4 ln 3) = 4 / 3^(3/4)
  EXPECT_NEAR(analysis.effective_rank, 4 / std::pow(3, 0.75), 1e-12);
}

TEST(PostmixAnalysis, EquallyStrongDirectionsCountEach) {
  laws::Random random(4);
  for (const Index rank : {1, 3, 5}) {
    const Matrix a = random_orthonormal(random, 5, rank), b = random_orthonormal(random, 5, rank);
    const auto analysis = analyse_postmix(postmix_of(a, 0.01 * b), 1);
    EXPECT_NEAR(analysis.effective_rank, static_cast<double>(rank), 1e-11);
    EXPECT_EQ(analysis.numerical_rank, rank);
    EXPECT_EQ(analysis.is_full_rank, rank == 5);
  }
}

TEST(PostmixAnalysis, MoreColumnsThanHeadsAreFullRankToo) {
  laws::Random random(5);
  const auto postmix = postmix_of(random_matrix(random, 4, 6), random_matrix(random, 4, 6));
  EXPECT_TRUE(analyse_postmix(postmix, 2).is_full_rank);
  // Full by its sizes, whatever was learned.
  EXPECT_TRUE(analyse_postmix(postmix_of(Matrix::Zero(4, 4), Matrix::Zero(4, 4)), 2).is_full_rank);
}

TEST(PostmixAnalysis, ShareOfWhatJoinsTwoGroups) {
  Matrix mixing = Matrix::Identity(4, 4);
  mixing(0, 0) += 1;  // within group 0
  mixing(3, 2) = 2;   // within group 1
  mixing(0, 2) = 3;   // across
  mixing(3, 1) = -1;  // across
  const auto postmix = Postmix::from_dense(vha::Weight<double>::own(mixing));
  EXPECT_NEAR(analyse_postmix(postmix, 2).cross_group_share, 10.0 / 15, 1e-15);
  EXPECT_NEAR(analyse_postmix(postmix, 1).cross_group_share, 0, 1e-15);
  EXPECT_NEAR(analyse_postmix(postmix, 4).cross_group_share, 14.0 / 15, 1e-15);
  Matrix change = mixing;
  change.diagonal().array() -= 1;
  EXPECT_TRUE(close(array_of(vha::postmix_change(postmix)), array_of(change), 0));
}

TEST(PostmixAnalysis, IsOfBTimesATransposed) {
  // Head 1 reads head 0, and not the other way round.
  Matrix a = Matrix::Zero(3, 1), b = Matrix::Zero(3, 1);
  a(0, 0) = 2;
  b(1, 0) = 5;
  Matrix change = Matrix::Zero(3, 3);
  change(1, 0) = 10;
  EXPECT_TRUE(close(array_of(vha::postmix_change(postmix_of(a, b))), array_of(change), 0));
}

TEST(PostmixAnalysis, SmallChangesAreAsExactAsLargeOnes) {
  laws::Random random(6);
  const Matrix a = random_matrix(random, 8, 3), b = random_matrix(random, 8, 3);
  const auto large = analyse_postmix(postmix_of(a, b), 4);
  const auto small = analyse_postmix(postmix_of(a, 0x1p-40 * b), 4);
  EXPECT_NEAR(small.cross_group_share, large.cross_group_share, 1e-13);
  EXPECT_NEAR(small.effective_rank, large.effective_rank, 1e-11);
  EXPECT_EQ(small.numerical_rank, 3);
}

TEST(PostmixAnalysis, SingularValuesStayUnderRotationsOfTheHeads) {
  laws::Random random(7);
  const Matrix a = random_matrix(random, 6, 4), b = random_matrix(random, 6, 4);
  const auto plain = analyse_postmix(postmix_of(a, b), 2);
  const auto turned = analyse_postmix(
      postmix_of(random_orthonormal(random, 6, 6) * a, random_orthonormal(random, 6, 6) * b), 2);
  EXPECT_TRUE(close(array_of(turned.singular_values), array_of(plain.singular_values), 1e-14));
  EXPECT_NEAR(turned.effective_rank, plain.effective_rank, 1e-11);
}

TEST(PostmixAnalysis, RefusesWhatIsNotFinite) {
  Matrix a = Matrix::Ones(4, 2);
  const Matrix b = a;
  a(1, 0) = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(error_of([&] { analyse_postmix(postmix_of(a, b), 2, "layer 7"); }),
            "layer 7.a at [1, 0]: expected a finite number, got an infinity or NaN");
  a(1, 0) = -std::numeric_limits<double>::infinity();
  EXPECT_EQ(error_of([&] { analyse_postmix(postmix_of(b, a), 2); }),
            "postmix.b at [1, 0]: expected a finite number, got an infinity or NaN");
}

TEST(PostmixAnalysis, RefusesProductsThatOverflow) {
  const auto postmix = postmix_of(Matrix::Constant(2, 1, 1e200), Matrix::Constant(2, 1, 1e200));
  EXPECT_EQ(error_of([&] { analyse_postmix(postmix, 2); }),
            "postmix at [0, 0]: expected a finite number, got an infinity or NaN");
}

TEST(PostmixAnalysis, RefusesHeadsThatDoNotFit) {
  const Matrix a = Matrix::Ones(4, 2);
  EXPECT_EQ(error_of([&] { analyse_postmix(postmix_of(a, a), 3); }),
            "postmix: expected a multiple of kv_heads = 3 heads, got 4");
  EXPECT_EQ(error_of([&] { analyse_postmix(postmix_of(a, a), 0); }),
            "kv_heads: expected 1 or more, got 0");
  EXPECT_EQ(error_of([&] { analyse_postmix(postmix_of(a, Matrix::Ones(5, 2)), 2); }),
            "postmix.b: expected [4, 2], got [5, 2]");
}

}  // namespace
