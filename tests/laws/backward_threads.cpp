// SPDX-License-Identifier: Apache-2.0
// Gradients have the same bits on any number of threads; and those of float are close to those of
// double at a real layer's width.

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <type_traits>
#include <vector>
#include <vha/vha.hpp>

#include "random.hpp"
#include "sanitized.hpp"

namespace {

using vha::AttentionConfig;
using vha::AttentionGradients;
using vha::Executor;
using vha::Index;
using vha::RowMajorMatrix;

template <class T>
using Gradients = std::map<std::string, RowMajorMatrix<T>>;

/// The gradients of all weights, and of x under that name.
template <class Layer, class T = typename Layer::T>
Gradients<T> gradients_of(const Layer& layer, const RowMajorMatrix<T>& x,
                          const RowMajorMatrix<T>& upstream, const Executor& executor) {
  vha::AttentionTrace<T> trace;
  typename Layer::Workspace forward_workspace;
  RowMajorMatrix<T> out(x.rows(), x.cols()), dx(x.rows(), x.cols());
  layer.forward_into(x, out, forward_workspace, {}, &trace);
  auto gradients = AttentionGradients<T>::zeros_like(layer);
  vha::AttentionBackwardWorkspace<T> workspace;
  workspace.executor = executor;
  vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace);
  Gradients<T> all{{"x", dx}};
  gradients.for_each(layer, [&](const std::string& name, const auto&, const auto& gradient) {
    all[name] = gradient;
  });
  return all;
}

/// A layer whose maps have been trained, more or less.
template <class S>
vha::VhaAttention<S> trained(const AttentionConfig& config, std::uint32_t seed) {
  const auto fresh = vha::initialise_vha<S>(config);
  auto weights = fresh.weights();
  laws::Random random(seed);
  const auto noise = [&](const vha::Weight<S>& from, double scale) {
    RowMajorMatrix<S> moved = from.template to<S>();
    for (Index k = 0; k < moved.size(); ++k) {
      moved.data()[k] = vha::convert<S>(static_cast<double>(moved.data()[k]) + scale * random());
    }
    return vha::Weight<S>::own(std::move(moved));
  };
  for (auto& map : weights.premix.maps) map = noise(map, 0.1);
  weights.postmix.b = noise(weights.postmix.b, 0.2);
  weights.q_norm = noise(weights.q_norm, 0.3);
  return {config, std::move(weights)};
}

template <class T>
RowMajorMatrix<T> random_matrix(Index rows, Index cols, std::uint32_t seed) {
  laws::Random random(seed);
  RowMajorMatrix<T> matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) {
    matrix.data()[k] = static_cast<T>(static_cast<float>(random()));
  }
  return matrix;
}

TEST(BackwardThreads, GiveTheSameBits) {
  const AttentionConfig config{.hidden = 96, .head_dim = 32, .query_heads = 8, .kv_heads = 2};
  const auto layer = trained<float>(config, 1);
  const auto x = random_matrix<float>(700, 96, 2), upstream = random_matrix<float>(700, 96, 3);
  const auto expected = gradients_of(layer, x, upstream, {});
  Eigen::ThreadPool pool(3);
  for (const int threads : {2, 3, 4}) {
    const Eigen::ThreadPoolDevice device(&pool, threads);
    for (int run = 0; run < 3; ++run) {
      for (const auto& [name, gradient] : gradients_of(layer, x, upstream, device)) {
        EXPECT_EQ(gradient, expected.at(name)) << name << ", " << threads << " threads";
      }
    }
  }
}

TEST(BackwardThreads, FloatIsCloseToDouble) {
  if (support::sanitized) GTEST_SKIP() << "minutes under a sanitizer";
  const AttentionConfig config{
      .hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .rope_theta = 1e6};
  const auto layer = trained<float>(config, 1);
  const auto x = random_matrix<float>(64, 2048, 2), upstream = random_matrix<float>(64, 2048, 3);
  Eigen::ThreadPool pool(1);
  const Eigen::ThreadPoolDevice device(&pool, 2);
  const auto in_float = gradients_of(layer, x, upstream, device);
  const auto in_double =
      gradients_of(layer.cast<double>(), RowMajorMatrix<double>(x.cast<double>()),
                   RowMajorMatrix<double>(upstream.cast<double>()), device);
  for (const auto& [name, expected] : in_double) {
    const double difference = (in_float.at(name).cast<double>() - expected).cwiseAbs().maxCoeff();
    EXPECT_LE(difference, 1e-4 * expected.cwiseAbs().maxCoeff()) << name;
    RecordProperty(name, std::to_string(difference / expected.cwiseAbs().maxCoeff()));
  }
}

// bfloat16 weights have float gradients: those of the same numbers stored as float.
TEST(BackwardThreads, Bfloat16WeightsHaveFloatGradients) {
  const AttentionConfig config{.hidden = 96, .head_dim = 32, .query_heads = 8, .kv_heads = 2};
  const auto layer = trained<vha::bfloat16>(config, 1);
  const auto x = random_matrix<float>(50, 96, 2), upstream = random_matrix<float>(50, 96, 3);
  const auto narrow = gradients_of(layer, x, upstream, {});
  static_assert(std::is_same_v<decltype(narrow), const Gradients<float>>);
  for (const auto& [name, expected] : gradients_of(layer.cast<float>(), x, upstream, {})) {
    EXPECT_LE((narrow.at(name) - expected).cwiseAbs().maxCoeff(),
              1e-6 * expected.cwiseAbs().maxCoeff())
        << name;
  }
}

}  // namespace
