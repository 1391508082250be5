// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vha/attention/weights.hpp>
#include <vha/core/config.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/weight.hpp>

namespace vha {

/// The net that makes a token's share of a composition of heads: see DynamicHeadsAttention.
///
/// | weight  | shape |
/// |---------|-------|
/// | hidden  | `[hidden, dynamic_dim]` |
/// | factors | `[dynamic_dim, 2 * rank * query_heads]`, the first factors before the second |
/// | gate    | `[hidden, query_heads]` |
template <StorageScalar S>
struct DynamicMapWeights {
  Weight<S> hidden;
  Weight<S> factors;
  Weight<S> gate;

  Index dynamic_dim() const { return hidden.cols(); }

  /// Throws Error naming the first of `name`'s weights that does not fit.
  void require_shape(std::string_view name, const AttentionConfig& config, Index rank) const {
    require_positive(text(name, ".hidden.cols() (dynamic_dim)"), dynamic_dim());
    vha::require_shape(text(name, ".hidden"), hidden, config.hidden, dynamic_dim());
    vha::require_shape(text(name, ".factors"), factors, dynamic_dim(),
                       2 * rank * config.query_heads);
    vha::require_shape(text(name, ".gate"), gate, config.hidden, config.query_heads);
  }

  template <StorageScalar T>
  DynamicMapWeights<T> cast() const {
    return {hidden.template cast<T>(), factors.template cast<T>(), gate.template cast<T>()};
  }
};

/// The weights of one composition of heads, before or after the softmax.
template <StorageScalar S>
struct HeadCompositionWeights {
  DynamicMapWeights<S> query;  ///< for the token that attends
  DynamicMapWeights<S> key;    ///< for the token that is attended to
  Weight<S> base = {};         ///< `[query_heads, query_heads]`, from and to; absent: the identity

  /// Throws Error naming the first of `name`'s weights that does not fit.
  void require_shape(std::string_view name, const AttentionConfig& config, Index rank) const {
    query.require_shape(text(name, ".query"), config, rank);
    key.require_shape(text(name, ".key"), config, rank);
    if (base.empty()) return;
    vha::require_shape(text(name, ".base"), base, config.query_heads, config.query_heads);
  }

  template <StorageScalar T>
  HeadCompositionWeights<T> cast() const {
    return {query.template cast<T>(), key.template cast<T>(), base.template cast<T>()};
  }
};

/// The trained weights of a DynamicHeadsAttention: those of a GQA layer and two compositions.
template <StorageScalar S>
struct DynamicHeadsWeights : AttentionWeights<S> {
  HeadCompositionWeights<S> before_softmax;
  HeadCompositionWeights<S> after_softmax;

  /// The rank of a token's map. Precondition: the weights are those of a layer.
  Index rank(const AttentionConfig& config) const {
    return before_softmax.query.factors.cols() / (2 * config.query_heads);
  }

  /// Throws Error naming the first weight that does not fit `config`, and both shapes.
  void validate(const AttentionConfig& config) const {
    AttentionWeights<S>::validate(config);
    const Index width = checked_product("2 * query_heads", {2, config.query_heads});
    const Index cols = before_softmax.query.factors.cols();
    if (cols <= 0 || cols % width != 0) {
      raise("before_softmax.query.factors.cols()",
            text("a positive multiple of 2 * query_heads = ", width), text(cols));
    }
    checked_product("query_heads * rank", {8, cols, sizeof(double)});
    before_softmax.require_shape("before_softmax", config, rank(config));
    after_softmax.require_shape("after_softmax", config, rank(config));
  }

  /// The weights stored as `T`, each element rounded once.
  template <StorageScalar T>
  DynamicHeadsWeights<T> cast() const {
    return {AttentionWeights<S>::template cast<T>(), before_softmax.template cast<T>(),
            after_softmax.template cast<T>()};
  }
};

}  // namespace vha
