// SPDX-License-Identifier: Apache-2.0
// The backward pass against central differences of the forward, weight by weight, and what must hold
// of gradients whatever their values.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <vector>
#include <vha/vha.hpp>

#include "error_of.hpp"
#include "random.hpp"

namespace {

using laws::Random;
using vha::AttentionConfig;
using vha::AttentionGradients;
using vha::Index;
using vha::Position;
using vha::RowMajorMatrix;
using vha::TokenLayout;
using Matrix = RowMajorMatrix<double>;
using Parameters = std::map<std::string, Matrix>;

template <class PremixPart, class PostmixPart, class GatePart = vha::NoGate>
using Layer = vha::Attention<double, PremixPart, PostmixPart, GatePart>;
using Vha = Layer<vha::Premix<double>, vha::Postmix<double>>;
using Gated = Layer<vha::Premix<double>, vha::Postmix<double>, vha::SigmoidGate<double>>;
using Curved = Layer<vha::Premix<double, vha::Silu>, vha::Postmix<double, vha::Silu>>;
using Gqa = Layer<vha::NoPremix, vha::NoPostmix>;
using PremixOnly = Layer<vha::Premix<double>, vha::NoPostmix>;
using PostmixOnly = Layer<vha::NoPremix, vha::Postmix<double>>;

struct Sizes {
  AttentionConfig config = {
      .hidden = 10, .head_dim = 6, .query_heads = 6, .kv_heads = 2, .rope_theta = 100};
  Index physical_head_dim = 6;
  Index batch = 2, tokens = 7;
  bool norm = true, bias = false, residual = true;
};

Matrix random_matrix(Index rows, Index cols, Random& random, double scale) {
  Matrix matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = scale * random();
  return matrix;
}

template <class L>
Parameters parameters(const Sizes& sizes, Random& random) {
  const AttentionConfig& c = sizes.config;
  Parameters p;
  const auto linear = [&](const std::string& name, Index in, Index out) {
    p[name + ".weight"] = random_matrix(in, out, random, 0.5);
    if (sizes.bias) p[name + ".bias"] = random_matrix(1, out, random, 0.5);
  };
  const Index physical =
      L::Weights::has_premix ? c.group_size() * sizes.physical_head_dim : c.query_width();
  linear("query", c.hidden, physical);
  linear("key", c.hidden, c.kv_width());
  linear("value", c.hidden, c.kv_width());
  linear("output", c.query_width(), c.hidden);
  if (sizes.norm) {
    p["q_norm"] = random_matrix(1, c.head_dim, random, 1);
    p["k_norm"] = random_matrix(1, c.head_dim, random, 1);
  }
  if constexpr (L::Weights::has_premix) {
    for (Index g = 0; g < c.kv_heads; ++g) {
      p["premix[" + std::to_string(g) + "]"] =
          random_matrix(sizes.physical_head_dim, c.head_dim, random, 1);
    }
  }
  if constexpr (L::Weights::has_postmix) {
    p["postmix_a"] = random_matrix(c.query_heads, 3, random, 0.7);
    p["postmix_b"] = random_matrix(c.query_heads, 3, random, 0.7);
  }
  if constexpr (L::Weights::has_gate) linear("gate", c.hidden, c.query_width());
  return p;
}

template <class L>
L layer_of(const Sizes& sizes, const Parameters& p) {
  const auto weight = [&](const std::string& name) {
    const auto found = p.find(name);
    return found == p.end() ? vha::Weight<double>() : vha::Weight<double>(found->second);
  };
  const auto linear = [&](const std::string& name) {
    return vha::Linear<double>{weight(name + ".weight"), weight(name + ".bias")};
  };
  typename L::Weights weights{.query = linear("query"),
                              .key = linear("key"),
                              .value = linear("value"),
                              .output = linear("output"),
                              .q_norm = weight("q_norm"),
                              .k_norm = weight("k_norm")};
  if constexpr (L::Weights::has_premix) {
    for (Index g = 0; g < sizes.config.kv_heads; ++g) {
      weights.premix.maps.push_back(weight("premix[" + std::to_string(g) + "]"));
    }
  }
  if constexpr (L::Weights::has_postmix) {
    weights.postmix.a = weight("postmix_a");
    weights.postmix.b = weight("postmix_b");
    weights.postmix.residual = sizes.residual;
  }
  if constexpr (L::Weights::has_gate) weights.gate.projection = linear("gate");
  return L(sizes.config, std::move(weights));
}

using Tensor = vha::Tensor3<double>;

Tensor random_tensor(Index batch, Index tokens, Index channels, Random& random) {
  Tensor tensor(batch, tokens, channels);
  for (Index k = 0; k < tensor.size(); ++k) tensor.data()[k] = random();
  return tensor;
}

/// Σ out·upstream, over the real tokens.
template <class L>
double loss(const L& layer, const Tensor& x, const Tensor& upstream, const TokenLayout& layout) {
  const Tensor out = layer.forward(x, layout);
  double sum = 0;
  for (Index row = 0; row < x.dimension(0); ++row) {
    const Index first = layout.first(row, x.dimension(1));
    for (Index t = first; t < first + layout.length(row, x.dimension(1)); ++t) {
      for (Index c = 0; c < x.dimension(2); ++c) sum += out(row, t, c) * upstream(row, t, c);
    }
  }
  return sum;
}

template <class L>
struct Result {
  Tensor dx;
  AttentionGradients<typename L::T> gradients;
};

template <class L>
Result<L> backward(const L& layer, const Tensor& x, const Tensor& upstream,
                   const TokenLayout& layout = {}) {
  Result<L> result{Tensor(x.dimension(0), x.dimension(1), x.dimension(2)),
                   AttentionGradients<typename L::T>::zeros_like(layer)};
  result.dx.setConstant(std::numeric_limits<double>::quiet_NaN());
  vha::AttentionTrace<typename L::T> trace;
  typename L::Workspace forward_workspace;
  Tensor out(x.dimension(0), x.dimension(1), x.dimension(2));
  layer.forward_into(x, out, forward_workspace, layout, &trace);
  vha::AttentionBackwardWorkspace<typename L::T> workspace;
  vha::attention_backward(layer, x, trace, upstream, result.dx, result.gradients, workspace,
                          layout);
  return result;
}

/// Central differences along random directions, one for x and for each weight.
template <class L>
void expect_gradients(const Sizes& sizes, const TokenLayout& layout = {}) {
  Random random(7);
  const Parameters p = parameters<L>(sizes, random);
  const L layer = layer_of<L>(sizes, p);
  Tensor x = random_tensor(sizes.batch, sizes.tokens, sizes.config.hidden, random);
  Tensor upstream = random_tensor(sizes.batch, sizes.tokens, sizes.config.hidden, random);
  const Result<L> result = backward(layer, x, upstream, layout);
  const double step = 1e-6;
  const auto expect = [&](const std::string& name, double analytic, double size, auto&& loss_at) {
    const double numeric = (loss_at(step) - loss_at(-step)) / (2 * step);
    EXPECT_NEAR(analytic, numeric, 1e-6 * size + 1e-9) << name;
    // A token that sees itself alone gives all its weight to itself, whatever its query.
    if (sizes.tokens > 1) {
      EXPECT_GT(std::abs(numeric), 0) << name;
    }
  };
  {
    const Tensor direction = random_tensor(sizes.batch, sizes.tokens, sizes.config.hidden, random);
    double analytic = 0, square = 0;
    for (Index k = 0; k < x.size(); ++k) {
      analytic += result.dx.data()[k] * direction.data()[k];
      square += result.dx.data()[k] * result.dx.data()[k];
    }
    expect("x", analytic, std::sqrt(square), [&](double h) {
      const Tensor moved = x + direction * h;
      return loss(layer, moved, upstream, layout);
    });
  }
  auto gradients = result.gradients;
  std::size_t weights = 0;
  gradients.for_each(layer, [&](const std::string& name, const auto&, Matrix& gradient) {
    ++weights;
    const Matrix direction = random_matrix(gradient.rows(), gradient.cols(), random, 1);
    expect(name, gradient.cwiseProduct(direction).sum(), gradient.norm(), [&](double h) {
      Parameters moved = p;
      moved.at(name) += h * direction;
      return loss(layer_of<L>(sizes, moved), x, upstream, layout);
    });
  });
  EXPECT_EQ(weights, p.size());
}

TEST(Backward, OfAVhaLayer) {
  expect_gradients<Vha>({});
}
TEST(Backward, OfAGatedLayer) {
  expect_gradients<Gated>({.bias = true});
}
TEST(Backward, OfCurvedMaps) {
  expect_gradients<Curved>({});
}
TEST(Backward, OfAGqaLayer) {
  expect_gradients<Gqa>({});
}
TEST(Backward, OfPremixAlone) {
  expect_gradients<PremixOnly>({});
}
TEST(Backward, OfPostmixAlone) {
  expect_gradients<PostmixOnly>({});
}
TEST(Backward, OfRectangularPremix) {
  expect_gradients<Vha>({.physical_head_dim = 4});
  expect_gradients<Vha>({.physical_head_dim = 9});
}
TEST(Backward, WithoutNormWithBiases) {
  expect_gradients<Vha>({.norm = false, .bias = true});
}
TEST(Backward, OfAMixingWithoutResidual) {
  expect_gradients<PostmixOnly>({.residual = false});
}

TEST(Backward, OfOtherConfigurations) {
  Sizes sizes;
  sizes.config.window = 3;
  sizes.config.rotary_dim = 4;
  sizes.config.value_scale = 1.7;
  expect_gradients<Vha>(sizes);
  sizes.config = {.hidden = 5, .head_dim = 2, .query_heads = 3, .kv_heads = 1};
  sizes.physical_head_dim = 2;
  expect_gradients<Vha>(sizes);
  sizes.config = {.hidden = 7, .head_dim = 4, .query_heads = 4, .kv_heads = 4};
  sizes.physical_head_dim = 4;
  expect_gradients<Vha>(sizes);
  sizes.tokens = 1;
  expect_gradients<PremixOnly>(sizes);
}

// More tokens than a block of queries or of keys holds, and more blocks than shares.
TEST(Backward, OfManyBlocks) {
  Sizes sizes;
  sizes.batch = 1;
  sizes.tokens = 900;
  expect_gradients<Vha>(sizes);
  sizes.config.window = 150;
  expect_gradients<Gqa>(sizes);
}

TEST(Backward, OfPaddingAndPositions) {
  Sizes sizes;
  sizes.batch = 3;
  const std::vector<Index> lengths = {7, 0, 4};
  std::vector<Position> positions(21);
  for (std::size_t k = 0; k < positions.size(); ++k) {
    positions[k] = static_cast<Position>(100 + 3 * (k % 7));
  }
  expect_gradients<Vha>(sizes, {.lengths = lengths});
  expect_gradients<Gated>(sizes, {.lengths = lengths, .padding = vha::Padding::left});
  expect_gradients<Vha>(
      sizes, {.lengths = lengths, .padding = vha::Padding::left, .positions = positions});
}

TEST(Backward, ReadsNoPaddingAndGivesItZeros) {
  Sizes sizes;
  Random random(3);
  const auto layer = layer_of<Gated>(sizes, parameters<Gated>(sizes, random));
  Tensor x = random_tensor(2, 7, 10, random), upstream = random_tensor(2, 7, 10, random);
  const std::vector<Index> lengths = {5, 7};
  const auto clean = backward(layer, x, upstream, {.lengths = lengths});
  for (Index t = 5; t < 7; ++t) {
    for (Index c = 0; c < 10; ++c) {
      x(0, t, c) = upstream(0, t, c) = std::numeric_limits<double>::quiet_NaN();
      EXPECT_EQ(clean.dx(0, t, c), 0);
    }
  }
  auto dirty = backward(layer, x, upstream, {.lengths = lengths});
  auto expected = clean.gradients;
  std::map<std::string, Matrix> all;
  expected.for_each(layer, [&](const std::string& name, const auto&, Matrix& g) { all[name] = g; });
  dirty.gradients.for_each(layer, [&](const std::string& name, const auto&, Matrix& g) {
    EXPECT_EQ(g, all.at(name)) << name;
  });
  for (Index k = 0; k < x.size(); ++k) EXPECT_EQ(dirty.dx.data()[k], clean.dx.data()[k]);
}

TEST(Backward, TwoCallsAddUpToTwice) {
  Sizes sizes;
  Random random(5);
  const auto layer = layer_of<Gated>(sizes, parameters<Gated>(sizes, random));
  const Tensor x = random_tensor(2, 7, 10, random), upstream = random_tensor(2, 7, 10, random);
  auto once = backward(layer, x, upstream);
  auto gradients = once.gradients;
  vha::AttentionTrace<double> trace;
  Gated::Workspace forward_workspace;
  Tensor out(2, 7, 10), dx(2, 7, 10);
  layer.forward_into(x, out, forward_workspace, {}, &trace);
  vha::AttentionBackwardWorkspace<double> workspace;
  vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace);
  std::map<std::string, Matrix> all;
  once.gradients.for_each(layer,
                          [&](const std::string& name, const auto&, Matrix& g) { all[name] = g; });
  gradients.for_each(layer, [&](const std::string& name, const auto&, Matrix& g) {
    EXPECT_LE((g - 2 * all.at(name)).cwiseAbs().maxCoeff(), 1e-13 * g.cwiseAbs().maxCoeff())
        << name;
  });
  for (Index k = 0; k < dx.size(); ++k) EXPECT_EQ(dx.data()[k], once.dx.data()[k]);
}

TEST(Backward, FrozenWeightsChangeNoOther) {
  Sizes sizes;
  sizes.bias = true;
  Random random(9);
  const auto layer = layer_of<Gated>(sizes, parameters<Gated>(sizes, random));
  const Tensor x = random_tensor(2, 7, 10, random), upstream = random_tensor(2, 7, 10, random);
  auto all = backward(layer, x, upstream);
  std::vector<std::string> names;
  all.gradients.for_each(
      layer, [&](const std::string& name, const auto&, Matrix&) { names.push_back(name); });
  vha::AttentionTrace<double> trace;
  Gated::Workspace forward_workspace;
  Tensor out(2, 7, 10), dx(2, 7, 10);
  layer.forward_into(x, out, forward_workspace, {}, &trace);
  vha::AttentionBackwardWorkspace<double> workspace;
  for (const std::string& frozen : names) {
    auto gradients = AttentionGradients<double>::zeros_like(layer);
    gradients.for_each(layer, [&](const std::string& name, const auto&, Matrix& g) {
      if (name == frozen) g.resize(0, 0);
    });
    vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace);
    std::map<std::string, Matrix> got;
    gradients.for_each(layer,
                       [&](const std::string& name, const auto&, Matrix& g) { got[name] = g; });
    all.gradients.for_each(layer, [&](const std::string& name, const auto&, Matrix& g) {
      if (name == frozen) {
        EXPECT_EQ(got.at(name).size(), 0) << name;
      } else {
        EXPECT_EQ(got.at(name), g) << name << " where " << frozen << " is frozen";
      }
    });
  }
  AttentionGradients<double> none;
  vha::attention_backward(layer, x, trace, upstream, dx, none, workspace);
  for (Index k = 0; k < dx.size(); ++k) EXPECT_EQ(dx.data()[k], all.dx.data()[k]);
}

TEST(Backward, RefusesWhatDoesNotFit) {
  Sizes sizes;
  Random random(11);
  const auto layer = layer_of<Vha>(sizes, parameters<Vha>(sizes, random));
  const Tensor x = random_tensor(2, 7, 10, random);
  vha::AttentionTrace<double> trace;
  Vha::Workspace forward_workspace;
  Tensor out(2, 7, 10), dx(2, 7, 10);
  layer.forward_into(x, out, forward_workspace, {}, &trace);
  vha::AttentionBackwardWorkspace<double> workspace;
  const auto error = [&](const Tensor& upstream, Tensor dx_of, const auto& from, auto gradients) {
    return support::error_of(
        [&] { vha::attention_backward(layer, x, from, upstream, dx_of, gradients, workspace); });
  };
  const auto fitting = AttentionGradients<double>::zeros_like(layer);
  EXPECT_NE(error(Tensor(2, 6, 10), dx, trace, fitting).find("upstream"), std::string::npos);
  EXPECT_NE(error(x, Tensor(2, 7, 9), trace, fitting).find("out"), std::string::npos);
  EXPECT_NE(error(x, dx, vha::AttentionTrace<double>(), fitting).find("trace"), std::string::npos);
  auto wrong = fitting;
  wrong.premix[1].resize(6, 5);
  EXPECT_NE(error(x, dx, trace, wrong).find("gradients.premix[1]"), std::string::npos);
  wrong = fitting;
  wrong.premix.pop_back();
  EXPECT_NE(error(x, dx, trace, wrong).find("gradients.premix.size()"), std::string::npos);
  wrong = fitting;
  wrong.key.weight.resize(3, 3);
  EXPECT_NE(error(x, dx, trace, wrong).find("gradients.key.weight"), std::string::npos);
}

}  // namespace
