// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vha/attention/initialise.hpp>

namespace {

using vha::AttentionConfig;
using vha::Index;
using vha::initialise_vha;
using vha::InitialiseOptions;
using vha::RowMajorMatrix;

constexpr AttentionConfig small = {.hidden = 8, .head_dim = 4, .query_heads = 6, .kv_heads = 2};
constexpr AttentionConfig wide = {.hidden = 192, .head_dim = 128, .query_heads = 6, .kv_heads = 3};

std::string error_of(const AttentionConfig& config, const InitialiseOptions& options) {
  try {
    initialise_vha<float>(config, options);
  } catch (const vha::Error& error) {
    return error.what();
  }
  return "no vha::Error";
}

TEST(Initialise, ASeedGivesTheseNumbersForGood) {
  const auto layer = initialise_vha<double>(small, {.seed = 7});
  const auto& w = layer.weights();
  EXPECT_EQ(w.query.weight(0, 0), 0x1.5ee7ad90e4p-10);
  EXPECT_EQ(w.key.weight(1, 2), -0x1.ec4f683d24c8p-6);
  EXPECT_EQ(w.value.weight(7, 5), -0x1.f3325b6dc2ep-7);
  EXPECT_EQ(w.output.weight(23, 7), -0x1.49db7732622ep-5);
  EXPECT_EQ(w.premix.maps[0](0, 0), 0x1.fefb9f7fbee7ep-1);
  EXPECT_EQ(w.premix.maps[1](2, 3), 0x1.7f102d2c90d8p-7);
  EXPECT_EQ(w.postmix.a(5, 3), -0x1.e63e65b00fp-12);

  const auto rows = initialise_vha<double>(small, {.physical_head_dim = 3, .seed = 7});
  EXPECT_EQ(rows.weights().premix.maps[0](0, 0), -0x1.40fa7de28a86fp-11);
  EXPECT_EQ(rows.weights().premix.maps[1](2, 3), -0x1.e605dc8490c1dp-3);
  const auto columns = initialise_vha<double>(small, {.physical_head_dim = 6, .seed = 7});
  EXPECT_EQ(columns.weights().premix.maps[1](2, 3), 0x1.0a4d3fbe37c8dp-4);
  EXPECT_EQ(columns.weights().postmix.a(5, 3), 0x1.84948c3b1518p-8);
}

TEST(Initialise, NarrowerLayersHoldTheSameNumbersRoundedOnce) {
  const auto exact = initialise_vha<double>(small, {.seed = 7});
  const auto check = [&](const auto& layer) {
    using S = typename std::remove_cvref_t<decltype(layer)>::Scalar;
    const auto same = [](const vha::Weight<double>& from, const vha::Weight<S>& to) {
      for (Index i = 0; i < from.rows(); ++i) {
        for (Index j = 0; j < from.cols(); ++j) EXPECT_EQ(to(i, j), vha::convert<S>(from(i, j)));
      }
    };
    same(exact.weights().query.weight, layer.weights().query.weight);
    same(exact.weights().output.weight, layer.weights().output.weight);
    same(exact.weights().premix.maps[1], layer.weights().premix.maps[1]);
    same(exact.weights().postmix.a, layer.weights().postmix.a);
  };
  check(initialise_vha<float>(small, {.seed = 7}));
  check(initialise_vha<vha::bfloat16>(small, {.seed = 7}));
  check(initialise_vha<vha::half>(small, {.seed = 7}));
}

TEST(Initialise, ShapesFollowTheConfiguration) {
  const auto layer = initialise_vha<float>(small, {.postmix_rank = 3});
  const auto& w = layer.weights();
  EXPECT_EQ(w.query.out(), 3 * 4);  // H' heads, not Hv
  EXPECT_EQ(w.key.out(), 2 * 4);
  EXPECT_EQ(w.output.in(), 6 * 4);
  EXPECT_EQ(w.premix.kv_heads(), 2);
  EXPECT_EQ(w.postmix.rank(), 3);
  EXPECT_TRUE(w.query.bias.empty() && w.output.bias.empty());
}

TEST(Initialise, ProjectionsHaveTheirStandardDeviation) {
  const auto layer = initialise_vha<double>(wide, {.projection_std = 0.05, .seed = 1});
  for (const auto* linear : {&layer.weights().query, &layer.weights().key, &layer.weights().value,
                             &layer.weights().output}) {
    const auto matrix = linear->weight.to<double>();
    const double n = static_cast<double>(matrix.size());
    EXPECT_NEAR(matrix.mean(), 0, 5 * 0.05 / std::sqrt(n));
    EXPECT_NEAR(matrix.squaredNorm() / n, 0.05 * 0.05, 5 * 0.05 * 0.05 * std::sqrt(2 / n));
  }
}

TEST(Initialise, SquareMapsStandNearTheIdentity) {
  const auto layer = initialise_vha<double>(wide, {.seed = 2});
  ASSERT_EQ(layer.weights().premix.kv_heads(), 3);
  for (const auto& map : layer.weights().premix.maps) {
    const RowMajorMatrix<double> difference =
        map.to<double>() - RowMajorMatrix<double>::Identity(128, 128);
    // 0.1·√d, of d² elements: a relative standard error of 1 / (d·√2).
    EXPECT_NEAR(difference.norm(), 0.1 * std::sqrt(128.0), 0.1 * std::sqrt(128.0) * 5 / 181);
    EXPECT_NEAR(difference.diagonal().mean(), 0, 5 * 0.1 / 128);
  }
  EXPECT_NE(layer.weights().premix.maps[0](0, 1), layer.weights().premix.maps[1](0, 1));
}

TEST(Initialise, RectangularMapsAreOrthogonal) {
  for (const Index from : {1, 5, 31, 33, 64}) {
    const AttentionConfig config = {.hidden = 8, .head_dim = 32, .query_heads = 4, .kv_heads = 2};
    const auto layer = initialise_vha<double>(config, {.physical_head_dim = from, .seed = 3});
    const double square = 32.0 / static_cast<double>(from);  // of the scale √(d / d_q)
    ASSERT_EQ(layer.weights().query.out(), 2 * from);
    for (const auto& map : layer.weights().premix.maps) {
      const RowMajorMatrix<double> p = map.to<double>();
      ASSERT_EQ(p.rows(), from);
      ASSERT_EQ(p.cols(), 32);
      const RowMajorMatrix<double> gram = from < 32 ? RowMajorMatrix<double>(p * p.transpose())
                                                    : RowMajorMatrix<double>(p.transpose() * p);
      const auto identity = RowMajorMatrix<double>::Identity(gram.rows(), gram.cols());
      EXPECT_LE((gram - square * identity).cwiseAbs().maxCoeff(), 1e-14 * square) << from;
    }
  }
}

TEST(Initialise, PostmixStartsAsTheIdentity) {
  const auto layer = initialise_vha<double>(wide, {.postmix_rank = 64, .seed = 4});
  const auto& postmix = layer.weights().postmix;
  EXPECT_EQ(postmix.b.to<double>(), (RowMajorMatrix<double>::Zero(6, 64)));
  EXPECT_EQ(postmix.dense(), (RowMajorMatrix<double>::Identity(6, 6)));
  const auto a = postmix.a.to<double>();
  EXPECT_NEAR(a.squaredNorm() / 384, 1e-4, 5e-4 * std::sqrt(2.0 / 384));
}

TEST(Initialise, QkNormIsOnesOrAbsent) {
  const auto ones = RowMajorMatrix<float>::Ones(1, 4);
  const auto with = initialise_vha<vha::bfloat16>(small);
  EXPECT_EQ(with.weights().q_norm.to<float>(), ones);
  EXPECT_EQ(with.weights().k_norm.to<float>(), ones);
  EXPECT_FALSE(initialise_vha<vha::bfloat16>(small, {.qk_norm = false}).weights().has_qk_norm());
}

TEST(Initialise, RefusesSizesThatCannotBe) {
  EXPECT_EQ(error_of(small, {}), "no vha::Error");
  EXPECT_EQ(error_of(small, {.postmix_rank = 0}), "postmix_rank: expected 1 or more, got 0");
  EXPECT_EQ(error_of(small, {.physical_head_dim = -4}),
            "physical_head_dim: expected 1 or more, got -4");
  AttentionConfig odd = small;
  odd.head_dim = 5;
  EXPECT_EQ(error_of(odd, {}).substr(0, 9), "head_dim:");
}

}  // namespace
