// SPDX-License-Identifier: Apache-2.0
#pragma once

// The naive twins of the layers that VHA is compared with: plain loops over std::vector<double>, built on
// those of naive_vha.hpp alone. Every array is row-major, weights are [in, out].

#include "naive_vha.hpp"

namespace naive {

/// Multi-matrix factorisation attention: a layer whose `premix` has a map for each of its
/// physical_heads query heads, `wq` one factor of physical_head_dim channels, and one K/V head.
inline Vector mfa_forward(const Layer& l, const Vector& x, const Positions& positions) {
  const Index tokens = positions.size(), d = l.head_dim, heads = l.physical_heads;
  Layer maps;
  maps.head_dim = d;
  maps.physical_heads = 1;
  maps.physical_head_dim = l.physical_head_dim;
  maps.kv_heads = heads;
  maps.premix = l.premix;
  const Vector factor = linear(x, tokens, l.hidden, l.wq, l.bq, l.physical_head_dim);
  const Vector q = rope(rms_norm(apply_premix(maps, factor, tokens), l.q_norm, l.eps), heads, d,
                        positions, l.theta, l.rotary_dim);
  const Vector k = rope(rms_norm(linear(x, tokens, l.hidden, l.wk, l.bk, d), l.k_norm, l.eps), 1, d,
                        positions, l.theta, l.rotary_dim);
  const Vector v = linear(x, tokens, l.hidden, l.wv, l.bv, d);
  const Vector y = attention(q, k, v, {heads, 1, d, d}, positions, positions, l.window,
                             1.0L / std::sqrt(static_cast<Real>(d)));
  return linear(y, tokens, heads * d, l.wo, l.bo, l.hidden);
}

/// A layer that caches latents. Without `value_maps`, the latents are the values.
struct LatentLayer {
  Index hidden = 0, heads = 0, groups = 1;
  Index latent = 0, content = 0, value = 0, turned = 0;  // widths; turned: by RoPE
  double theta = 10000, eps = 1e-6;
  long long window = 0;

  Vector wq;           // [h, heads·(content + turned)]
  Vector wc;           // [h, groups·latent]
  Vector wr;           // [h, turned]
  Vector bq, bc, br;   // as wide as their projection, or empty
  Vector latent_norm;  // [latent], or empty
  Vector key_maps;     // [heads, latent, content]
  Vector value_maps;   // [heads, latent, value], or empty
  Vector wo, bo;       // [heads·value, h]
};

/// Every head's keys and values of all tokens, made and attended to.
inline Vector latent_forward(const LatentLayer& l, const Vector& x, const Positions& positions) {
  const Index tokens = positions.size(), width = l.content + l.turned;
  const Vector c =
      rms_norm(linear(x, tokens, l.hidden, l.wc, l.bc, l.groups * l.latent), l.latent_norm, l.eps);
  const Vector r =
      rope(linear(x, tokens, l.hidden, l.wr, l.br, l.turned), 1, l.turned, positions, l.theta, 0);
  Vector q = linear(x, tokens, l.hidden, l.wq, l.bq, l.heads * width);
  Vector k(q.size()), v(tokens * l.heads * l.value);
  for (Index s = 0; s < tokens; ++s) {
    for (Index j = 0; j < l.heads; ++j) {
      double* const query = &q[(s * l.heads + j) * width];
      const Vector position(query + l.content, query + width);
      const Vector turned = rope(position, 1, l.turned, {positions[s]}, l.theta, 0);
      std::copy(turned.begin(), turned.end(), query + l.content);

      const auto map = [&](const Vector& maps, Index out, double* to) {
        const double* const from = &c[(s * l.groups + j / (l.heads / l.groups)) * l.latent];
        for (Index o = 0; o < out; ++o) {
          Real sum = 0.0L;
          for (Index i = 0; i < l.latent; ++i) {
            sum += maps.empty() ? Real{i == o ? from[i] : 0.0}
                                : Real{from[i]} * maps[(j * l.latent + i) * out + o];
          }
          to[o] = static_cast<double>(sum);
        }
      };
      double* const key = &k[(s * l.heads + j) * width];
      map(l.key_maps, l.content, key);
      std::copy_n(&r[s * l.turned], l.turned, key + l.content);
      map(l.value_maps, l.value, &v[(s * l.heads + j) * l.value]);
    }
  }
  const Vector y = attention(q, k, v, {l.heads, l.heads, width, l.value}, positions, positions,
                             l.window, 1.0L / std::sqrt(static_cast<Real>(width)));
  return linear(y, tokens, l.heads * l.value, l.wo, l.bo, l.hidden);
}

}  // namespace naive
