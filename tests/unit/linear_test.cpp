// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vha/ops/linear.hpp>

#include "error_of.hpp"

namespace {

using vha::Index;
using vha::Linear;
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

/// The largest |y - (X·W + b)|, the products taken in long double.
template <class T, class X, class S>
double error(const RowMajorMatrix<T>& y, const RowMajorMatrix<X>& x, const Linear<S>& linear) {
  double largest = 0;
  for (Index i = 0; i < x.rows(); ++i) {
    for (Index j = 0; j < linear.out(); ++j) {
      long double sum = linear.bias.empty() ? 0 : vha::convert<double>(linear.bias(0, j));
      for (Index k = 0; k < x.cols(); ++k) {
        sum += static_cast<long double>(vha::convert<double>(x(i, k))) *
               vha::convert<double>(linear.weight(k, j));
      }
      const double difference = static_cast<double>(std::abs(sum - y(i, j)));
      if (std::isnan(difference)) return difference;
      largest = std::max(largest, difference);
    }
  }
  return largest;
}

template <class T>
double tolerance(Index depth) {
  return 2.0 * static_cast<double>(depth + 1) * std::numeric_limits<T>::epsilon();
}

template <class S>
class LinearOf : public testing::Test {};
using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(LinearOf, Scalars);

TYPED_TEST(LinearOf, MultipliesAwkwardSizes) {
  using T = vha::Compute<TypeParam>;
  for (const Index rows : {1, 2, 15, 33}) {
    for (const Index in : {1, 9, 81, 600}) {
      for (const Index out : {1, 17, 81}) {
        const auto seed = static_cast<unsigned>(rows * 10007 + in * 101 + out);
        const auto x = random_matrix<T>(rows, in, seed);
        const Linear<TypeParam> plain{Weight<TypeParam>::own(random_matrix<TypeParam>(in, out, 1))};
        const Linear<TypeParam> biased{plain.weight,
                                       Weight<TypeParam>::own(random_matrix<TypeParam>(1, out, 2))};
        ASSERT_LE(error(plain(x), x, plain), tolerance<T>(in)) << rows << ' ' << in << ' ' << out;
        ASSERT_LE(error(biased(x), x, biased), tolerance<T>(in)) << rows << ' ' << in << ' ' << out;
      }
    }
  }
}

TYPED_TEST(LinearOf, BothLayoutsOfTheSameBytesAgreeBitForBit) {
  const auto stored = random_matrix<TypeParam>(9, 30, 3);
  const RowMajorMatrix<TypeParam> turned = stored.transpose();
  const auto x = random_matrix<vha::Compute<TypeParam>>(4, 9, 4);
  const Linear<TypeParam> paddle{Weight<TypeParam>::view_in_out(stored.data(), 9, 30)};
  const Linear<TypeParam> hugging_face{Weight<TypeParam>::view_out_in(turned.data(), 9, 30)};
  EXPECT_EQ(paddle(x), hugging_face(x));
}

TYPED_TEST(LinearOf, ARowDependsOnItsInputAlone) {
  using T = vha::Compute<TypeParam>;
  const auto x = random_matrix<T>(31, 81, 5);
  const Linear<TypeParam> linear{Weight<TypeParam>::own(random_matrix<TypeParam>(81, 40, 6))};
  const RowMajorMatrix<T> together = linear(x);
  for (Index row = 0; row < x.rows(); ++row) {
    ASSERT_EQ(linear(x.row(row)), together.row(row)) << row;
  }
}

TEST(Linear, WritesToStridedRowsAndNothingElse) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto x = random_matrix<float>(3, 9, 7);
  const Linear<float> linear{Weight<float>::own(random_matrix<float>(9, 5, 8)),
                             Weight<float>::own(random_matrix<float>(1, 5, 9))};
  RowMajorMatrix<float> y = RowMajorMatrix<float>::Constant(3, 8, nan);
  vha::ProductWorkspace<float> workspace;
  linear(vha::row_major_view(x.data(), 3, 9, 9), y.data(), 8, workspace);
  EXPECT_EQ(y.leftCols(5), linear(x));
  EXPECT_TRUE(y.rightCols(3).array().isNaN().all());
}

TEST(Linear, NoInputChannelsLeaveTheBias) {
  const Linear<float> linear{Weight<float>::own(RowMajorMatrix<float>(0, 3)),
                             Weight<float>::own(random_matrix<float>(1, 3, 10))};
  RowMajorMatrix<float> y = RowMajorMatrix<float>::Constant(2, 3, 7);
  const RowMajorMatrix<float> x(2, 0);
  vha::ProductWorkspace<float> workspace;
  linear(vha::row_major_view(x.data(), 2, 0, 0), y.data(), 3, workspace);
  EXPECT_EQ(y.row(0), linear.bias.to<float>());
  EXPECT_EQ(y.row(1), linear.bias.to<float>());
}

TEST(Linear, RefusesWhatDoesNotFit) {
  Linear<float> linear{Weight<float>::own(random_matrix<float>(4, 3, 11)),
                       Weight<float>::own(random_matrix<float>(1, 2, 12))};
  EXPECT_EQ(error_of([&] { linear.require_shape("query", 3, 4); }),
            "query.weight: expected [3, 4], got [4, 3]");
  EXPECT_EQ(error_of([&] { linear.require_shape("query", 4, 3); }),
            "query.bias: expected [1, 3], got [1, 2]");
  EXPECT_EQ(error_of([&] { linear(random_matrix<float>(2, 4, 13)); }),
            "linear.bias: expected [1, 3], got [1, 2]");
  linear.bias = {};
  EXPECT_NO_THROW(linear.require_shape("query", 4, 3));
  EXPECT_EQ(error_of([&] { linear(random_matrix<float>(2, 5, 13)); }),
            "x.cols(): expected 4, got 5");
}

TEST(Linear, CastKeepsTheBias) {
  const Linear<double> linear{Weight<double>::own(random_matrix<double>(2, 3, 14)),
                              Weight<double>::own(random_matrix<double>(1, 3, 15))};
  const auto cast = linear.cast<float>();
  EXPECT_EQ(cast.weight(1, 2), static_cast<float>(linear.weight(1, 2)));
  EXPECT_EQ(cast.bias(0, 2), static_cast<float>(linear.bias(0, 2)));
}

}  // namespace
