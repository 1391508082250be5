// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>
#include <vha/attention/attention.hpp>
#include <vha/attention/attention_gradients.hpp>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/causal_attention_backward.hpp>
#include <vha/attention/token_layout.hpp>
#include <vha/attention/trace.hpp>
#include <vha/core/activations.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>

namespace vha {

/// The threads and the memory of a layer's backward pass, to be kept from call to call.
template <ComputeScalar T>
struct AttentionBackwardWorkspace {
  Executor executor;

  ProductWorkspace<T> product;
  CausalAttentionBackwardWorkspace<T> core;
  Buffer<T> x, upstream, dx, mixed, gated, gate, heads, softmax, query, key, rotated_query,
      rotated_key, value, physical;
  Buffer<T> head_gradient, query_gradient, key_gradient, value_gradient, physical_gradient;
  Buffer<T> head_sums, head_sum_gradients, partial_sums;
  std::vector<Buffer<T>> thread_scratch;
  std::vector<detail::BatchToken> tokens;
  std::vector<Position> positions;

  void prepare() {
    product.executor = core.executor = executor;
    const auto threads = static_cast<std::size_t>(executor.threads());
    if (thread_scratch.size() < threads) thread_scratch.resize(threads);
  }

  /// Calls `body(first, count, sums, scratch)` for slices of the tokens, on all threads, and adds the
  /// slices' `sums`, `size` zeros at first, to `total` in the order of the slices. With a null `total`
  /// there are no sums.
  template <class Body>
  void for_each_slice(Index token_count, Index size, T* total, Body&& body) {
    static constexpr Index most_slices = 16;
    const Index slice = std::max<Index>(1, pieces(token_count, most_slices));
    const Index slices = pieces(token_count, slice);
    T* const sums = total == nullptr ? nullptr : partial_sums.reserve(slices * size);
    if (sums != nullptr) std::fill_n(sums, slices * size, T(0));
    executor.for_each(slices, [&](Index task, Index thread) {
      const Index first = task * slice;
      body(first, std::min(slice, token_count - first),
           sums == nullptr ? nullptr : sums + task * size,
           thread_scratch[static_cast<std::size_t>(thread)]);
    });
    for (Index task = 0; sums != nullptr && task < slices; ++task) {
      for (Index k = 0; k < size; ++k) total[k] += sums[task * size + k];
    }
  }
};

namespace detail {

/// The backward pass of one call.
template <class Layer>
class AttentionBackward {
 public:
  using T = typename Layer::T;
  using Weights = typename Layer::Weights;

  AttentionBackward(const Layer& layer, const AttentionTrace<T>& trace,
                    AttentionGradients<T>& gradients, AttentionBackwardWorkspace<T>& workspace)
      : config_(layer.config()),
        weights_(layer.weights()),
        rope_(config_.rope_theta, config_.rotated_channels()),
        trace_(trace),
        gradients_(gradients),
        workspace_(workspace) {}

  /// The gradient of the tokens' activations, `[tokens, hidden]`, for that of their outputs.
  T* run(const MatrixView<T>& x, const MatrixView<T>& upstream) {
    x_ = x;
    dx_ = workspace_.dx.reserve(x.rows * config_.hidden);
    std::fill_n(dx_, x.rows * config_.hidden, T(0));
    const T* const head_gradient = back_to_heads(upstream);
    const Index kv_width = config_.kv_width();
    T* const dkey = zeros(workspace_.key_gradient, kv_width);
    T* const dvalue = zeros(workspace_.value_gradient, kv_width);
    const HeadsView<T> query_gradient =
        query_heads(zeros(workspace_.query_gradient, query_width()));
    back_through_core(head_gradient, query_gradient, dkey, dvalue);
    if (config_.value_scale != 1) {
      const T scale = static_cast<T>(config_.value_scale);
      for (Index k = 0; k < x.rows * kv_width; ++k) dvalue[k] *= scale;
    }
    weights_.value.backward(x, rows_of(dvalue, kv_width), dx_, true, gradients_.value,
                            workspace_.product);
    back_to_key(dkey);
    back_to_query(query_gradient);
    return dx_;
  }

 private:
  Index query_width() const { return config_.query_width(); }
  BatchTokens tokens() const { return workspace_.tokens; }

  T* zeros(Buffer<T>& buffer, Index width) const {
    T* const data = buffer.reserve(x_.rows * width);
    std::fill_n(data, x_.rows * width, T(0));
    return data;
  }
  MatrixView<T> rows_of(const T* data, Index width) const {
    return row_major_view(data, x_.rows, width, width);
  }
  /// Query heads token by token.
  template <class Element>
  HeadsView<Element> by_token(Element* data, Index width) const {
    return token_major_heads(data, x_.rows, config_.kv_heads, config_.group_size(), width);
  }
  template <class Element>
  HeadsView<Element> kv_heads(Element* data) const {
    return token_major_heads(data, x_.rows, config_.kv_heads, 1, config_.head_dim);
  }
  /// Query heads in the order in which the layer projects them.
  HeadsView<T> query_heads(T* data) const {
    if constexpr (Weights::has_premix) {
      return weights_.premix.virtual_heads(data, x_.rows, config_);
    } else {
      return by_token(data, config_.head_dim);
    }
  }

  static T* data_or_null(RowMajorMatrix<T>& gradient) {
    return gradient.size() == 0 ? nullptr : gradient.data();
  }

  /// The gradient of the heads that the core gave, `[tokens, query_heads * head_dim]`.
  T* back_to_heads(const MatrixView<T>& upstream) {
    const Index width = query_width();
    const Index size = x_.rows * width;
    T* const gradient = workspace_.head_gradient.reserve(size);
    const T* const mixed = gather_heads(trace_.heads_mixed, tokens(), workspace_.mixed);
    if constexpr (Weights::has_gate) {
      T* const gated = workspace_.gated.reserve(size);
      T* const logits = workspace_.gate.reserve(size);
      std::copy_n(mixed, size, gated);
      weights_.gate(x_, gated, logits, workspace_.product);
      weights_.output.backward(rows_of(gated, width), upstream, gradient, false, gradients_.output,
                               workspace_.product);
      weights_.gate.backward(x_, mixed, gradient, logits, dx_, gradients_.gate, workspace_.product);
    } else {
      weights_.output.backward(rows_of(mixed, width), upstream, gradient, false, gradients_.output,
                               workspace_.product);
    }
    if constexpr (Weights::has_postmix) {
      const auto heads =
          by_token(gather_heads(trace_.heads, tokens(), workspace_.heads), config_.head_dim);
      weights_.postmix.mix_backward(HeadsView<const T>(heads), by_token(gradient, config_.head_dim),
                                    data_or_null(gradients_.postmix_a),
                                    data_or_null(gradients_.postmix_b), workspace_);
    }
    return gradient;
  }

  void back_through_core(const T* head_gradient, const HeadsView<T>& query_gradient, T* dkey,
                         T* dvalue) {
    const Index head_dim = config_.head_dim;
    const auto query =
        by_token(gather_heads(trace_.q_rotated, tokens(), workspace_.rotated_query), head_dim);
    const auto key = kv_heads(gather_heads(trace_.k_rotated, tokens(), workspace_.rotated_key));
    const auto value = kv_heads(gather_heads(trace_.v, tokens(), workspace_.value));
    const auto heads = by_token(gather_heads(trace_.heads, tokens(), workspace_.heads), head_dim);
    const auto softmax = by_token(gather_heads(trace_.softmax, tokens(), workspace_.softmax), 2);
    const auto upstream = by_token(head_gradient, head_dim);
    const std::span<const Position> positions = workspace_.positions;
    const CausalAttentionOptions options{config_.softmax_scale(), {config_.window}};
    for_each_row(tokens(), [&](Index, Index first, Index count) {
      const auto row_positions = part(positions, first, count);
      causal_attention_backward<T>(
          query.slice(first, count), key.slice(first, count), value.slice(first, count),
          heads.slice(first, count), softmax.slice(first, count), upstream.slice(first, count),
          row_positions, row_positions, options, query_gradient.slice(first, count),
          kv_heads(dkey).slice(first, count), kv_heads(dvalue).slice(first, count),
          workspace_.core);
    });
  }

  /// Takes the gradient of rotated heads to that of the projected ones, `before`.
  void back_through_norm_and_rope(const Weight<typename Layer::Scalar>& norm,
                                  const HeadsView<const T>& before, const HeadsView<T>& gradient,
                                  RowMajorMatrix<T>& norm_gradient) {
    workspace_.for_each_slice(
        x_.rows, config_.head_dim, data_or_null(norm_gradient),
        [&](Index first, Index count, T* partial, Buffer<T>& scratch) {
          const auto slice = gradient.slice(first, count);
          const std::span<const Position> positions = workspace_.positions;
          rope_.backward(slice, part(positions, first, count), scratch);
          if (norm.empty()) return;
          const RmsNorm<typename Layer::Scalar> rms_norm{norm, config_.rms_norm_eps};
          rms_norm.backward(before.slice(first, count), slice, partial, scratch);
        });
  }

  void back_to_key(T* dkey) {
    const Index width = config_.kv_width();
    T* const key = workspace_.key.reserve(x_.rows * width);
    // Cheaper to project again than to have kept.
    if (weights_.has_qk_norm()) weights_.key(x_, key, width, workspace_.product);
    back_through_norm_and_rope(weights_.k_norm, kv_heads(static_cast<const T*>(key)),
                               kv_heads(dkey), gradients_.k_norm);
    weights_.key.backward(x_, rows_of(dkey, width), dx_, true, gradients_.key, workspace_.product);
  }

  void back_to_query(const HeadsView<T>& gradient) {
    const auto before =
        by_token(gather_heads(trace_.q_virtual, tokens(), workspace_.query), config_.head_dim);
    back_through_norm_and_rope(weights_.q_norm, before, gradient, gradients_.q_norm);
    if constexpr (Weights::has_premix) {
      const Index width =
          weights_.premix.physical_heads(config_) * weights_.premix.physical_head_dim();
      T* const physical_gradient = workspace_.physical_gradient.reserve(x_.rows * width);
      weights_.premix.backward(gather_heads(trace_.q_physical, tokens(), workspace_.physical),
                               gradient, physical_gradient, gradients_.premix, workspace_.product);
      weights_.query.backward(x_, rows_of(physical_gradient, width), dx_, true, gradients_.query,
                              workspace_.product);
    } else {
      weights_.query.backward(x_, rows_of(gradient.data, query_width()), dx_, true,
                              gradients_.query, workspace_.product);
    }
  }

  const AttentionConfig& config_;
  const Weights& weights_;
  Rope<T> rope_;
  const AttentionTrace<T>& trace_;
  AttentionGradients<T>& gradients_;
  AttentionBackwardWorkspace<T>& workspace_;
  MatrixView<T> x_;
  T* dx_ = nullptr;
};

/// The public function of this name, which calls `complete` with the gradient of the tokens'
/// activations before it is written to `dx`: a layer that is a part of another adds up the parts'.
template <class Layer, Activations X, Activations Upstream, Activations Dx, class Complete>
void attention_backward(const Layer& layer, const X& x,
                        const AttentionTrace<typename Layer::T>& trace, const Upstream& upstream,
                        Dx&& dx, AttentionGradients<typename Layer::T>& gradients,
                        AttentionBackwardWorkspace<typename Layer::T>& workspace,
                        const TokenLayout& layout, Complete&& complete) {
  using T = typename Layer::T;
  const auto x_view = activations_view(x);
  const auto upstream_view = activations_view(upstream);
  const auto dx_view = activations_view(dx);
  static_assert(!std::is_const_v<std::remove_pointer_t<decltype(dx_view.data)>>,
                "vha: dx must be writable");
  const auto require_like_x = [&](std::string_view name, const auto& view) {
    if (view.batch != x_view.batch || view.tokens != x_view.tokens ||
        view.channels != x_view.channels) {
      raise(name, shape_text(x_view.batch, x_view.tokens, x_view.channels),
            shape_text(view.batch, view.tokens, view.channels));
    }
    require_memory(name, view);
  };
  check_forward(layer.hidden(), layer.cache_shape(1, 1), x_view, static_cast<KvCache<T>*>(nullptr),
                dx_view, layout);
  require_like_x("upstream", upstream_view);
  const auto& heads = trace.heads;
  if (heads.dimension(0) != x_view.batch || heads.dimension(1) != x_view.tokens ||
      heads.dimension(2) != layer.config().query_heads ||
      heads.dimension(3) != layer.config().head_dim) {
    raise("trace", "one that a forward of this layer and shape filled", "another");
  }
  gradients.require_fit(layer);
  workspace.prepare();
  list_tokens(
      x_view.batch, x_view.tokens, [](Index) { return Position(0); }, layout, workspace.tokens,
      workspace.positions);
  const BatchTokens tokens = workspace.tokens;
  const auto x_rows = gather<T>(x_view, tokens, workspace.x);
  const auto upstream_rows = gather<T>(upstream_view, tokens, workspace.upstream);
  zero_padding(dx_view, layout);
  T* const dx_rows =
      AttentionBackward<Layer>(layer, trace, gradients, workspace).run(x_rows, upstream_rows);
  complete(std::span<T>(dx_rows, static_cast<std::size_t>(x_rows.rows * x_rows.cols)));
  scatter<T>(dx_rows, tokens, dx_view);
}

}  // namespace detail

/// The backward pass of a layer's forward without a cache: adds the gradients of the weights that are
/// asked for, given `upstream`, that of the outputs, and writes that of `x` to `dx`, all three
/// `[batch, tokens, hidden]` (or `[tokens, hidden]`). Padding is not read; its gradient is zeros.
///
///     vha::AttentionTrace<float> trace;
///     layer.forward_into(x, out, forward_workspace, layout, &trace);
///     vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace, layout);
///
/// Products are taken in `Layer::T`, also where weights are stored narrower. The result is the same to
/// the last bit on any number of threads. Throws Error where shapes do not fit. Precondition: `trace`
/// is of the forward of this very `x`, layer and layout; `dx` does not overlap what is read.
template <class Layer, Activations X, Activations Upstream, Activations Dx>
void attention_backward(const Layer& layer, const X& x,
                        const AttentionTrace<typename Layer::T>& trace, const Upstream& upstream,
                        Dx&& dx, AttentionGradients<typename Layer::T>& gradients,
                        AttentionBackwardWorkspace<typename Layer::T>& workspace,
                        const TokenLayout& layout = {}) {
  detail::attention_backward(layer, x, trace, upstream, dx, gradients, workspace, layout,
                             [](std::span<typename Layer::T>) {});
}

}  // namespace vha
