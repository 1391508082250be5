// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string_view>
#include <vha/attention/kv_cache.hpp>
#include <vha/attention/token_layout.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/sizes.hpp>

namespace vha::detail {

template <class X>
void require_memory(std::string_view argument, const ActivationsView<X>& view) {
  const bool is_empty = view.batch == 0 || view.tokens == 0;
  if (view.data == nullptr && !is_empty) raise(argument, "values in memory", "a null pointer");
}

/// Throws Error unless a layer's forward of `x` to `out` over `cache`, if there is one, can run to its
/// end. `expected` is a cache of the layer's; its batch and capacity do not count.
template <class X, class C, class Out>
void check_forward(Index hidden, const KvCacheShape& expected, const ActivationsView<X>& x,
                   const KvCache<C>* cache, const ActivationsView<Out>& out,
                   const TokenLayout& layout) {
  if (x.channels != hidden) {
    raise("x", shape_text("batch", "tokens", hidden), shape_text(x.batch, x.tokens, x.channels));
  }
  if (out.batch != x.batch || out.tokens != x.tokens || out.channels != x.channels) {
    raise("out", shape_text(x.batch, x.tokens, x.channels),
          shape_text(out.batch, out.tokens, out.channels));
  }
  require_memory("x", x);
  require_memory("out", out);
  layout.validate(x.batch, x.tokens);
  if (cache == nullptr) return;
  const auto& shape = cache->shape();
  require_size("kv_cache.kv_heads", expected.kv_heads, shape.kv_heads);
  require_size("kv_cache.head_dim", expected.head_dim, shape.head_dim);
  require_size("kv_cache.value_dim", expected.value_dim, shape.value_dim);
  if (shape.values_in_keys != expected.values_in_keys) {
    raise("kv_cache.values_in_keys", expected.values_in_keys ? "true" : "false",
          shape.values_in_keys ? "true" : "false");
  }
  require_size("kv_cache.batch", x.batch, cache->batch());
  for (Index row = 0; row < x.batch; ++row) {
    cache->require_room(row, layout.length(row, x.tokens));
    if (layout.positions.empty()) {
      require_position(
          "positions (behind the cached ones)",
          std::max<Position>(0, cache->next_position(row) + layout.length(row, x.tokens) - 1));
    }
  }
}

}  // namespace vha::detail
