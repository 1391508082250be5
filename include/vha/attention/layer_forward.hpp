// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/forward_checks.hpp>
#include <vha/attention/kv_cache.hpp>
#include <vha/attention/token_layout.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/lanes.hpp>

namespace vha {

/// The forward of a layer with a cache, in all its forms: over matrices and tensors, padded batches,
/// given positions, with and without a cache of the caller's. The layer, which derives from this, works
/// on lists of tokens:
///
///     Index hidden() const;
///     KvCacheShape cache_shape(Index batch, Index capacity) const;
///     // writes the tokens' part of the cache behind the ends of its sequences
///     void cache_block<P>(x, tokens, positions, cache, workspace, trace) const;
///     // the tokens' outputs, [tokens, hidden], by the cache
///     const T* attend_block<P>(x, tokens, positions, cache, workspace, trace) const;
///
/// with `x` `[tokens, hidden]`. `LayerTrace` is what the layer keeps of its steps, where it is asked to.
template <class Layer, StorageScalar S, class LayerWorkspace, class LayerTrace>
class LayerForward {
 public:
  using Scalar = S;
  using T = Compute<S>;  ///< what the arithmetic is in
  using Workspace = LayerWorkspace;
  using Trace = LayerTrace;

  /// The layer's output for `x`, `[batch, tokens, hidden]` (tensors) or `[tokens, hidden]`
  /// (matrices), in a tensor or matrix of its own, row-major, of `x`'s scalar. This and the other
  /// forms throw Error where shapes do not fit, positions are out of range, or the cache has no room.
  template <Activations X>
  auto forward(const X& x, const TokenLayout& layout = {}, Executor executor = {}) const {
    return forward_to_new(x, static_cast<KvCache<T>*>(nullptr), layout, executor);
  }

  /// The same, attending to the tokens in `cache` as well, behind which the new ones are put. Prefill
  /// and decode alike, in chunks of any size. A call that throws leaves the cache as it was.
  template <Activations X, StorageScalar C>
  auto forward(const X& x, KvCache<C>& cache, const TokenLayout& layout = {},
               Executor executor = {}) const {
    return forward_to_new(x, &cache, layout, executor);
  }

  /// The forms that write to the caller's `out`, of `x`'s shape, and keep their memory in
  /// `workspace`. Precondition: `out` is `x` itself or does not overlap it.
  template <Activations X, Activations Out>
  void forward_into(const X& x, Out&& out, Workspace& workspace, const TokenLayout& layout = {},
                    Trace* trace = nullptr) const {
    run(activations_view(x), static_cast<KvCache<T>*>(nullptr), activations_view(out), workspace,
        layout, trace);
  }
  template <Activations X, StorageScalar C, Activations Out>
  void forward_into(const X& x, KvCache<C>& cache, Out&& out, Workspace& workspace,
                    const TokenLayout& layout = {}, Trace* trace = nullptr) const {
    run(activations_view(x), &cache, activations_view(out), workspace, layout, trace);
  }

 protected:
  LayerForward() = default;

 private:
  // Tokens of a batch that go through the projections together: enough that packing the weights is
  // cheap beside the products, few enough that the working memory stays small.
  static constexpr Index token_block = 512;

  const Layer& layer() const { return static_cast<const Layer&>(*this); }

  template <class X, class C>
  auto forward_to_new(const X& x, KvCache<C>* cache, const TokenLayout& layout,
                      Executor executor) const {
    Workspace workspace;
    workspace.executor = executor;
    const auto view = activations_view(x);
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(view.data)>>;
    using Result =
        std::conditional_t<detail::EigenMatrix<X>, RowMajorMatrix<Element>, Tensor3<Element>>;
    Result out;
    if constexpr (detail::EigenMatrix<X>) {
      out.resize(view.tokens, view.channels);
    } else {
      out.resize(view.batch, view.tokens, view.channels);
    }
    run(view, cache, activations_view(out), workspace, layout, nullptr);
    return out;
  }

  template <class X, class C, class Out>
  void run(const ActivationsView<X>& x, KvCache<C>* cache, const ActivationsView<Out>& out,
           Workspace& workspace, const TokenLayout& layout, Trace* trace) const {
    static_assert(!std::is_const_v<Out>, "vha: the output must be writable");
    static_assert(sizeof(X) <= sizeof(T) && sizeof(Out) <= sizeof(T),
                  "vha: the activations are wider than the layer computes in; use a layer of "
                  "double, or convert them to float first");
    using P = ProductsOf<T, X, S>;
    // Without a cache of the caller's, there is room for all tokens in one of the workspace's own.
    const auto shape =
        layer().cache_shape(std::max<Index>(x.batch, 1), std::max<Index>(x.tokens, 1));
    detail::check_forward(layer().hidden(), shape, x, cache, out, layout);
    if (trace != nullptr) trace->resize(layer(), x.batch, x.tokens);
    workspace.prepare();
    if (cache == nullptr) {
      run_with<P>(x, workspace.template of<P>().own_cache(shape), out, workspace, layout, trace);
    } else {
      run_with<P>(x, *cache, out, workspace, layout, trace);
    }
  }

  template <Operand P, class X, class C, class Out>
  void run_with(const ActivationsView<X>& x, KvCache<C>& cache, const ActivationsView<Out>& out,
                Workspace& workspace, const TokenLayout& layout, Trace* trace) const {
    const auto next_position = [&](Index row) { return cache.next_position(row); };
    detail::list_tokens(x.batch, x.tokens, next_position, layout, workspace.tokens,
                        workspace.positions);
    const auto each_block = [&](auto&& body) {
      const auto count = static_cast<Index>(workspace.tokens.size());
      for (Index first = 0; first < count; first += token_block) {
        const Index size = std::min(token_block, count - first);
        body(part(detail::BatchTokens(workspace.tokens), first, size),
             part(std::span<const Position>(workspace.positions), first, size));
      }
    };
    each_block([&](detail::BatchTokens tokens, std::span<const Position> positions) {
      layer().template cache_block<P>(detail::gather<T>(x, tokens, workspace.x), tokens, positions,
                                      cache, workspace, trace);
    });
    detail::zero_padding(out, layout);
    each_block([&](detail::BatchTokens tokens, std::span<const Position> positions) {
      const T* const y = layer().template attend_block<P>(
          detail::gather<T>(x, tokens, workspace.x), tokens, positions, cache, workspace, trace);
      detail::scatter(y, tokens, out);
    });
    for (Index row = 0; row < x.batch; ++row) cache.commit(row, layout.length(row, x.tokens));
  }
};

}  // namespace vha
