// SPDX-License-Identifier: Apache-2.0
// Layers of the paper's sizes, with maps as far from where they started as in a trained model.
#pragma once

#include <vha/vha.hpp>

struct PaperShape {
  const char* name;
  vha::Index layers;
  vha::AttentionConfig config;
  vha::Index postmix_rank;
};

/// Hidden sizes, heads and layers are Qwen3's; all have 2 K/V heads and RoPE with theta 10^6.
inline constexpr PaperShape paper_shapes[] = {
    {"0.6B",
     28,
     {.hidden = 1024, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .rope_theta = 1e6},
     4},
    {"1.7B",
     28,
     {.hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .rope_theta = 1e6},
     4},
    {"4B",
     36,
     {.hidden = 2560, .head_dim = 128, .query_heads = 32, .kv_heads = 2, .rope_theta = 1e6},
     8},
    {"30B-A3B",
     48,
     {.hidden = 2048, .head_dim = 128, .query_heads = 32, .kv_heads = 2, .rope_theta = 1e6},
     12},
};

/// ‖P_g - I‖_F of the paper's trained 1.7B model.
inline constexpr double trained_premix_distance = 5.85;

inline vha::RowMajorMatrix<double> normal_matrix(vha::Index rows, vha::Index cols, double std,
                                                 vha::NormalGenerator& normal) {
  return vha::RowMajorMatrix<double>::NullaryExpr(rows, cols, [&] { return std * normal(); });
}

/// A layer in double whose Premix is `trained_premix_distance` away from the identity, whose
/// Postmix mixes all heads, and whose norms differ from channel to channel.
inline vha::VhaAttention<double> trained_layer(const PaperShape& shape) {
  const auto& config = shape.config;
  const vha::Index d = config.head_dim;
  auto weights =
      vha::initialise_vha<double>(config, {.postmix_rank = shape.postmix_rank}).weights();
  vha::NormalGenerator normal(1);
  for (auto& map : weights.premix.maps) {
    vha::RowMajorMatrix<double> moved = normal_matrix(d, d, 1, normal);
    moved *= trained_premix_distance / moved.norm();
    moved.diagonal().array() += 1;
    map = moved;
  }
  weights.postmix.a = normal_matrix(config.query_heads, shape.postmix_rank, 0.5, normal);
  weights.postmix.b = normal_matrix(config.query_heads, shape.postmix_rank, 0.5, normal);
  for (auto* norm : {&weights.q_norm, &weights.k_norm}) {
    *norm = vha::RowMajorMatrix<double>(normal_matrix(1, d, 0.2, normal).array() + 1);
  }
  return {config, std::move(weights)};
}
