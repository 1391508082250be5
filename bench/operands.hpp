// SPDX-License-Identifier: Apache-2.0
// The operands of the work that ours and the peers' have in common. All matrices are row-major.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>
#include <vha/vha.hpp>

#include "machine.hpp"

namespace bench {

using vha::bfloat16;
using vha::Index;

template <class S>
inline constexpr Element element_of = Element::float32;
template <>
inline constexpr Element element_of<double> = Element::float64;
template <>
inline constexpr Element element_of<bfloat16> = Element::bf16;

/// C = A·B, `[rows, depth] · [depth, cols]`. B is a weight: it may be packed beforehand.
template <class S>
struct ProductOperands {
  Index rows, depth, cols;
  const S* a;
  const S* b;
  S* c;
  int threads;
};

/// Causal attention of the newest `tokens` of `keys` tokens in each sequence.
///
/// | operand | shape |
/// |---|---|
/// | query, out | `[batch, tokens, kv_heads * group_size, head_dim]` |
/// | key, value | `[batch, kv_heads, capacity, head_dim]`, of which the first `keys` count |
template <class S>
struct CoreOperands {
  Index batch, tokens, keys, capacity;
  Index kv_heads, group_size, head_dim;
  const S* query;
  const S* key;
  const S* value;
  S* out;
  int threads;

  Index query_width() const { return kv_heads * group_size * head_dim; }
  Index out_size() const { return batch * tokens * query_width(); }
  float scale() const { return static_cast<float>(vha::softmax_scale(head_dim)); }
};

/// A forward of `tokens` new tokens behind `cached` ones through a GQA layer, one sequence.
template <class S>
struct LayerOperands {
  vha::AttentionConfig config;
  Index tokens, cached;
  const S* x;          ///< `[tokens, hidden]`
  const S* qkv;        ///< `[hidden, query | key | value]`
  const S* output;     ///< `[query_width, hidden]`
  const float* norms;  ///< of queries, then of keys, `[2, head_dim]`
  const S* key;        ///< the cached ones, `[kv_heads, cached, head_dim]`
  const S* value;
  int threads;
};

/// Numbers spread evenly over [-scale, scale], fast to make.
template <class S>
std::vector<S> random_numbers(Index count, float scale, std::uint32_t seed) {
  std::vector<S> numbers(static_cast<std::size_t>(count));
  std::uint32_t state = seed * 2654435761U + 1;
  for (auto& number : numbers) {
    state = state * 1664525U + 1013904223U;
    const float unit = static_cast<float>(state >> 8) * 0x1p-23F - 1;
    number = vha::convert<S>(scale * unit);
  }
  return numbers;
}

/// Memory for results, zeroed and touched, a piece for each contender.
template <class S>
class Results {
 public:
  S* add(Index count) {
    pieces_.emplace_back(static_cast<std::size_t>(count));
    return pieces_.back().data();
  }

 private:
  std::list<std::vector<S>> pieces_;
};

/// A function that copies `count` elements, as floats.
template <class S>
std::function<void(float*)> copy_from(const S* data, Index count) {
  return [=](float* target) {
    for (Index k = 0; k < count; ++k) target[k] = vha::convert<float>(data[k]);
  };
}

/// A value that is made when it is first needed and shared by those that need it.
template <class T>
class Lazy {
 public:
  explicit Lazy(std::function<T()> make) : state_(std::make_shared<State>()) {
    state_->make = std::move(make);
  }
  T& operator*() const {
    if (!state_->value) state_->value.emplace(state_->make());
    return *state_->value;
  }

 private:
  struct State {
    std::function<T()> make;
    std::optional<T> value;
  };
  std::shared_ptr<State> state_;
};

}  // namespace bench
