// SPDX-License-Identifier: Apache-2.0
// Attention as one writes it with a matrix product at hand: scores of a tile of queries against all
// keys that they see, softmax row by row, weights times values.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <vector>

#include "../threads.hpp"
#include "peer.hpp"

namespace bench {

/// `Product` has `scores(rows, depth, cols, a, b, c)`, C = A·Bᵀ, and `values(…)`, C = A·B, on
/// contiguous row-major matrices. Tiles are shared out to the threads.
template <class Product>
class TiledAttention {
 public:
  explicit TiledAttention(const CoreOperands<float>& operands)
      : o_(operands),
        threads_(operands.threads),
        lanes_(static_cast<std::size_t>(operands.threads)) {
    const Index rows = std::min(tile_tokens, o_.tokens) * o_.group_size;
    for (auto& lane : lanes_) {
      lane.query.setZero(rows * o_.head_dim);
      lane.weights.setZero(rows * o_.keys);
      lane.out.setZero(rows * o_.head_dim);
      lane.sums.setZero(rows);
    }
  }

  void run() {
    const Index tiles = (o_.tokens + tile_tokens - 1) / tile_tokens;
    const Index heads = o_.batch * o_.kv_heads;
    threads_.executor().for_each(tiles * heads, [&](Index task, Index lane) {
      // The longest first, so that threads end together.
      attend(task % heads, tiles - 1 - task / heads, lanes_[static_cast<std::size_t>(lane)]);
    });
  }

 private:
  struct Lane {
    Eigen::VectorXf query, weights, out, sums;
  };

  void attend(Index kv_head, Index tile, Lane& lane) {
    using Row = Eigen::Map<Eigen::ArrayXf>;
    const Index d = o_.head_dim, first = tile * tile_tokens;
    const Index tokens = std::min(o_.tokens - first, tile_tokens);
    const Index rows = tokens * o_.group_size;
    const Index keys = o_.keys - o_.tokens + first + tokens;
    const Index batch = kv_head / o_.kv_heads, group = kv_head % o_.kv_heads;
    const Index heads = (batch * o_.tokens + first) * o_.query_width() + group * o_.group_size * d;
    const Index cached = kv_head * o_.capacity * d;

    for (Index t = 0; t < tokens; ++t) {
      Row(&lane.query[t * o_.group_size * d], o_.group_size * d) =
          o_.scale() * Eigen::Map<const Eigen::ArrayXf>(o_.query + heads + t * o_.query_width(),
                                                        o_.group_size * d);
    }
    Product::scores(rows, d, keys, lane.query.data(), o_.key + cached, lane.weights.data());
    for (Index row = 0; row < rows; ++row) {
      Row weights(&lane.weights[row * keys], keys);
      auto visible = weights.head(keys - tokens + row / o_.group_size + 1);
      visible = (visible - visible.maxCoeff()).exp();
      weights.tail(keys - visible.size()).setZero();
      lane.sums[row] = visible.sum();
    }
    Product::values(rows, keys, d, lane.weights.data(), o_.value + cached, lane.out.data());
    for (Index row = 0; row < rows; ++row) {
      const Index token = row / o_.group_size, member = row % o_.group_size;
      Row(o_.out + heads + token * o_.query_width() + member * d, d) =
          Eigen::Map<const Eigen::ArrayXf>(&lane.out[row * d], d) / lane.sums[row];
    }
  }

  CoreOperands<float> o_;
  Threads threads_;
  std::vector<Lane> lanes_;
};

template <class Product>
Task tiled_attention(const CoreOperands<float>& operands) {
  const auto attention = std::make_shared<TiledAttention<Product>>(operands);
  return {[attention] { attention->run(); }, copy_from(operands.out, operands.out_size())};
}

}  // namespace bench
