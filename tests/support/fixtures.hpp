// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the laws are tested on: layers of awkward sizes, as the naive twin's and as the library's.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/vha.hpp>

#include "naive_vha.hpp"
#include "random.hpp"
#include "sanitized.hpp"
#include "tolerance.hpp"

namespace laws {

/// A scalar that weights are stored in, and sizes known at compile time or not.
template <class Scalar, int HeadDim = Eigen::Dynamic, int GroupSize = Eigen::Dynamic>
struct Kind {
  using S = Scalar;
  using T = vha::Compute<S>;
  using Vha = vha::VhaAttention<S, vha::NoGate, vha::Identity, vha::Identity, HeadDim, GroupSize>;
  using Gated =
      vha::VhaAttention<S, vha::SigmoidGate<S>, vha::Identity, vha::Identity, HeadDim, GroupSize>;
  using Gqa = vha::GqaAttention<S, vha::NoGate, HeadDim, GroupSize>;
  static constexpr int head_dim = HeadDim;
  static constexpr int group_size = GroupSize;
};
/// A few of them where a sanitizer runs along, which makes each several times as dear.
using Kinds = std::conditional_t<
    support::sanitized, testing::Types<Kind<double>, Kind<vha::bfloat16, 8>>,
    testing::Types<Kind<double>, Kind<float>, Kind<vha::bfloat16>, Kind<vha::half>,
                   Kind<double, 6, 2>, Kind<float, 8>, Kind<float, Eigen::Dynamic, 3>>>;

/// Sizes and parts of a layer, in the naive twin's words.
struct LayerShape {
  const char* name;
  naive::Index hidden, head_dim, physical_heads, kv_heads;
  naive::Index physical_head_dim = 0;  ///< 0: as head_dim
  naive::Index postmix_rank = 2;
  bool qk_norm = true;
  bool biases = false;
  long long window = 0;
  naive::Index rotary_dim = 0;
  double value_scale = 1;
};
inline const LayerShape layer_shapes[] = {
    {"three groups", 11, 6, 2, 3},
    {.name = "one group, no norm",
     .hidden = 7,
     .head_dim = 8,
     .physical_heads = 3,
     .kv_heads = 1,
     .qk_norm = false},
    {.name = "one physical head, no norm",
     .hidden = 5,
     .head_dim = 2,
     .physical_heads = 1,
     .kv_heads = 3,
     .postmix_rank = 1,
     .qk_norm = false},
    {.name = "narrow physical heads, biases",
     .hidden = 13,
     .head_dim = 6,
     .physical_heads = 2,
     .kv_heads = 3,
     .physical_head_dim = 3,
     .postmix_rank = 6,
     .biases = true},
    {.name = "wide physical heads, window, partial rotary",
     .hidden = 9,
     .head_dim = 8,
     .physical_heads = 3,
     .kv_heads = 2,
     .physical_head_dim = 11,
     .biases = true,
     .window = 4,
     .rotary_dim = 4,
     .value_scale = -1.75},
    {.name = "wider than a register tile",
     .hidden = 67,
     .head_dim = 34,
     .physical_heads = 3,
     .kv_heads = 2,
     .qk_norm = false,
     .window = 17,
     .value_scale = 0.5},
};
inline constexpr naive::Index token_counts[] = {1, 9, 81};

/// Calls `body(shape, tokens)` for each shape of a kind's compile-time sizes and each token count.
template <class Kind, class Body>
void for_each_shape(Body&& body) {
  const auto fits = [](int fixed, naive::Index size) {
    return fixed == Eigen::Dynamic || fixed == static_cast<int>(size);
  };
  int count = 0;
  for (const LayerShape& shape : layer_shapes) {
    if (!fits(Kind::head_dim, shape.head_dim)) continue;
    if (!fits(Kind::group_size, shape.physical_heads)) continue;
    for (const naive::Index tokens : token_counts) {
      SCOPED_TRACE(std::string(shape.name) + ", " + std::to_string(tokens) + " tokens");
      body(shape, tokens);
      ++count;
    }
  }
  EXPECT_GE(count, 3) << "no shape is of this kind's sizes";
}

/// A VHA layer with weights that are numbers of `S`: Premix neither symmetric nor near the
/// identity, Postmix that mixes all heads.
template <class S>
naive::Layer random_layer(const LayerShape& shape, Random& random) {
  naive::Layer layer;
  layer.hidden = shape.hidden;
  layer.head_dim = shape.head_dim;
  layer.physical_heads = shape.physical_heads;
  layer.physical_head_dim = shape.physical_head_dim;
  layer.kv_heads = shape.kv_heads;
  layer.theta = 100;
  layer.rotary_dim = shape.rotary_dim;
  layer.window = shape.window;
  layer.value_scale = shape.value_scale;
  const auto d = shape.head_dim, heads = layer.query_heads(), kv_width = shape.kv_heads * d;
  const auto physical = shape.physical_head_dim == 0 ? d : shape.physical_head_dim;
  const auto projection = [&](naive::Index in, naive::Index out) {
    return random.values<S>(in * out, std::sqrt(3.0 / static_cast<double>(in)));
  };
  const auto bias = [&](naive::Index out) {
    return shape.biases ? random.values<S>(out) : naive::Vector();
  };
  layer.wq = projection(shape.hidden, shape.physical_heads * physical);
  layer.wk = projection(shape.hidden, kv_width);
  layer.wv = projection(shape.hidden, kv_width);
  layer.wo = projection(heads * d, shape.hidden);
  layer.bq = bias(shape.physical_heads * physical);
  layer.bk = bias(kv_width);
  layer.bv = bias(kv_width);
  layer.bo = bias(shape.hidden);
  if (shape.qk_norm) {
    layer.q_norm = random.values<S>(d, 0.5, 1);
    layer.k_norm = random.values<S>(d, 0.5, 1);
  }
  for (naive::Index group = 0; group < shape.kv_heads; ++group) {
    const naive::Vector map = projection(physical, d);
    layer.premix.insert(layer.premix.end(), map.begin(), map.end());
  }
  layer.postmix_a = random.values<S>(heads * shape.postmix_rank);
  layer.postmix_b = random.values<S>(heads * shape.postmix_rank);
  return layer;
}

/// The same with a gate.
template <class S>
naive::Layer random_gated_layer(const LayerShape& shape, Random& random) {
  naive::Layer layer = random_layer<S>(shape, random);
  layer.wgate = random.values<S>(shape.hidden * layer.query_heads() * shape.head_dim);
  return layer;
}

/// Activations `[tokens, hidden]` that are numbers of `T`.
template <class T>
naive::Vector random_tokens(naive::Index tokens, const naive::Layer& layer, Random& random) {
  return random.values<T>(tokens * layer.hidden, std::sqrt(3.0));
}

inline naive::Positions counted_positions(naive::Index tokens, long long first = 0) {
  naive::Positions positions(tokens);
  for (naive::Index t = 0; t < tokens; ++t) positions[t] = first + static_cast<long long>(t);
  return positions;
}

template <class T>
vha::RowMajorMatrix<T> matrix_of(const naive::Vector& values, naive::Index rows) {
  const auto cols = values.size() / std::max<naive::Index>(rows, 1);
  vha::RowMajorMatrix<T> matrix(rows, cols);
  for (naive::Index k = 0; k < values.size(); ++k) matrix.data()[k] = static_cast<T>(values[k]);
  return matrix;
}

inline vha::AttentionConfig config_of(const naive::Layer& layer) {
  return {.hidden = static_cast<vha::Index>(layer.hidden),
          .head_dim = static_cast<vha::Index>(layer.head_dim),
          .query_heads = static_cast<vha::Index>(layer.query_heads()),
          .kv_heads = static_cast<vha::Index>(layer.kv_heads),
          .rope_theta = layer.theta,
          .rotary_dim = static_cast<vha::Index>(layer.rotary_dim),
          .rms_norm_eps = layer.eps,
          .window = static_cast<vha::Index>(layer.window),
          .value_scale = layer.value_scale};
}

/// A weight that holds a matrix of its own.
template <class S>
vha::Weight<S> own_weight(const naive::Vector& values, naive::Index rows) {
  return vha::Weight<S>::own(matrix_of<S>(values, rows));
}

/// The library's layer with the weights of `layer`, each made by `weight(values, rows)`.
template <class Layer, class MakeWeight>
Layer library_layer(const naive::Layer& layer, MakeWeight&& weight) {
  typename Layer::Weights weights;
  const auto linear = [&](const naive::Vector& matrix, const naive::Vector& bias, naive::Index in) {
    vha::Linear<typename Layer::Scalar> result{weight(matrix, in)};
    if (!bias.empty()) result.bias = weight(bias, 1);
    return result;
  };
  weights.query = linear(layer.wq, layer.bq, layer.hidden);
  weights.key = linear(layer.wk, layer.bk, layer.hidden);
  weights.value = linear(layer.wv, layer.bv, layer.hidden);
  weights.output = linear(layer.wo, layer.bo, layer.query_heads() * layer.head_dim);
  if (!layer.q_norm.empty()) {
    weights.q_norm = weight(layer.q_norm, 1);
    weights.k_norm = weight(layer.k_norm, 1);
  }
  if constexpr (Layer::Weights::has_premix) {
    const auto size = static_cast<std::ptrdiff_t>(layer.premix.size() / layer.kv_heads);
    for (auto map = layer.premix.begin(); map != layer.premix.end(); map += size) {
      weights.premix.maps.push_back(
          weight(naive::Vector(map, map + size), layer.projected_width()));
    }
  }
  if constexpr (Layer::Weights::has_postmix) {
    weights.postmix.a = weight(layer.postmix_a, layer.query_heads());
    weights.postmix.b = weight(layer.postmix_b, layer.query_heads());
  }
  if constexpr (Layer::Weights::has_gate) {
    weights.gate.projection = linear(layer.wgate, {}, layer.hidden);
  }
  return Layer(config_of(layer), std::move(weights));
}

template <class Layer>
Layer library_layer(const naive::Layer& layer) {
  return library_layer<Layer>(layer, own_weight<typename Layer::Scalar>);
}

/// The longest sum that a layer of this size takes, for the tolerance table.
inline naive::Index longest_sum(const naive::Layer& layer, naive::Index tokens) {
  return std::max({layer.hidden, layer.query_heads() * layer.head_dim, tokens});
}

}  // namespace laws
