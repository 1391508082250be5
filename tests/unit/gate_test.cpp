// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vha/attention/gate.hpp>

namespace {

using vha::Index;
using vha::RowMajorMatrix;
using vha::SigmoidGate;
using vha::Weight;

template <class S>
RowMajorMatrix<S> random_matrix(Index rows, Index cols, unsigned seed) {
  std::mt19937 bits(seed);
  std::uniform_real_distribution<double> uniform(-3, 3);
  RowMajorMatrix<S> matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = vha::convert<S>(uniform(bits));
  return matrix;
}

template <class S>
class GateOf : public testing::Test {};
using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(GateOf, Scalars);

TYPED_TEST(GateOf, MultipliesBySigmoidOfItsProjection) {
  using S = TypeParam;
  using T = vha::Compute<S>;
  constexpr Index tokens = 3, hidden = 9, width = 10;
  const auto x = random_matrix<T>(tokens, hidden, 1), y = random_matrix<T>(tokens, width, 2);
  const Weight<S> weight = Weight<S>::own(random_matrix<S>(hidden, width, 3));
  for (const bool biased : {false, true}) {
    const SigmoidGate<S> gate{
        {weight, biased ? Weight<S>::own(random_matrix<S>(1, width, 4)) : Weight<S>()}};
    RowMajorMatrix<T> gated = y;
    RowMajorMatrix<T> logits =
        RowMajorMatrix<T>::Constant(tokens, width, std::numeric_limits<T>::quiet_NaN());
    vha::ProductWorkspace<T> workspace;
    gate(vha::row_major_view(x.data(), tokens, hidden, hidden), gated.data(), logits.data(),
         workspace);
    for (Index i = 0; i < tokens; ++i) {
      for (Index j = 0; j < width; ++j) {
        long double sum = biased ? vha::convert<double>(gate.projection.bias(0, j)) : 0.0;
        for (Index k = 0; k < hidden; ++k) {
          sum += static_cast<long double>(x(i, k)) * vha::convert<double>(weight(k, j));
        }
        ASSERT_NEAR(gated(i, j), static_cast<double>(y(i, j) / (1 + std::exp(-sum))),
                    100 * std::numeric_limits<T>::epsilon())
            << i << ' ' << j;
      }
    }
  }
}

TEST(Gate, RefusesAnotherShape) {
  const SigmoidGate<float> gate{{Weight<float>(Eigen::MatrixXf::Zero(4, 6))}};
  EXPECT_NO_THROW(gate.require_shape(4, 6));
  try {
    gate.require_shape(6, 4);
    FAIL();
  } catch (const vha::Error& error) {
    EXPECT_STREQ(error.what(), "gate.projection.weight: expected [6, 4], got [4, 6]");
  }
}

TEST(Gate, CastRounds) {
  const SigmoidGate<double> gate{{Weight<double>(Eigen::MatrixXd::Constant(2, 2, 0.1))}};
  EXPECT_EQ(gate.cast<float>().projection.weight(1, 1), 0.1F);
}

}  // namespace
