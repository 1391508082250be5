// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>
#include <vha/attention/postmix.hpp>

#include "error_of.hpp"

namespace {

using vha::Index;
using vha::Postmix;
using vha::RowMajorMatrix;
using vha::Weight;

using support::error_of;

template <class S>
RowMajorMatrix<S> random_matrix(Index rows, Index cols, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  RowMajorMatrix<S> matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = vha::convert<S>(uniform(bits));
  return matrix;
}

/// Mixes 3 tokens of `groups` times `group_size` heads in both orders, and compares with M in
/// loops.
template <class S, class Act>
void check(const Postmix<S, Act>& postmix, const RowMajorMatrix<double>& mixing, Index groups,
           Index group_size, Index channels) {
  using T = vha::Compute<S>;
  const Index tokens = 3, count = groups * group_size;
  const auto y = random_matrix<T>(tokens * count, channels, 7);  // [tokens, heads, channels]
  for (const auto& order : {vha::token_major_heads<T>, vha::group_major_heads<T>}) {
    RowMajorMatrix<T> memory(y.rows(), y.cols());
    const auto heads = order(memory.data(), tokens, groups, group_size, channels);
    const auto head_of = [&](Index token, Index j) {
      return heads.head(token, j / group_size, j % group_size);
    };
    for (Index token = 0; token < tokens; ++token) {
      for (Index j = 0; j < count; ++j) {
        std::copy_n(y.row(token * count + j).data(), channels, head_of(token, j));
      }
    }
    vha::Buffer<T> scratch;
    postmix(heads, scratch);
    const double limit =
        8.0 * static_cast<double>(count * (postmix.rank() + 1)) * std::numeric_limits<T>::epsilon();
    for (Index token = 0; token < tokens; ++token) {
      for (Index i = 0; i < count; ++i) {
        for (Index c = 0; c < channels; ++c) {
          long double sum = 0;
          for (Index j = 0; j < count; ++j) {
            sum += static_cast<long double>(mixing(i, j)) * y(token * count + j, c);
          }
          ASSERT_NEAR(head_of(token, i)[c], postmix.activation(static_cast<double>(sum)), limit)
              << "token " << token << " head " << i << " channel " << c;
        }
      }
    }
  }
}

/// M[i, j] = δ_ij + Σ_k B[i, k]·A[j, k], in loops.
template <class S>
RowMajorMatrix<double> mixing_of(const RowMajorMatrix<S>& a, const RowMajorMatrix<S>& b) {
  RowMajorMatrix<double> m(a.rows(), a.rows());
  for (Index i = 0; i < m.rows(); ++i) {
    for (Index j = 0; j < m.cols(); ++j) {
      m(i, j) = i == j ? 1 : 0;
      for (Index k = 0; k < a.cols(); ++k) {
        m(i, j) += vha::convert<double>(b(i, k)) * vha::convert<double>(a(j, k));
      }
    }
  }
  return m;
}

template <class S>
class PostmixOf : public testing::Test {};
using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(PostmixOf, Scalars);

TYPED_TEST(PostmixOf, MixesByOnePlusBTimesATransposed) {
  using S = TypeParam;
  for (const Index rank : {1, 4, 9}) {
    const auto a = random_matrix<S>(6, rank, 1), b = random_matrix<S>(6, rank, 2);
    const Postmix<S> postmix{Weight<S>::own(a), Weight<S>::own(b)};
    EXPECT_EQ(postmix.rank(), rank);
    check(postmix, mixing_of(a, b), 2, 3, 9);
    check(postmix, mixing_of(a, b), 6, 1, 1);
  }
}

TYPED_TEST(PostmixOf, ActivationStandsAfterTheMixing) {
  using S = TypeParam;
  const auto a = random_matrix<S>(4, 2, 3), b = random_matrix<S>(4, 2, 4);
  check(Postmix<S, vha::Silu>{Weight<S>::own(a), Weight<S>::own(b)}, mixing_of(a, b), 2, 2, 5);
}

TYPED_TEST(PostmixOf, TakesAnyDenseMixing) {
  using S = TypeParam;
  const auto m = random_matrix<S>(6, 6, 5);
  const Weight<S> stored = Weight<S>::own(m);
  const auto postmix = Postmix<S>::from_dense(stored);
  const auto mixing = stored.template to<double>();
  EXPECT_EQ(postmix.dense(), mixing);
  check(postmix, mixing, 3, 2, 7);
}

TYPED_TEST(PostmixOf, DenseIsTheMixing) {
  using S = TypeParam;
  const auto a = random_matrix<S>(5, 3, 6), b = random_matrix<S>(5, 3, 7);
  const Postmix<S> postmix{Weight<S>::own(a), Weight<S>::own(b)};
  EXPECT_LE((postmix.dense() - mixing_of(a, b)).cwiseAbs().maxCoeff(), 4e-15);
}

TEST(Postmix, ZeroBChangesNoBit) {
  const auto a = random_matrix<float>(4, 2, 8);
  const Postmix<float> postmix{Weight<float>::own(a), Weight<float>(Eigen::MatrixXf::Zero(4, 2))};
  auto y = random_matrix<float>(4, 9, 9);
  const auto before = y;
  vha::Buffer<float> scratch;
  postmix(vha::token_major_heads(y.data(), 1, 2, 2, 9), scratch);
  EXPECT_EQ(y, before);
}

TEST(Postmix, RefusesWhatDoesNotFit) {
  const auto error = [](Index a_rows, Index a_cols, Index b_rows, Index b_cols) {
    return error_of([&] {
      Postmix<float>{Weight<float>(Eigen::MatrixXf::Zero(a_rows, a_cols)),
                     Weight<float>(Eigen::MatrixXf::Zero(b_rows, b_cols))}
          .require_shape(6);
    });
  };
  EXPECT_EQ(error(6, 2, 6, 2), "no vha::Error");
  EXPECT_EQ(error(4, 2, 6, 2), "postmix.a: expected [6, 2], got [4, 2]");
  EXPECT_EQ(error(6, 2, 6, 3), "postmix.b: expected [6, 2], got [6, 3]");
  EXPECT_EQ(error(6, 2, 2, 6), "postmix.b: expected [6, 2], got [2, 6]");
  EXPECT_EQ(error(6, 0, 6, 0), "postmix.a: expected [6, rank], rank 1 or more, got [6, 0]");
  EXPECT_EQ(error_of([] { Postmix<float>::from_dense(Eigen::MatrixXf::Zero(4, 3)); }),
            "postmix: expected [4, 4], got [4, 3]");
}

TEST(Postmix, CastKeepsTheKindOfMixing) {
  const auto dense = Postmix<double>::from_dense(Eigen::MatrixXd::Constant(2, 2, 0.1));
  const Postmix<float> cast = dense.cast<float>();
  EXPECT_FALSE(cast.residual);
  EXPECT_EQ(cast.dense()(0, 1), static_cast<double>(0.1F));
}

}  // namespace
