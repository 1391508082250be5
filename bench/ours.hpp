// SPDX-License-Identifier: Apache-2.0
// Our own work as tasks.
#pragma once

#include <memory>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/vha.hpp>

#include "harness.hpp"
#include "operands.hpp"
#include "threads.hpp"

namespace bench {

/// Runs `task`'s state, which it keeps alive.
template <class State>
Task task_of(std::shared_ptr<State> state, std::function<void(float*)> copy_result) {
  return {[state] { state->run(); }, std::move(copy_result)};
}

template <class S>
Task our_product(const ProductOperands<S>& operands) {
  using Out = vha::Compute<S>;
  struct State {
    ProductOperands<S> operands;
    Threads threads;
    vha::ProductWorkspace<S> workspace;
    std::vector<Out> c;

    explicit State(const ProductOperands<S>& o)
        : operands(o), threads(o.threads), c(static_cast<std::size_t>(o.rows * o.cols)) {
      workspace.executor = threads.executor();
    }
    void run() {
      const auto& o = operands;
      vha::multiply<S>(vha::row_major_view(o.a, o.rows, o.depth, o.depth),
                       vha::row_major_view(o.b, o.depth, o.cols, o.cols), c.data(), o.cols, false,
                       workspace);
    }
  };
  const auto state = std::make_shared<State>(operands);
  return task_of(state, copy_from(state->c.data(), operands.rows * operands.cols));
}

template <class S>
Task our_core(const CoreOperands<S>& operands) {
  using Positions = std::vector<vha::Position>;
  struct State {
    CoreOperands<S> operands;
    Threads threads;
    vha::CausalAttentionWorkspace<S> workspace;
    Positions positions;

    explicit State(const CoreOperands<S>& o)
        : operands(o), threads(o.threads), positions(static_cast<std::size_t>(o.keys)) {
      workspace.executor = threads.executor();
      std::iota(positions.begin(), positions.end(), vha::Position(0));
    }
    void run() {
      const auto& o = operands;
      const vha::CausalAttentionOptions options{.scale = vha::softmax_scale(o.head_dim)};
      const std::span<const vha::Position> keys(positions);
      for (Index row = 0; row < o.batch; ++row) {
        const auto heads = [&](auto* data) {
          return vha::token_major_heads(data + row * o.tokens * o.query_width(), o.tokens,
                                        o.kv_heads, o.group_size, o.head_dim);
        };
        const auto cached = [&](const S* data) {
          return vha::group_major_heads(data + row * o.kv_heads * o.capacity * o.head_dim,
                                        o.capacity, o.kv_heads, 1, o.head_dim)
              .slice(0, o.keys);
        };
        vha::causal_attention(heads(o.query), cached(o.key), cached(o.value),
                              keys.last(static_cast<std::size_t>(o.tokens)), keys, options,
                              heads(o.out), workspace);
      }
    }
  };
  return task_of(std::make_shared<State>(operands), copy_from(operands.out, operands.out_size()));
}

/// A forward of `layer` as in `operands`; the weights are the layer's.
template <class Layer, class S>
Task our_layer(const Layer& layer, const LayerOperands<S>& operands) {
  struct State {
    Layer layer;
    Threads threads;
    typename Layer::Workspace workspace;
    vha::KvCache<S> cache;
    Index cached;
    vha::RowMajorMatrix<S> x, out;

    State(const Layer& l, const LayerOperands<S>& o)
        : layer(l),
          threads(o.threads),
          cache(l.config(), 1, o.cached + o.tokens),
          cached(o.cached),
          x(Eigen::Map<const vha::RowMajorMatrix<S>>(o.x, o.tokens, l.config().hidden)),
          out(o.tokens, l.config().hidden) {
      workspace.executor = threads.executor();
      if (cached == 0) return;
      std::vector<vha::Position> positions(static_cast<std::size_t>(cached));
      std::iota(positions.begin(), positions.end(), vha::Position(0));
      const auto heads = [&](const S* data) {
        return vha::group_major_heads(data, cached, l.config().kv_heads, 1, l.config().head_dim);
      };
      cache.append(0, vha::HeadsView<const S>(heads(o.key)),
                   vha::HeadsView<const S>(heads(o.value)), positions);
    }
    void run() {
      cache.truncate(0, cached);
      layer.forward_into(x, cache, out, workspace);
    }
  };
  const auto state = std::make_shared<State>(layer, operands);
  return task_of(state, copy_from(state->out.data(), state->out.size()));
}

}  // namespace bench
