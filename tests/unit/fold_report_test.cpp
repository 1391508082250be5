// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vha/attention/initialise.hpp>
#include <vha/fold/fold_report.hpp>

#include "error_of.hpp"

namespace {

using vha::bfloat16;
using vha::compare_outputs;
using vha::fold_report;
using vha::Index;
using vha::RowMajorMatrix;
using vha::Tensor3;
using vha::Weight;

using support::error_of;

constexpr vha::AttentionConfig config = {
    .hidden = 24, .head_dim = 8, .query_heads = 6, .kv_heads = 2};

/// A layer in which no map is the identity.
template <class S>
vha::VhaAttention<S> trained_layer() {
  auto weights =
      vha::initialise_vha<double>(config, {.projection_std = 0.2, .premix_std = 0.5}).weights();
  std::mt19937 bits(1);
  std::uniform_real_distribution<double> uniform(-0.5, 0.5);
  for (auto* matrix : {&weights.postmix.a, &weights.postmix.b}) {
    *matrix = Eigen::MatrixXd(Eigen::MatrixXd::NullaryExpr(6, 4, [&] { return uniform(bits); }));
  }
  return vha::VhaAttention<double>(config, weights).cast<S>();
}

template <class T>
RowMajorMatrix<T> tokens() {
  std::mt19937 bits(2);
  std::uniform_real_distribution<double> uniform(-1, 1);
  return RowMajorMatrix<T>::NullaryExpr(9, 24, [&] { return static_cast<T>(uniform(bits)); });
}

TEST(CompareOutputs, IsRelativeToTheLargestOutput) {
  Eigen::Matrix2d expected, actual;
  expected << 1, -4, 0, 2;
  actual << 1, -4, 1, 2.5;
  const auto report = compare_outputs(expected, actual);
  EXPECT_EQ(report.largest_output, 4);
  EXPECT_EQ(report.largest_difference, 0.25);
  EXPECT_DOUBLE_EQ(report.rms_difference, std::sqrt((1 + 0.25) / 4) / 4);
  EXPECT_EQ(report.query_rounding + report.output_rounding, 0);
  // What is relative to what matters: the other way round -4 is still the largest.
  actual(0, 1) = -8;
  EXPECT_EQ(compare_outputs(expected, actual).largest_difference, 1);
  EXPECT_EQ(compare_outputs(actual, expected).largest_difference, 0.5);
}

TEST(CompareOutputs, OrderAndScalarMayDiffer) {
  Tensor3<float> rows(2, 3, 4);
  Eigen::Tensor<double, 3> columns(2, 3, 4);
  for (Index i = 0; i < 24; ++i) {
    rows(i / 12, i / 4 % 3, i % 4) = static_cast<float>(i);
    columns(i / 12, i / 4 % 3, i % 4) = static_cast<double>(i);
  }
  EXPECT_EQ(compare_outputs(rows, columns).largest_difference, 0);
  columns(1, 2, 0) += 23;
  EXPECT_EQ(compare_outputs(rows, columns).largest_difference, 1);
}

TEST(CompareOutputs, NothingAndZeroesAreEqual) {
  const auto zeros = compare_outputs(Eigen::MatrixXf(Eigen::MatrixXf::Zero(2, 3)),
                                     Eigen::MatrixXf(Eigen::MatrixXf::Zero(2, 3)));
  EXPECT_EQ(zeros.largest_output, 0);
  EXPECT_EQ(zeros.largest_difference, 0);
  EXPECT_EQ(zeros.rms_difference, 0);
  const auto none = compare_outputs(Eigen::MatrixXf(0, 3), Eigen::MatrixXf(0, 3));
  EXPECT_EQ(none.rms_difference, 0);
  // A difference from zeros has nothing to be relative to, and must show all the same.
  EXPECT_EQ(compare_outputs(Eigen::MatrixXf(Eigen::MatrixXf::Zero(1, 2)),
                            Eigen::MatrixXf(Eigen::MatrixXf::Ones(1, 2)))
                .largest_difference,
            1);
}

TEST(CompareOutputs, RefusesShapesAndWhatIsNotFinite) {
  Eigen::MatrixXf a = Eigen::MatrixXf::Ones(2, 3), b = Eigen::MatrixXf::Ones(3, 2);
  EXPECT_EQ(error_of([&] { compare_outputs(a, b); }), "actual: expected [1, 2, 3], got [1, 3, 2]");
  b = a;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    a(1, 1) = bad;
    const std::string text = "outputs: expected finite values, got an infinity or NaN";
    EXPECT_EQ(error_of([&] { compare_outputs(a, b); }), text);
    EXPECT_EQ(error_of([&] { compare_outputs(b, a); }), text);
    EXPECT_EQ(error_of([&] { compare_outputs(a, a); }), text);
  }
}

TEST(FoldReport, ExactFoldsCostNoRounding) {
  const auto layer = trained_layer<double>();
  const auto report = fold_report(layer, vha::fold_vha(layer), tokens<double>());
  EXPECT_GT(report.largest_output, 0.1);
  EXPECT_GT(report.largest_difference, 0);
  EXPECT_LT(report.largest_difference, 1e-13);
  EXPECT_LE(report.rms_difference, report.largest_difference);
  EXPECT_EQ(report.query_rounding, 0);
  EXPECT_EQ(report.output_rounding, 0);
}

TEST(FoldReport, StoredFoldsCostHalfAUnitInTheLastPlace) {
  const auto check = [](const auto& layer, const auto& folded, const auto& x, double half_unit) {
    const auto report = fold_report(layer, folded, x);
    for (const double rounding : {report.query_rounding, report.output_rounding}) {
      EXPECT_LE(rounding, half_unit);
      EXPECT_GE(rounding, half_unit / 8);
    }
    EXPECT_GT(report.largest_difference, 0);
    EXPECT_LT(report.largest_difference, 100 * half_unit);
  };
  const auto single = trained_layer<float>();
  check(single, vha::fold_vha(single), tokens<float>(), 0x1p-24);
  check(single, vha::fold_vha<bfloat16>(single), tokens<float>(), 0x1p-8);
  const auto narrow = trained_layer<bfloat16>();
  check(narrow, vha::fold_vha(narrow), tokens<float>(), 0x1p-8);
}

TEST(FoldReport, PartialFoldsReportTheirPart) {
  const auto layer = trained_layer<float>();
  const auto premix = fold_report(layer, vha::fold_premix(layer), tokens<float>());
  EXPECT_GT(premix.query_rounding, 0);
  EXPECT_EQ(premix.output_rounding, 0);
  const auto postmix = fold_report(layer, vha::fold_postmix(layer), tokens<float>());
  EXPECT_EQ(postmix.query_rounding, 0);
  EXPECT_GT(postmix.output_rounding, 0);
}

TEST(FoldReport, ShowsAFoldOfAnotherLayer) {
  const auto layer = trained_layer<double>();
  const auto other = vha::initialise_vha<double>(config, {.projection_std = 0.2, .seed = 9});
  const auto report = fold_report(layer, vha::fold_vha(other), tokens<double>());
  EXPECT_GT(report.largest_difference, 0.01);
  EXPECT_GT(report.query_rounding, 0.01);
  EXPECT_GT(report.output_rounding, 0.01);
}

}  // namespace
