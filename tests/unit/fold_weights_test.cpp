// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>
#include <vha/fold/fold_weights.hpp>

#include "error_of.hpp"

namespace {

using vha::bfloat16;
using vha::fold_postmix;
using vha::fold_premix;
using vha::Index;
using vha::Linear;
using vha::Postmix;
using vha::Premix;
using vha::RowMajorMatrix;
using vha::Weight;

using support::error_of;

/// Numbers whose products, and sums of some dozen of these, are exact in double.
template <class S>
Weight<S> random_weight(Index rows, Index cols, unsigned seed) {
  std::mt19937 bits(seed);
  RowMajorMatrix<S> matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) {
    const double digits = static_cast<double>(static_cast<int>(bits() % 255) - 127);
    matrix.data()[k] = vha::convert<S>(std::ldexp(digits, -4 - static_cast<int>(bits() % 8)));
  }
  return Weight<S>::own(std::move(matrix));
}

double at(const auto& weight, Index row, Index col) {
  return vha::convert<double>(weight(row, col));
}

template <class S>
class FoldWeightsOf : public testing::Test {};
using Scalars = testing::Types<double, float, bfloat16, vha::half>;
TYPED_TEST_SUITE(FoldWeightsOf, Scalars);

TYPED_TEST(FoldWeightsOf, QueryBlocksAreTimesTheirMapRoundedOnce) {
  using S = TypeParam;
  // More rows than are folded at a time, square maps and both kinds of rectangular ones.
  for (const auto& sizes : {std::array<Index, 3>{300, 4, 4}, {5, 9, 4}, {5, 3, 6}, {1, 1, 1}}) {
    const Index hidden = sizes[0], from = sizes[1], to = sizes[2];
    constexpr Index groups = 3, heads = 2;
    const auto query = random_weight<S>(hidden, heads * from, 1);
    const auto bias = random_weight<S>(1, heads * from, 2);
    Premix<S> premix;
    for (unsigned g = 0; g < groups; ++g) premix.maps.push_back(random_weight<S>(from, to, 3 + g));
    const Linear<S> folded = fold_premix<S>(Linear<S>{query, bias}, premix);
    ASSERT_EQ(folded.in(), hidden);
    ASSERT_EQ(folded.out(), groups * heads * to);
    ASSERT_EQ(folded.bias.cols(), folded.out());
    for (Index g = 0; g < groups; ++g) {
      for (Index i = 0; i < heads; ++i) {
        for (Index c = 0; c < to; ++c) {
          const Index column = (g * heads + i) * to + c;
          const auto product = [&](const Weight<S>& weight, Index row) {
            double sum = 0;
            for (Index k = 0; k < from; ++k) {
              sum += at(weight, row, i * from + k) *
                     at(premix.maps[static_cast<std::size_t>(g)], k, c);
            }
            return vha::convert<S>(sum);
          };
          for (Index row = 0; row < hidden; ++row) {
            ASSERT_EQ(folded.weight(row, column), product(query, row)) << row << ' ' << column;
          }
          ASSERT_EQ(folded.bias(0, column), product(bias, 0)) << column;
        }
      }
    }
  }
}

TYPED_TEST(FoldWeightsOf, OutputBlocksAreMixedRoundedOnce) {
  using S = TypeParam;
  constexpr Index heads = 6, head_dim = 19, hidden = 9;  // more channels than fold at a time
  const auto output = random_weight<S>(heads * head_dim, hidden, 1);
  const auto turned = Weight<S>::own(output.template to<S>().transpose());
  const auto bias = random_weight<S>(1, hidden, 2);
  const Postmix<S> low_rank{random_weight<S>(heads, 2, 3), random_weight<S>(heads, 2, 4)};
  for (const Postmix<S>& postmix : {low_rank, Postmix<S>::from_dense(random_weight<S>(6, 6, 5))}) {
    const Linear<S> folded = fold_postmix<S>(Linear<S>{output, bias}, postmix);
    EXPECT_EQ(folded.bias.view().data, bias.view().data);  // untouched, and shared
    for (Index j = 0; j < heads; ++j) {
      for (Index row = j * head_dim; row < (j + 1) * head_dim; ++row) {
        for (Index column = 0; column < hidden; ++column) {
          double sum = 0;
          for (Index i = 0; i < heads; ++i) {
            double mixing = postmix.residual && i == j ? 1 : 0;
            for (Index k = 0; k < postmix.rank(); ++k) {
              mixing += at(postmix.b, i, k) * at(postmix.a, j, k);
            }
            sum += mixing * at(output, row + (i - j) * head_dim, column);
          }
          ASSERT_EQ(folded.weight(row, column), vha::convert<S>(sum)) << row << ' ' << column;
        }
      }
    }
    // The same weight as Hugging Face lays it out.
    const auto view = Weight<S>::view_out_in(turned.view().data, heads * head_dim, hidden);
    EXPECT_EQ(fold_postmix<S>(Linear<S>{view}, postmix).weight.template to<double>(),
              folded.weight.template to<double>());
  }
}

// 1 + 2^-8 + 2^-30 is above the middle of two bfloat16; summed in float it would be the middle.
TEST(FoldWeights, Bfloat16IsSummedWideAndRoundedOnce) {
  const Linear<bfloat16> query{Weight<double>(Eigen::RowVector3d(1, 1, 1)).cast<bfloat16>()};
  const Eigen::Vector3d column(1, 0x1p-8, 0x1p-30);
  const RowMajorMatrix<double> map = column;
  const Premix<bfloat16> premix{{Weight<double>::own(map).cast<bfloat16>()}};
  EXPECT_EQ(at(fold_premix<bfloat16>(query, premix).weight, 0, 0), 1 + 0x1p-7);
  EXPECT_EQ(at(fold_premix<double>(query, premix).weight, 0, 0), 1 + 0x1p-8 + 0x1p-30);

  const Linear<bfloat16> output{Weight<double>::own(map).cast<bfloat16>()};
  const auto ones =
      Postmix<bfloat16>::from_dense(Weight<double>(Eigen::Matrix3d::Ones()).cast<bfloat16>());
  EXPECT_EQ(at(fold_postmix<bfloat16>(output, ones).weight, 2, 0), 1 + 0x1p-7);
}

TEST(FoldWeights, FloatIsSummedInDouble) {
  const Linear<float> query{Weight<float>(Eigen::RowVector3f(1, 1, 1))};
  const RowMajorMatrix<float> map = Eigen::Vector3f(1, 0x1p-24F, 0x1p-40F);
  const Premix<float> premix{{Weight<float>::own(map)}};
  EXPECT_EQ(fold_premix<float>(query, premix).weight(0, 0), 1 + 0x1p-23F);
}

TEST(FoldWeights, RefusesShapesThatDoNotFit) {
  const Linear<float> query{random_weight<float>(5, 8, 1)};
  const auto premix_error = [&](const Linear<float>& linear, std::vector<Weight<float>> maps) {
    return error_of([&] { fold_premix<float>(linear, Premix<float>{std::move(maps)}); });
  };
  EXPECT_EQ(premix_error(query, {}), "premix.maps: expected a map for each of kv_heads, got none");
  EXPECT_EQ(
      premix_error(query, {random_weight<float>(3, 4, 2)}),
      "query.weight: expected a positive multiple of 3 (Premix's input width) columns, got [5, 8]");
  EXPECT_EQ(premix_error(query, {random_weight<float>(4, 4, 2), random_weight<float>(4, 2, 2)}),
            "premix.maps[1]: expected [4, 4], got [4, 2]");
  EXPECT_EQ(
      premix_error({query.weight, random_weight<float>(1, 4, 3)}, {random_weight<float>(4, 4, 2)}),
      "query.bias: expected [1, 8], got [1, 4]");

  const Linear<float> output{random_weight<float>(8, 5, 1)};
  const auto postmix_error = [&](const Weight<float>& a, const Weight<float>& b) {
    return error_of([&] { fold_postmix<float>(output, Postmix<float>{a, b}); });
  };
  EXPECT_EQ(postmix_error(random_weight<float>(3, 2, 2), random_weight<float>(3, 2, 2)),
            "output.weight: expected a positive multiple of 3 (query heads) rows, got [8, 5]");
  EXPECT_EQ(postmix_error(random_weight<float>(4, 2, 2), random_weight<float>(4, 3, 2)),
            "postmix.b: expected [4, 2], got [4, 3]");
  EXPECT_EQ(postmix_error({}, {}).substr(0, 10), "postmix.a:");
}

TEST(FoldWeights, RefusesProductsThatAreNotFinite) {
  RowMajorMatrix<double> matrix = RowMajorMatrix<double>::Ones(2, 2);
  matrix(1, 0) = 3e30;
  const Linear<double> query{Weight<double>::own(matrix)};
  const Premix<double> premix{{Weight<double>(1e20 * Eigen::Matrix2d::Identity())}};
  EXPECT_NO_THROW(fold_premix<double>(query, premix));
  EXPECT_EQ(error_of([&] { fold_premix<float>(query, premix); }),
            "folded query.weight: expected finite products in the range of their stored type, got "
            "3e+50 at [1, 0]");
  matrix(0, 1) = std::numeric_limits<double>::quiet_NaN();
  const auto postmix = Postmix<double>::from_dense(Eigen::Matrix2d::Identity());
  EXPECT_EQ(error_of([&] { fold_postmix<double>({Weight<double>(matrix)}, postmix); }),
            "folded output.weight: expected finite products in the range of their stored type, got "
            "nan at [0, 1]");
}

}  // namespace
