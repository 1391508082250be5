// SPDX-License-Identifier: Apache-2.0
// virtualise undoes the fold; of a layer that is no fold it finds the nearest one.

#include <Eigen/QR>
#include <Eigen/SVD>
#include <cmath>
#include <limits>

#include "error_of.hpp"
#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

using support::error_of;
using vha::AttentionConfig;
using vha::GqaAttention;
using vha::Index;
using vha::VhaAttention;
using vha::virtualise;
using Matrix = vha::RowMajorMatrix<double>;

template <class S>
Array stored(const vha::Weight<S>& weight) {
  return array_of(weight.template to<double>());
}

Matrix random_matrix(Index rows, Index cols, Random& random) {
  Matrix matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = random();
  return matrix;
}
Matrix random_rotation(Index size, Random& random) {
  return Eigen::HouseholderQR<Eigen::MatrixXd>(random_matrix(size, size, random)).householderQ();
}

/// These maps as a Premix, and those of a layer.
vha::Premix<double> premix_of(const std::vector<Matrix>& maps) {
  vha::Premix<double> premix;
  for (const Matrix& map : maps) premix.maps.push_back(vha::Weight<double>::own(map));
  return premix;
}
std::vector<Matrix> maps_of(const auto& layer) {
  std::vector<Matrix> maps;
  for (const auto& map : layer.weights().premix.maps) maps.push_back(map.template to<double>());
  return maps;
}

/// W_Q' over its bias, or W_Q over its bias.
template <class S>
Matrix with_bias(const vha::Linear<S>& query) {
  Matrix both = query.weight.template to<double>();
  if (query.bias.empty()) return both;
  both.conservativeResize(query.in() + 1, query.out());
  both.bottomRows(1) = query.bias.template to<double>();
  return both;
}

/// A GQA layer with this W_Q', bias below the weight where it has `hidden + 1` rows.
template <class S = double>
GqaAttention<S> gqa_layer(const AttentionConfig& config, const Matrix& query) {
  auto weights = vha::fold_vha(vha::initialise_vha<S>(config)).weights();
  weights.query.weight = vha::Weight<double>(query.topRows(config.hidden)).template cast<S>();
  if (query.rows() > config.hidden) {
    weights.query.bias = vha::Weight<double>(query.bottomRows(1)).template cast<S>();
  }
  return {config, weights};
}

/// The squared Frobenius distance of W_Q' from the fold of `query` and `maps`, in loops.
double squared_distance(const Matrix& target, const Matrix& query, const std::vector<Matrix>& maps,
                        std::size_t first_group, std::size_t last_group) {
  const Index rank = maps.front().rows(), head_dim = maps.front().cols();
  const Index heads = query.cols() / rank;
  double sum = 0;
  for (std::size_t group = first_group; group < last_group; ++group) {
    for (Index i = 0; i < heads; ++i) {
      const Index head = static_cast<Index>(group) * heads + i;
      sum += (target.middleCols(head * head_dim, head_dim) -
              query.middleCols(i * rank, rank) * maps[group])
                 .squaredNorm();
    }
  }
  return sum;
}

constexpr AttentionConfig three_groups = {
    .hidden = 7, .head_dim = 4, .query_heads = 6, .kv_heads = 3};

template <class Kind>
class Virtualise : public testing::Test {};
TYPED_TEST_SUITE(Virtualise, Kinds);

TYPED_TEST(Virtualise, OfAFoldIsTheFoldedLayer) {
  using S = typename TypeParam::S;
  using T = typename TypeParam::T;
  Random random(1);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index tokens) {
    const auto twin = random_layer<S>(shape, random);
    const auto gqa = vha::fold_vha(library_layer<typename TypeParam::Vha>(twin));
    const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
    const auto [layer, report] =
        virtualise(gqa, {.physical_head_dim = static_cast<Index>(shape.physical_head_dim)});
    EXPECT_TRUE((std::is_same_v<std::remove_cvref_t<decltype(layer)>, typename TypeParam::Vha>));
    const double allowed = tolerance<S>(longest_sum(twin, tokens));
    EXPECT_LE(report.relative_error, allowed);
    EXPECT_TRUE(close(run(layer, x), run(gqa, x), allowed));
    const auto again = vha::fold_vha(layer);
    EXPECT_TRUE(close(array_of(with_bias(again.weights().query)),
                      array_of(with_bias(gqa.weights().query)), allowed));
    EXPECT_TRUE(
        same_bits(stored(again.weights().output.weight), stored(gqa.weights().output.weight)));
  });
}

TYPED_TEST(Virtualise, OfAGatedLayerWithPremixFoldedIsThatLayer) {
  using S = typename TypeParam::S;
  using T = typename TypeParam::T;
  Random random(2);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index tokens) {
    auto twin = random_gated_layer<S>(shape, random);
    std::fill(twin.postmix_b.begin(), twin.postmix_b.end(), 0.0);
    const auto gated = library_layer<typename TypeParam::Gated>(twin);
    const auto folded = vha::fold_premix(gated);
    const auto gqa = folded.with(
        folded.config(),
        folded.weights().template with_parts<S>(folded.weights().query, folded.weights().output,
                                                vha::NoPremix{}, vha::NoPostmix{}));
    const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
    const auto layer =
        virtualise(gqa, {.physical_head_dim = static_cast<Index>(shape.physical_head_dim)}).layer;
    EXPECT_TRUE((std::is_same_v<std::remove_cvref_t<decltype(layer)>, typename TypeParam::Gated>));
    EXPECT_TRUE(close(run(layer, x), run(gated, x), tolerance<S>(longest_sum(twin, tokens))));
  });
}

TEST(VirtualiseOfAFold, IsExactAtTheWidthOfRealHeads) {
  Random random(3);
  const AttentionConfig config{.hidden = 301, .head_dim = 128, .query_heads = 6, .kv_heads = 3};
  auto weights = vha::initialise_vha<double>(config).weights();
  weights.premix = premix_of({random_matrix(128, 128, random), random_matrix(128, 128, random),
                              random_matrix(128, 128, random)});
  const auto gqa = vha::fold_vha(VhaAttention<double>(config, weights));
  const auto [layer, report] = virtualise(gqa);
  EXPECT_LE(report.relative_error, 3e-15);
  EXPECT_TRUE(close(stored(vha::fold_vha(layer).weights().query.weight),
                    stored(gqa.weights().query.weight), 1e-14));
  const auto narrow = virtualise(gqa.cast<float>());
  EXPECT_LE(narrow.report.relative_error, 2 * 0x1p-24);
  EXPECT_LE(virtualise<float>(gqa).report.relative_error, 2 * 0x1p-24);
}

// In CᵀC the singular values below 1e-8 are gone; the sweeps find them.
TEST(VirtualiseOfAFold, IsExactWhereMapsAreNearlySingular) {
  Random random(4);
  const AttentionConfig config{.hidden = 40, .head_dim = 8, .query_heads = 6, .kv_heads = 3};
  const auto graded = [&] {
    Matrix lengths = Matrix::Zero(8, 8);
    for (Index k = 0; k < 8; ++k) lengths(k, k) = std::pow(10.0, -2 * static_cast<double>(k));
    return lengths;
  }();
  const Matrix common = random_rotation(8, random) * graded;
  auto weights = vha::initialise_vha<double>(config).weights();
  weights.premix =
      premix_of({common * random_rotation(8, random), common * random_rotation(8, random),
                 common * random_rotation(8, random)});
  const auto gqa = vha::fold_vha(VhaAttention<double>(config, weights));
  EXPECT_GT(virtualise(gqa, {.max_sweeps = 0, .tolerance = 0}).report.relative_error, 1e-11);
  const auto report = virtualise(gqa).report;
  EXPECT_LE(report.relative_error, 1e-15);
  EXPECT_GE(report.sweeps, 1);
  EXPECT_LE(report.sweeps, 3);
}

TEST(VirtualiseOfAnyLayer, HasTheErrorThatEckartAndYoungGive) {
  Random random(5);
  for (const Index rows : {7, 8}) {  // without and with a bias
    for (const Index rank : {1, 3, 4, 5, 12}) {
      const Matrix target = random_matrix(rows, 24, random);
      const auto [layer, report] =
          virtualise(gqa_layer(three_groups, target), {.physical_head_dim = rank});
      Matrix stacked(2 * rows, 12);
      for (Index head = 0; head < 6; ++head) {
        stacked.block(head % 2 * rows, head / 2 * 4, rows, 4) = target.middleCols(head * 4, 4);
      }
      const Eigen::VectorXd singular = Eigen::JacobiSVD<Eigen::MatrixXd>(stacked).singularValues();
      const double left_over = singular.tail(12 - rank).norm();
      EXPECT_NEAR(report.relative_error, left_over / target.norm(), 1e-14);
      EXPECT_EQ(layer.weights().query.bias.empty(), rows == 7);

      const Matrix query = with_bias(layer.weights().query);
      const auto maps = maps_of(layer);
      EXPECT_NEAR(std::sqrt(squared_distance(target, query, maps, 0, 3)), left_over, 1e-13);
      ASSERT_EQ(report.group_errors.size(), 3U);
      for (std::size_t group = 0; group < 3; ++group) {
        const double norm = target.middleCols(static_cast<Index>(group) * 8, 8).norm();
        EXPECT_NEAR(report.group_errors[group],
                    std::sqrt(squared_distance(target, query, maps, group, group + 1)) / norm,
                    1e-14);
      }
    }
  }
}

TEST(VirtualiseOfAnyLayer, CannotBeBetteredByASmallChange) {
  Random random(6);
  const Matrix target = random_matrix(8, 24, random);
  const auto layer = virtualise(gqa_layer(three_groups, target)).layer;
  const Matrix query = with_bias(layer.weights().query);
  const auto maps = maps_of(layer);
  const double best = squared_distance(target, query, maps, 0, 3);
  for (const double step : {1e-1, 1e-3, 1e-5}) {
    for (int direction = 0; direction < 50; ++direction) {
      const Matrix other_query = query + step * random_matrix(8, 8, random);
      auto other_maps = maps;
      for (Matrix& map : other_maps) map += step * random_matrix(4, 4, random);
      EXPECT_GT(squared_distance(target, other_query, other_maps, 0, 3), best);
      EXPECT_GT(squared_distance(target, query, other_maps, 0, 3), best);
      EXPECT_GT(squared_distance(target, other_query, maps, 0, 3), best);
    }
  }
}

TEST(VirtualiseOfAnyLayer, TakesOneSweepWhereTheSvdWasExact) {
  Random random(7);
  const auto gqa = gqa_layer(three_groups, random_matrix(7, 24, random));
  const auto report = virtualise(gqa).report;
  EXPECT_EQ(report.sweeps, 1);
  EXPECT_EQ(virtualise(gqa, {.max_sweeps = 0}).report.sweeps, 0);
  EXPECT_EQ(virtualise(gqa, {.tolerance = 1}).report.sweeps, 0);
  EXPECT_NEAR(virtualise(gqa, {.max_sweeps = 0}).report.relative_error, report.relative_error,
              1e-14);
}

TEST(VirtualiseOfAnyLayer, ReportsTheErrorOfTheWeightsAsStored) {
  Random random(8);
  const Matrix exact = random_matrix(7, 24, random);
  const auto narrow = virtualise(gqa_layer<vha::bfloat16>(three_groups, exact));
  const auto w = narrow.layer.weights();
  const Matrix target = vha::Weight<double>(exact).cast<vha::bfloat16>().to<double>();
  EXPECT_NEAR(narrow.report.relative_error,
              std::sqrt(squared_distance(target, with_bias(w.query), maps_of(narrow.layer), 0, 3)) /
                  target.norm(),
              1e-14);
}

TEST(VirtualiseGauge, IsNearestToTheIdentityAmongRotations) {
  Random random(9);
  for (const Index rank : {3, 4, 6}) {
    const auto layer = virtualise(gqa_layer(three_groups, random_matrix(7, 24, random)),
                                  {.physical_head_dim = rank})
                           .layer;
    const auto maps = maps_of(layer);
    Matrix squares = Matrix::Zero(rank, rank);
    for (const Matrix& map : maps) squares += map * map.transpose();
    EXPECT_TRUE(
        squares.isApprox(12.0 / static_cast<double>(rank) * Matrix::Identity(rank, rank), 1e-13));
    const auto distance = [&](const Matrix& turn) {
      double sum = 0;
      for (const Matrix& map : maps) {
        sum += (turn * map - Matrix::Identity(rank, 4)).squaredNorm();
      }
      return sum;
    };
    const double nearest = distance(Matrix::Identity(rank, rank));
    for (const double step : {1e-4, 1e-2, 1.0}) {
      for (int k = 0; k < 50; ++k) {
        const Matrix away = Matrix::Identity(rank, rank) + step * random_matrix(rank, rank, random);
        const Eigen::JacobiSVD<Eigen::MatrixXd> svd(away,
                                                    Eigen::ComputeFullU | Eigen::ComputeFullV);
        EXPECT_GE(distance(svd.matrixU() * svd.matrixV().transpose()), nearest - 1e-12);
      }
      EXPECT_GE(distance(random_rotation(rank, random)), nearest);
    }
  }
}

TEST(VirtualiseGauge, IsTheIdentityWhereAllGroupsAreEqual) {
  Random random(10);
  const Matrix query = random_matrix(8, 8, random);
  const auto layer = virtualise(gqa_layer(three_groups, query.replicate(1, 3))).layer;
  for (const Matrix& map : maps_of(layer)) {
    EXPECT_TRUE(map.isApprox(Matrix::Identity(4, 4), 1e-14));
  }
  EXPECT_TRUE(with_bias(layer.weights().query).isApprox(query, 1e-14));
}

TEST(VirtualiseGauge, StaysNearTheIdentityForALayerThatStartsThere) {
  const AttentionConfig config{.hidden = 96, .head_dim = 32, .query_heads = 8, .kv_heads = 2};
  const auto start = vha::initialise_vha<double>(config);
  const auto layer = virtualise(vha::fold_vha(start)).layer;
  for (std::size_t group = 0; group < 2; ++group) {
    const auto distance = [&](const auto& from) {
      return (maps_of(from)[group] - Matrix::Identity(32, 32)).norm();
    };
    EXPECT_LE(distance(layer), distance(start));
  }
}

TEST(VirtualiseOfOneGroup, IsTheLayerToTheBit) {
  Random random(11);
  const AttentionConfig config{.hidden = 7, .head_dim = 4, .query_heads = 3, .kv_heads = 1};
  const Matrix query = random_matrix(8, 12, random);
  const auto [layer, report] = virtualise(gqa_layer(config, query));
  EXPECT_TRUE(same_bits(array_of(with_bias(layer.weights().query)), array_of(query)));
  EXPECT_EQ(maps_of(layer).front(), Matrix::Identity(4, 4));
  EXPECT_EQ(report.relative_error, 0);
  EXPECT_EQ(report.sweeps, 0);
}

TEST(VirtualiseOfDeficientRank, IsExactAndFinite) {
  Random random(12);
  const auto check = [](const AttentionConfig& config, const Matrix& query) {
    const auto [layer, report] = virtualise(gqa_layer(config, query));
    EXPECT_LE(report.relative_error, 1e-15);
    EXPECT_TRUE(with_bias(layer.weights().query).allFinite());
    Matrix squares = Matrix::Zero(config.head_dim, config.head_dim);
    for (const Matrix& map : maps_of(layer)) squares += map * map.transpose();
    // No channel is dead: the maps keep their full rank.
    EXPECT_TRUE(squares.isApprox(
        static_cast<double>(config.kv_heads) * Matrix::Identity(config.head_dim, config.head_dim),
        1e-13));
  };
  check(three_groups, Matrix::Zero(7, 24));
  check(three_groups, Matrix::Ones(8, 24));
  Matrix one_head = Matrix::Zero(7, 24);
  one_head.middleCols(8, 4) = random_matrix(7, 4, random);
  check(three_groups, one_head);
  Matrix opposite = random_matrix(7, 8, random).replicate(1, 2);
  opposite.rightCols(8) *= -1;  // the maps' sum is zero
  check({.hidden = 7, .head_dim = 4, .query_heads = 4, .kv_heads = 2}, opposite);
  // Fewer rows than head_dim, with one physical head.
  check({.hidden = 3, .head_dim = 8, .query_heads = 3, .kv_heads = 3},
        random_matrix(3, 24, random));
}

TEST(VirtualiseOfLargeAndSmallNumbers, NeitherOverflowsNorVanishes) {
  Random random(13);
  const Matrix target = random_matrix(7, 24, random);
  const double error = virtualise(gqa_layer(three_groups, target)).report.relative_error;
  for (const int exponent : {-1000, -600, 600, 1000}) {
    const auto scaled = virtualise(gqa_layer(three_groups, std::ldexp(1.0, exponent) * target));
    EXPECT_NEAR(scaled.report.relative_error, error, 1e-14) << exponent;
  }
}

TEST(VirtualisedLayer, SharesWhatItDoesNotChange) {
  Random random(14);
  auto shape = layer_shapes[4];
  const auto folded =
      vha::fold_vha(library_layer<VhaAttention<float>>(random_layer<float>(shape, random)));
  auto config = folded.config();
  config.value_scale = 0.5;
  const GqaAttention<float> gqa(config, folded.weights());
  const auto layer = virtualise(gqa).layer;
  const auto& from = gqa.weights();
  const auto& to = layer.weights();
  EXPECT_EQ(to.key.weight.view().data, from.key.weight.view().data);
  EXPECT_EQ(to.key.bias.view().data, from.key.bias.view().data);
  EXPECT_EQ(to.value.weight.view().data, from.value.weight.view().data);
  EXPECT_EQ(to.output.weight.view().data, from.output.weight.view().data);
  EXPECT_EQ(to.output.bias.view().data, from.output.bias.view().data);
  EXPECT_EQ(to.q_norm.view().data, from.q_norm.view().data);
  EXPECT_EQ(to.k_norm.view().data, from.k_norm.view().data);
  EXPECT_EQ(layer.config().value_scale, 0.5);
  EXPECT_EQ(layer.config().window, config.window);
}

TEST(VirtualisedLayer, StartsItsPostmixAtTheIdentity) {
  Random random(15);
  const auto gqa = gqa_layer(three_groups, random_matrix(7, 24, random));
  const auto postmix = [&](const vha::VirtualiseOptions& options) {
    return virtualise(gqa, options).layer.weights().postmix;
  };
  const auto first = postmix({.postmix_rank = 2, .seed = 3});
  EXPECT_EQ(first.rank(), 2);
  EXPECT_EQ(first.dense(), Matrix::Identity(6, 6));
  EXPECT_EQ(first.b.to<double>(), Matrix::Zero(6, 2));
  vha::NormalGenerator normal(3);
  const Matrix expected = vha::detail::normal_matrix<double>(6, 2, 0.01, normal);
  EXPECT_EQ(first.a.to<double>(), expected);
  EXPECT_NE(postmix({.postmix_rank = 2, .seed = 4}).a.to<double>(), expected);
  EXPECT_EQ(postmix({}).rank(), 4);
  EXPECT_TRUE(postmix({.postmix_rank = 2, .postmix_std = 0.02, .seed = 3})
                  .a.to<double>()
                  .isApprox(2 * expected, 1e-6));
}

TEST(VirtualiseErrors, NameTheirCause) {
  Matrix query = Matrix::Ones(8, 24);
  query(2, 5) = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(error_of([&] { virtualise(gqa_layer(three_groups, query)); }),
            "query.weight: expected finite numbers, got nan at [2, 5]");
  query(2, 5) = 0;
  query(7, 3) = -std::numeric_limits<double>::infinity();
  EXPECT_EQ(error_of([&] { virtualise(gqa_layer(three_groups, query)); }),
            "query.bias: expected finite numbers, got -inf at [0, 3]");
  const auto gqa = gqa_layer(three_groups, 1e6 * Matrix::Ones(8, 24));
  EXPECT_EQ(
      error_of([&] { virtualise<vha::half>(gqa); }).substr(0, 87),
      "virtualised query.weight: expected numbers in the range of their stored type, got 1e+06");
  const auto option_error = [&](const vha::VirtualiseOptions& options) {
    return error_of([&] { virtualise(gqa, options); });
  };
  EXPECT_EQ(option_error({.postmix_rank = 0}), "postmix_rank: expected 1 or more, got 0");
  EXPECT_EQ(option_error({.physical_head_dim = 13}),
            "physical_head_dim: expected 0 to kv_heads * head_dim = 12, got 13");
  EXPECT_EQ(option_error({.physical_head_dim = -1}),
            "physical_head_dim: expected 0 to kv_heads * head_dim = 12, got -1");
  EXPECT_EQ(option_error({.postmix_std = -1}),
            "postmix_std: expected a number of 0 or more, got -1");
  EXPECT_EQ(option_error({.max_sweeps = -1}), "max_sweeps: expected 0 or more, got -1");
  EXPECT_EQ(option_error({.tolerance = std::numeric_limits<double>::quiet_NaN()}),
            "tolerance: expected a number of 0 or more, got nan");
}

}  // namespace
}  // namespace laws
