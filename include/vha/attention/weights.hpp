// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <utility>
#include <vha/attention/gate.hpp>
#include <vha/attention/postmix.hpp>
#include <vha/attention/premix.hpp>
#include <vha/core/config.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/linear.hpp>

namespace vha {

/// The parts that a plain GQA layer lacks, as types, so that a layer's type says what it computes
/// and which folds it has.
struct NoPremix {
  using ActivationType = Identity;

  template <StorageScalar T>
  NoPremix cast() const {
    return {};
  }
};
struct NoPostmix {
  using ActivationType = Identity;

  template <StorageScalar T>
  NoPostmix cast() const {
    return {};
  }
};
struct NoGate {
  template <StorageScalar T>
  NoGate cast() const {
    return {};
  }
};

/// The trained weights of an attention layer.
///
/// | weight         | shape |
/// |----------------|-------|
/// | query          | `[hidden, physical_heads * physical_head_dim]` with Premix |
/// |                | `[hidden, query_heads * head_dim]` without |
/// | key, value     | `[hidden, kv_heads * head_dim]` |
/// | output         | `[query_heads * head_dim, hidden]` |
/// | q_norm, k_norm | `[1, head_dim]`, or both absent |
/// | premix         | kv_heads times `[physical_head_dim, head_dim]` |
/// | postmix        | a and b, each `[query_heads, rank]` |
/// | gate           | `[hidden, query_heads * head_dim]` |
template <StorageScalar S, class PremixPart = NoPremix, class PostmixPart = NoPostmix,
          class GatePart = NoGate>
struct AttentionWeights {
  static constexpr bool has_premix = !std::same_as<PremixPart, NoPremix>;
  static constexpr bool has_postmix = !std::same_as<PostmixPart, NoPostmix>;
  static constexpr bool has_gate = !std::same_as<GatePart, NoGate>;

  Linear<S> query;
  Linear<S> key;
  Linear<S> value;
  Linear<S> output;
  Weight<S> q_norm = {};
  Weight<S> k_norm = {};
  [[no_unique_address]] PremixPart premix = {};
  [[no_unique_address]] PostmixPart postmix = {};
  [[no_unique_address]] GatePart gate = {};

  bool has_qk_norm() const { return !q_norm.empty(); }

  /// Throws Error naming the first weight that does not fit `config`, and both shapes.
  void validate(const AttentionConfig& config) const {
    Index query_channels = config.query_width();
    if constexpr (has_premix) {
      premix.validate(config);
      query_channels =
          checked_product("premix", {premix.physical_heads(config), premix.physical_head_dim()});
    }
    query.require_shape("query", config.hidden, query_channels);
    key.require_shape("key", config.hidden, config.kv_width());
    value.require_shape("value", config.hidden, config.kv_width());
    output.require_shape("output", config.query_width(), config.hidden);
    if (q_norm.empty() != k_norm.empty()) {
      raise("q_norm and k_norm", "both or neither",
            q_norm.empty() ? "k_norm alone" : "q_norm alone");
    }
    if (has_qk_norm()) {
      require_vector("q_norm", q_norm, config.head_dim);
      require_vector("k_norm", k_norm, config.head_dim);
    }
    if constexpr (has_postmix) postmix.require_shape(config.query_heads);
    if constexpr (has_gate) gate.require_shape(config.hidden, config.query_width());
  }

  /// The weights stored as `T`, each element rounded once.
  template <StorageScalar T>
  auto cast() const {
    return with_parts<T>(query.template cast<T>(), output.template cast<T>(),
                         premix.template cast<T>(), postmix.template cast<T>());
  }

  /// These weights stored as `T`, with other projections and maps.
  template <StorageScalar T, class NewPremix, class NewPostmix>
  auto with_parts(Linear<T> new_query, Linear<T> new_output, NewPremix new_premix,
                  NewPostmix new_postmix) const {
    auto new_gate = gate.template cast<T>();
    return AttentionWeights<T, NewPremix, NewPostmix, decltype(new_gate)>{
        std::move(new_query),  key.template cast<T>(),    value.template cast<T>(),
        std::move(new_output), q_norm.template cast<T>(), k_norm.template cast<T>(),
        std::move(new_premix), std::move(new_postmix),    std::move(new_gate)};
  }
};

}  // namespace vha
