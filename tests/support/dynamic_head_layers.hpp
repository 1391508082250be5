// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layers of dynamically composable heads, as the naive twin's and as the library's.

#include "fixtures.hpp"
#include "naive_dynamic_heads.hpp"

namespace laws {

/// Layers of awkward sizes and their names.
inline auto random_dynamic_heads(Random& random) {
  struct Shape {
    LayerShape layer;
    naive::Index rank, dynamic_dim;
    bool base = false;
  };
  static const Shape shapes[] = {
      {{"three groups", 11, 6, 2, 3}, 2, 5},
      {{"one head, a rank above it", 5, 2, 1, 1}, 3, 1},
      {{.name = "a K/V head each, rank above the heads, bases, biases, window",
        .hidden = 9,
        .head_dim = 8,
        .physical_heads = 1,
        .kv_heads = 3,
        .biases = true,
        .window = 4,
        .rotary_dim = 4},
       5,
       7,
       true},
      {{.name = "one group, bases, no norm, scaled values",
        .hidden = 7,
        .head_dim = 4,
        .physical_heads = 5,
        .kv_heads = 1,
        .qk_norm = false,
        .value_scale = -1.75},
       1,
       12,
       true},
      {{.name = "wider than a register tile, window",
        .hidden = 67,
        .head_dim = 34,
        .physical_heads = 3,
        .kv_heads = 2,
        .window = 17},
       2,
       24},
  };
  std::vector<std::pair<std::string, naive::DynamicHeadsLayer>> result;
  for (const Shape& shape : shapes) {
    naive::DynamicHeadsLayer l{random_layer<double>(shape.layer, random), {}, {}, {}, {}};
    const auto projection = [&](naive::Index in, naive::Index out) {
      return random.values<double>(in * out, std::sqrt(3.0 / static_cast<double>(in)));
    };
    const auto heads = l.query_heads();
    l.wq = projection(l.hidden, heads * l.head_dim);
    if (shape.layer.biases) l.bq = random.values<double>(heads * l.head_dim);
    for (auto* map : {&l.premix, &l.postmix_a, &l.postmix_b}) map->clear();
    l.rank = shape.rank;
    for (const std::size_t side : {0U, 1U}) {
      for (auto* net : {&l.of_query[side], &l.of_key[side]}) {
        net->width = shape.dynamic_dim;
        net->w1 = projection(l.hidden, net->width);
        net->w2 = projection(net->width, 2 * l.rank * heads);
        net->gate = projection(l.hidden, heads);
      }
      if (shape.base) l.base[side] = projection(heads, heads);
    }
    result.emplace_back(shape.layer.name, l);
  }
  return result;
}

inline auto library_layer(const naive::DynamicHeadsLayer& l) {
  const auto plain = library_layer<vha::GqaAttention<double>>(l);
  vha::DynamicHeadsWeights<double> weights{plain.weights(), {}, {}};
  const auto net = [&](const naive::DynamicNet& of) {
    return vha::DynamicMapWeights<double>{own_weight<double>(of.w1, l.hidden),
                                          own_weight<double>(of.w2, of.width),
                                          own_weight<double>(of.gate, l.hidden)};
  };
  for (const std::size_t side : {0U, 1U}) {
    auto& composition = side == 0 ? weights.before_softmax : weights.after_softmax;
    composition.query = net(l.of_query[side]);
    composition.key = net(l.of_key[side]);
    if (!l.base[side].empty()) {
      composition.base = own_weight<double>(l.base[side], l.query_heads());
    }
  }
  return vha::DynamicHeadsAttention<double>(plain.config(), weights);
}

}  // namespace laws
