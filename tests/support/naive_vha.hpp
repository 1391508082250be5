// SPDX-License-Identifier: Apache-2.0
#pragma once

// The naive twin: Virtual Head Attention in plain loops over std::vector<double>, as an oracle for
// the library. It includes nothing but the standard library and shares no code with vha. Sums and
// angles are taken in long double and rounded once per step; speed and memory do not matter.
//
// Every array is row-major. Symbols: h hidden, d head width, d_q width of a
// physical head, H' physical heads, G K/V heads, Hv = H'·G query heads, r Postmix rank.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace naive {

using Real = long double;
using Vector = std::vector<double>;
using Positions = std::vector<long long>;
using Index = std::size_t;

// One layer. An empty vector means "this layer has none". Weights are [in, out].
//
// physical_heads is always H', so that Hv = H'·G holds with and without Premix. A plain GQA layer
// with Hq query heads therefore has physical_heads = Hq / G, and its wq is [h, Hv·d].
struct Layer {
  Index hidden = 0;
  Index head_dim = 0;           // d
  Index physical_heads = 0;     // H'
  Index physical_head_dim = 0;  // d_q; 0: as head_dim. Read only where there is a Premix.
  Index kv_heads = 0;           // G
  double theta = 10000.0;
  Index rotary_dim = 0;  // 0: all of head_dim
  double eps = 1e-6;
  long long window = 0;      // 0: none
  double value_scale = 1.0;  // V = value_scale · (X·W_V + b_v)
  bool premix_silu = false;  // SiLU after Premix, before the norm

  Vector wq;              // [h, H'·d_q] with Premix, [h, Hv·d] without
  Vector wk, wv;          // [h, G·d]
  Vector wo;              // [Hv·d, h]
  Vector bq, bk, bv, bo;  // biases: as wide as their projection
  Vector q_norm, k_norm;  // [d]
  Vector premix;          // [G, d_q, d]
  Vector postmix_a;       // [Hv, r]
  Vector postmix_b;       // [Hv, r]
  Vector postmix_dense;   // M itself, [Hv, Hv]; instead of the pair above
  Vector wgate;           // [h, Hv·d]

  Index query_heads() const { return physical_heads * kv_heads; }
  bool has_postmix() const { return !postmix_a.empty() || !postmix_dense.empty(); }

  // Heads and head width of what W_Q gives.
  Index projected_heads() const { return premix.empty() ? query_heads() : physical_heads; }
  Index projected_width() const {
    return premix.empty() || physical_head_dim == 0 ? head_dim : physical_head_dim;
  }
};

// Every intermediate of one sequence, [tokens, heads, width] flattened; out is [tokens, h].
struct Trace {
  Vector q_physical;   // H' heads of width d_q (without Premix: equal to q_virtual)
  Vector q_virtual;    // Hv heads, before norm and RoPE
  Vector q_rotated;    // Hv heads, after norm and RoPE
  Vector k_rotated;    // G heads, after norm and RoPE
  Vector v;            // G heads, value_scale included
  Vector heads;        // Hv heads, what the softmax core gives
  Vector heads_mixed;  // Hv heads, after Postmix, before the gate
  Vector out;
};

inline void require_size(const Vector& array, Index expected, const char* name) {
  if (array.size() == expected) return;
  throw std::invalid_argument("naive: " + std::string(name) + " has " +
                              std::to_string(array.size()) + " elements, not " +
                              std::to_string(expected));
}

inline void require_size_or_empty(const Vector& array, Index expected, const char* name) {
  if (!array.empty()) require_size(array, expected, name);
}

// Catches a test that fills a Layer wrongly.
inline void check(const Layer& l) {
  const Index d = l.head_dim, heads = l.query_heads();
  const Index q_width = l.projected_heads() * l.projected_width();
  require_size(l.wq, l.hidden * q_width, "wq");
  require_size(l.wk, l.hidden * l.kv_heads * d, "wk");
  require_size(l.wv, l.hidden * l.kv_heads * d, "wv");
  require_size(l.wo, heads * d * l.hidden, "wo");
  require_size_or_empty(l.bq, q_width, "bq");
  require_size_or_empty(l.bk, l.kv_heads * d, "bk");
  require_size_or_empty(l.bv, l.kv_heads * d, "bv");
  require_size_or_empty(l.bo, l.hidden, "bo");
  require_size_or_empty(l.q_norm, d, "q_norm");
  require_size_or_empty(l.k_norm, d, "k_norm");
  require_size_or_empty(l.premix, l.kv_heads * l.projected_width() * d, "premix");
  require_size_or_empty(l.postmix_dense, heads * heads, "postmix_dense");
  require_size_or_empty(l.wgate, l.hidden * heads * d, "wgate");
  require_size(l.postmix_b, l.postmix_a.size(), "postmix_b");
  if (!l.postmix_a.empty() && (!l.postmix_dense.empty() || l.postmix_a.size() % heads != 0)) {
    throw std::invalid_argument("naive: postmix_a is not [Hv, r], or stands beside postmix_dense");
  }
  if (l.rotary_dim > d || (l.rotary_dim == 0 ? d : l.rotary_dim) % 2 != 0) {
    throw std::invalid_argument("naive: the rotary width must be even and at most head_dim");
  }
  if (l.premix_silu && l.premix.empty()) {
    throw std::invalid_argument("naive: premix_silu without a premix");
  }
}

inline Real sigmoid(Real x) {
  return 1.0L / (1.0L + std::exp(-x));
}

// Y[s, o] = b[o] + Σ_i X[s, i]·W[i, o], for X [rows, in] and W [in, out].
inline Vector linear(const Vector& x, Index rows, Index in, const Vector& w, const Vector& bias,
                     Index out) {
  require_size(x, rows * in, "input of a projection");
  Vector y(rows * out);
  for (Index s = 0; s < rows; ++s) {
    for (Index o = 0; o < out; ++o) {
      Real sum = bias.empty() ? 0.0L : Real{bias[o]};
      for (Index i = 0; i < in; ++i) sum += Real{x[s * in + i]} * w[i * out + o];
      y[s * out + o] = static_cast<double>(sum);
    }
  }
  return y;
}

// Virtual head g·H'+i is Q_i·P_g: group-major order. From [rows, H', d_q] to [rows, G·H', d].
// The rows may equally be tokens, the h rows of W_Q, or the one row of its bias.
inline Vector apply_premix(const Layer& l, const Vector& q, Index rows) {
  const Index from = l.projected_width(), d = l.head_dim, heads = l.query_heads();
  require_size(q, rows * l.physical_heads * from, "input of Premix");
  Vector result(rows * heads * d);
  for (Index s = 0; s < rows; ++s) {
    for (Index g = 0; g < l.kv_heads; ++g) {
      for (Index i = 0; i < l.physical_heads; ++i) {
        for (Index o = 0; o < d; ++o) {
          Real sum = 0.0L;
          for (Index c = 0; c < from; ++c) {
            sum +=
                Real{q[(s * l.physical_heads + i) * from + c]} * l.premix[(g * from + c) * d + o];
          }
          const Index head = g * l.physical_heads + i;
          result[(s * heads + head) * d + o] = static_cast<double>(sum);
        }
      }
    }
  }
  return result;
}

// x·sigmoid(x), elementwise.
inline Vector silu(Vector x) {
  for (double& value : x) value = static_cast<double>(Real{value} * sigmoid(value));
  return x;
}

// Per head: x_c · w_c / √(mean(x²) + eps). An empty weight: no norm.
inline Vector rms_norm(Vector x, const Vector& weight, double eps) {
  const Index d = weight.size();
  for (Index start = 0; d != 0 && start < x.size(); start += d) {
    Real squares = 0.0L;
    for (Index c = 0; c < d; ++c) squares += Real{x[start + c]} * x[start + c];
    const Real root = std::sqrt(squares / static_cast<Real>(d) + Real{eps});
    for (Index c = 0; c < d; ++c) {
      x[start + c] = static_cast<double>(Real{x[start + c]} / root * Real{weight[c]});
    }
  }
  return x;
}

// RoPE, half-rotation form, on the first R = rotary channels (0: all) of x [tokens, heads, width]:
// channels c and c + R/2 turn by the angle pos · theta^(-2c/R). The rest stays as it is.
// An angle rounded to double at position 100005 moves results by about 1e-12 of the largest value,
// so double implementations (and the case late-positions) differ from this one by that much.
inline Vector rope(Vector x, Index heads, Index width, const Positions& positions, double theta,
                   Index rotary) {
  require_size(x, positions.size() * heads * width, "input of RoPE");
  const Index turned = rotary == 0 ? width : rotary, half = turned / 2;
  for (Index row = 0; row < positions.size() * heads; ++row) {
    for (Index c = 0; c < half; ++c) {
      const Real exponent = -2.0L * static_cast<Real>(c) / static_cast<Real>(turned);
      const Real angle =
          static_cast<Real>(positions[row / heads]) * std::pow(Real{theta}, exponent);
      double& low = x[row * width + c];
      double& high = x[row * width + c + half];
      const Real a = low, b = high;
      low = static_cast<double>(a * std::cos(angle) - b * std::sin(angle));
      high = static_cast<double>(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return x;
}

// Key t is visible to query s iff 0 ≤ pos_s − pos_t, and < window where there is one.
inline bool visible(long long query_position, long long key_position, long long window) {
  const long long distance = query_position - key_position;
  return distance >= 0 && (window == 0 || distance < window);
}

struct AttentionShape {
  Index heads = 0;        // Hq
  Index kv_heads = 0;     // G
  Index width = 0;        // d, of queries and keys
  Index value_width = 0;  // 0: as width
};

// softmax(scale · q·kᵀ) over visible keys, times V; query head j reads K/V head ⌊j/(Hq/G)⌋.
// q [S, Hq, d], k [T, G, d], v [T, G, dv], result [S, Hq, dv]. Keys and values that are not visible
// are never read; a row that sees no key is zero.
inline Vector attention(const Vector& q, const Vector& k, const Vector& v,
                        const AttentionShape& shape, const Positions& q_positions,
                        const Positions& k_positions, long long window, Real scale) {
  const Index d = shape.width, dv = shape.value_width == 0 ? d : shape.value_width;
  const Index queries = q_positions.size(), keys = k_positions.size(), groups = shape.kv_heads;
  if (groups == 0 || shape.heads % groups != 0) {
    throw std::invalid_argument("naive: query heads are not a multiple of K/V heads");
  }
  require_size(q, queries * shape.heads * d, "q");
  require_size(k, keys * groups * d, "k");
  require_size(v, keys * groups * dv, "v");

  Vector result(queries * shape.heads * dv, 0.0);
  for (Index s = 0; s < queries; ++s) {
    for (Index j = 0; j < shape.heads; ++j) {
      const Index group = j / (shape.heads / groups);
      std::vector<Real> logits(keys);
      Real largest = -std::numeric_limits<Real>::infinity();
      for (Index t = 0; t < keys; ++t) {
        if (!visible(q_positions[s], k_positions[t], window)) continue;
        Real dot = 0.0L;
        for (Index c = 0; c < d; ++c) {
          dot += Real{q[(s * shape.heads + j) * d + c]} * k[(t * groups + group) * d + c];
        }
        logits[t] = scale * dot;
        largest = std::max(largest, logits[t]);
      }
      Real total = 0.0L;
      std::vector<Real> sums(dv, 0.0L);
      for (Index t = 0; t < keys; ++t) {
        if (!visible(q_positions[s], k_positions[t], window)) continue;
        const Real weight = std::exp(logits[t] - largest);
        total += weight;
        for (Index c = 0; c < dv; ++c) sums[c] += weight * v[(t * groups + group) * dv + c];
      }
      if (total == 0.0L) continue;  // no visible key
      for (Index c = 0; c < dv; ++c) {
        result[(s * shape.heads + j) * dv + c] = static_cast<double>(sums[c] / total);
      }
    }
  }
  return result;
}

// M = I + B·Aᵀ, that is M[i, j] = δ_ij + Σ_k B[i, k]·A[j, k]; or the dense M as given.
inline std::vector<Real> postmix_matrix(const Layer& l) {
  const Index heads = l.query_heads();
  if (!l.postmix_dense.empty()) return {l.postmix_dense.begin(), l.postmix_dense.end()};
  const Index rank = l.postmix_a.size() / heads;
  std::vector<Real> m(heads * heads);
  for (Index i = 0; i < heads; ++i) {
    for (Index j = 0; j < heads; ++j) {
      Real sum = i == j ? 1.0L : 0.0L;
      for (Index c = 0; c < rank; ++c) {
        sum += Real{l.postmix_b[i * rank + c]} * l.postmix_a[j * rank + c];
      }
      m[i * heads + j] = sum;
    }
  }
  return m;
}

// Y'_i = Σ_j M[i, j]·Y_j for Y [tokens, Hv, d].
inline Vector apply_postmix(const Layer& l, const Vector& y, Index tokens) {
  const Index heads = l.query_heads(), d = l.head_dim;
  const std::vector<Real> m = postmix_matrix(l);
  require_size(y, tokens * heads * d, "input of Postmix");
  Vector result(y.size());
  for (Index s = 0; s < tokens; ++s) {
    for (Index i = 0; i < heads; ++i) {
      for (Index c = 0; c < d; ++c) {
        Real sum = 0.0L;
        for (Index j = 0; j < heads; ++j) sum += m[i * heads + j] * y[(s * heads + j) * d + c];
        result[(s * heads + i) * d + c] = static_cast<double>(sum);
      }
    }
  }
  return result;
}

// Y' ⊙ sigmoid(X·W_gate).
inline Vector apply_gate(const Layer& l, const Vector& x, Vector y, Index tokens) {
  const Vector gate = linear(x, tokens, l.hidden, l.wgate, {}, l.query_heads() * l.head_dim);
  for (Index i = 0; i < y.size(); ++i) y[i] = static_cast<double>(Real{y[i]} * sigmoid(gate[i]));
  return y;
}

inline Vector scaled(Vector x, double factor) {
  for (double& value : x) value *= factor;
  return x;
}

// The whole layer over ONE sequence: x [tokens, h], one position per token.
inline Trace forward(const Layer& l, const Vector& x, const Positions& positions) {
  check(l);
  const Index tokens = positions.size(), h = l.hidden, d = l.head_dim;
  const Index heads = l.query_heads(), groups = l.kv_heads;
  require_size(x, tokens * h, "x");
  Trace t;

  t.q_physical = linear(x, tokens, h, l.wq, l.bq, l.projected_heads() * l.projected_width());
  t.q_virtual = l.premix.empty() ? t.q_physical : apply_premix(l, t.q_physical, tokens);
  if (l.premix_silu) t.q_virtual = silu(t.q_virtual);
  const Vector k = linear(x, tokens, h, l.wk, l.bk, groups * d);
  t.v = scaled(linear(x, tokens, h, l.wv, l.bv, groups * d), l.value_scale);

  t.q_rotated =
      rope(rms_norm(t.q_virtual, l.q_norm, l.eps), heads, d, positions, l.theta, l.rotary_dim);
  t.k_rotated = rope(rms_norm(k, l.k_norm, l.eps), groups, d, positions, l.theta, l.rotary_dim);

  const Real scale = 1.0L / std::sqrt(static_cast<Real>(d));
  t.heads = attention(t.q_rotated, t.k_rotated, t.v, {heads, groups, d, d}, positions, positions,
                      l.window, scale);
  t.heads_mixed = l.has_postmix() ? apply_postmix(l, t.heads, tokens) : t.heads;
  const Vector gated = l.wgate.empty() ? t.heads_mixed : apply_gate(l, x, t.heads_mixed, tokens);
  t.out = linear(gated, tokens, heads * d, l.wo, l.bo, h);
  return t;
}

// Block j of W_O' is Σ_i M[i, j] · (block i of W_O), each block [d, h].
inline Vector folded_wo(const Layer& l) {
  const Index heads = l.query_heads(), block = l.head_dim * l.hidden;
  const std::vector<Real> m = postmix_matrix(l);
  Vector result(l.wo.size());
  for (Index j = 0; j < heads; ++j) {
    for (Index e = 0; e < block; ++e) {
      Real sum = 0.0L;
      for (Index i = 0; i < heads; ++i) sum += m[i * heads + j] * l.wo[i * block + e];
      result[j * block + e] = static_cast<double>(sum);
    }
  }
  return result;
}

// Folds what can be folded and leaves the rest, so that forward(fold(l)) is always forward(l).
//   W_Q', head g·H'+i:  W_Q^(i)·P_g, and the bias as a row of W_Q. Blocked by SiLU after Premix.
//   W_O', block j:      Σ_i M[i, j]·W_O^(i).                       Blocked by the gate.
//   W_V', b_v':         times value_scale.
// K, norms, RoPE and the other biases do not change.
inline Layer fold(const Layer& l) {
  check(l);
  Layer folded = l;
  if (!l.premix.empty() && !l.premix_silu) {
    folded.wq = apply_premix(l, l.wq, l.hidden);
    if (!l.bq.empty()) folded.bq = apply_premix(l, l.bq, 1);
    folded.premix.clear();
    folded.physical_head_dim = 0;
  }
  if (l.has_postmix() && l.wgate.empty()) {
    folded.wo = folded_wo(l);
    folded.postmix_a.clear();
    folded.postmix_b.clear();
    folded.postmix_dense.clear();
  }
  folded.wv = scaled(l.wv, l.value_scale);
  folded.bv = scaled(l.bv, l.value_scale);
  folded.value_scale = 1.0;
  return folded;
}

}  // namespace naive
