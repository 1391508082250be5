// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <vector>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/causal_attention.hpp>
#include <vha/attention/kv_cache.hpp>
#include <vha/core/config.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/matrix_product.hpp>

namespace vha {

namespace detail {

/// What a forward whose products are in `P` needs.
template <Operand P>
struct OperandWorkspace {
  ProductWorkspace<P> product;
  CausalAttentionWorkspace<P> core;

  /// An empty cache for a forward that was given none.
  KvCache<P>& own_cache(const KvCacheShape& shape) {
    if (!kv_cache_ || !kv_cache_->shape().serves(shape)) kv_cache_.emplace(shape);
    kv_cache_->reset();
    return *kv_cache_;
  }

 private:
  std::optional<KvCache<P>> kv_cache_;
};

}  // namespace detail

/// The threads and the memory of a forward. Kept by the caller from call to call, it makes every call
/// but the first of its size free of allocations. For one call at a time.
///
///     vha::AttentionWorkspace<float> workspace;
///     workspace.executor = device;  // an Eigen::ThreadPoolDevice; the calling thread alone if unset
template <ComputeScalar T>
struct AttentionWorkspace {
  Executor executor;

  Buffer<T> x, y, physical, query, key, value, softmax, heads, head_sums, gate;
  std::vector<Buffer<T>> thread_scratch;
  std::vector<detail::BatchToken> tokens;
  std::vector<Position> positions;

  template <Operand P>
  auto& of() {
    if constexpr (std::same_as<P, T>) {
      return in_own_;
    } else {
      return in_bfloat16_;
    }
  }

  /// Hands the executor on and makes room for its threads.
  void prepare() {
    in_own_.product.executor = in_own_.core.executor = executor;
    in_bfloat16_.product.executor = in_bfloat16_.core.executor = executor;
    const auto threads = static_cast<std::size_t>(executor.threads());
    if (thread_scratch.size() < threads) thread_scratch.resize(threads);
  }

  /// Calls `body(first, count, scratch)` for slices of `token_count` tokens, on all threads.
  template <class Body>
  void for_each_slice(Index token_count, Body&& body) {
    static constexpr Index slice = 16;
    executor.for_each(pieces(token_count, slice), [&](Index task, Index thread) {
      const Index first = task * slice;
      body(first, std::min(slice, token_count - first),
           thread_scratch[static_cast<std::size_t>(thread)]);
    });
    // Which thread took part is chance; that another does next time must not make it allocate.
    Index largest = 0;
    for (const auto& scratch : thread_scratch) largest = std::max(largest, scratch.size());
    for (auto& scratch : thread_scratch) scratch.reserve(largest);
  }

 private:
  detail::OperandWorkspace<T> in_own_;
  detail::OperandWorkspace<bfloat16> in_bfloat16_;
};

}  // namespace vha
