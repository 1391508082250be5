// SPDX-License-Identifier: Apache-2.0
#pragma once

// The naive twin of dynamically composable heads: every map as a full matrix, every logit by itself, on
// the loops of naive_vha.hpp alone. Every array is row-major, weights are [in, out].

#include <array>

#include "naive_vha.hpp"

namespace naive {

/// What makes a token's map of the heads.
struct DynamicNet {
  Index width = 0;  // K
  Vector w1;        // [h, K]
  Vector w2;        // [K, 2, rank, heads]
  Vector gate;      // [h, heads]
};

/// A plain GQA layer whose heads are composed, before [0] and after [1] the softmax.
struct DynamicHeadsLayer : Layer {
  Index rank = 0;
  std::array<DynamicNet, 2> of_query, of_key;
  std::array<Vector, 2> base;  // [heads, heads], or empty: the identity
};

using HeadMap = std::vector<Real>;  // [heads, heads], from and to

/// The maps of all tokens.
inline std::vector<HeadMap> dynamic_maps(const DynamicHeadsLayer& l, const DynamicNet& net,
                                         const Vector& x, Index tokens) {
  const Index heads = l.query_heads();
  Vector hidden = linear(x, tokens, l.hidden, net.w1, {}, net.width);
  for (double& a : hidden) a = static_cast<double>(Real{a} * std::erfc(-a / std::sqrt(2.0L)) / 2);
  const Vector factors = linear(hidden, tokens, net.width, net.w2, {}, 2 * l.rank * heads);
  const Vector gates = linear(x, tokens, l.hidden, net.gate, {}, heads);
  std::vector<HeadMap> maps(tokens, HeadMap(heads * heads, 0.0L));
  for (Index s = 0; s < tokens; ++s) {
    for (Index m = 0; m < heads; ++m) {
      for (Index n = 0; n < heads; ++n) {
        Real& entry = maps[s][m * heads + n];
        if (m == n) entry = std::tanh(Real{gates[s * heads + n]});
        for (Index r = 0; r < l.rank; ++r) {
          const double* const first = &factors[((s * 2 + 0) * l.rank + r) * heads];
          const double* const second = &factors[((s * 2 + 1) * l.rank + r) * heads];
          Real squares = 0.0L;
          for (Index j = 0; j < heads; ++j) squares += Real{first[j]} * first[j];
          const Real root = std::sqrt(squares / static_cast<Real>(heads) + Real{l.eps});
          entry += first[m] / root * second[n];
        }
      }
    }
  }
  return maps;
}

/// The whole layer over ONE sequence: x [tokens, h], one position per token.
inline Vector dynamic_heads_forward(const DynamicHeadsLayer& l, const Vector& x,
                                    const Positions& positions) {
  const Index tokens = positions.size(), d = l.head_dim, heads = l.query_heads();
  const Index groups = l.kv_heads, per_group = heads / groups;
  const auto turned = [&](const Vector& w, const Vector& b, Index count, const Vector& norm) {
    return rope(rms_norm(linear(x, tokens, l.hidden, w, b, count * d), norm, l.eps), count, d,
                positions, l.theta, l.rotary_dim);
  };
  const Vector q = turned(l.wq, l.bq, heads, l.q_norm), k = turned(l.wk, l.bk, groups, l.k_norm);
  const Vector v = scaled(linear(x, tokens, l.hidden, l.wv, l.bv, groups * d), l.value_scale);
  std::array<std::vector<HeadMap>, 2> of_query, of_key;
  for (Index side = 0; side < 2; ++side) {
    of_query[side] = dynamic_maps(l, l.of_query[side], x, tokens);
    of_key[side] = dynamic_maps(l, l.of_key[side], x, tokens);
  }
  const auto composed = [&](Index side, Index s, Index t, const std::vector<Real>& from) {
    std::vector<Real> to(heads, 0.0L);
    for (Index m = 0; m < heads; ++m) {
      for (Index n = 0; n < heads; ++n) {
        const Index at = m * heads + n;
        const Real fixed = !l.base[side].empty() ? Real{l.base[side][at]} : m == n ? 1.0L : 0.0L;
        to[n] += from[m] * (fixed + of_query[side][s][at] + of_key[side][t][at]);
      }
    }
    return to;
  };

  Vector y(tokens * heads * d, 0.0);
  for (Index s = 0; s < tokens; ++s) {
    std::vector<Index> seen;
    for (Index t = 0; t < tokens; ++t) {
      if (visible(positions[s], positions[t], l.window)) seen.push_back(t);
    }
    std::vector<std::vector<Real>> weights;  // of each seen key, [heads]
    for (const Index t : seen) {
      std::vector<Real> logits(heads, 0.0L);
      for (Index j = 0; j < heads; ++j) {
        for (Index c = 0; c < d; ++c) {
          logits[j] += Real{q[(s * heads + j) * d + c]} * k[(t * groups + j / per_group) * d + c];
        }
        logits[j] /= std::sqrt(static_cast<Real>(d));
      }
      weights.push_back(composed(0, s, t, logits));
    }
    for (Index j = 0; j < heads; ++j) {
      Real largest = -std::numeric_limits<Real>::infinity(), total = 0.0L;
      for (const auto& of_key_logits : weights) largest = std::max(largest, of_key_logits[j]);
      for (auto& of_key_logits : weights) total += std::exp(of_key_logits[j] - largest);
      for (auto& of_key_logits : weights) {
        of_key_logits[j] = std::exp(of_key_logits[j] - largest) / total;
      }
    }
    for (Index i = 0; i < seen.size(); ++i) weights[i] = composed(1, s, seen[i], weights[i]);
    for (Index j = 0; j < heads; ++j) {
      for (Index c = 0; c < d; ++c) {
        Real sum = 0.0L;
        for (Index i = 0; i < seen.size(); ++i) {
          sum += weights[i][j] * v[(seen[i] * groups + j / per_group) * d + c];
        }
        y[(s * heads + j) * d + c] = static_cast<double>(sum);
      }
    }
  }
  return linear(y, tokens, heads * d, l.wo, l.bo, l.hidden);
}

}  // namespace naive
