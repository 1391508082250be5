// SPDX-License-Identifier: Apache-2.0
#include <Eigen/Core>
#include <cmath>

#include "../threads.hpp"
#include "peer.hpp"

namespace bench {

namespace {

/// RMSNorm and RoPE of one head, as one writes them with Eigen; `table` holds cosines and sines.
template <class S>
void norm_and_rope(const S* from, const float* norm, const float* table, float eps, Index head_dim,
                   S* to) {
  using Array = Eigen::Array<float, Eigen::Dynamic, 1>;
  using Map = Eigen::Map<const Array>;
  const Index half = head_dim / 2;
  thread_local Array x, turned;
  x = Eigen::Map<const Eigen::Array<S, Eigen::Dynamic, 1>>(from, head_dim).template cast<float>();
  turned.resize(head_dim);
  x *= Map(norm, head_dim) / std::sqrt(x.square().mean() + eps);
  const Map cosines(table, half), sines(table + half, half);
  turned.head(half) = x.head(half) * cosines - x.tail(half) * sines;
  turned.tail(half) = x.tail(half) * cosines + x.head(half) * sines;
  Eigen::Map<Eigen::Array<S, Eigen::Dynamic, 1>>(to, head_dim) = turned.template cast<S>();
}

template <class S>
class ComposedLayer {
 public:
  ComposedLayer(Peer& peer, const LayerOperands<S>& operands)
      : operands_(operands), threads_(operands.threads) {
    const auto& c = operands.config;
    const Index tokens = operands.tokens, width = c.query_width() + 2 * c.kv_width();
    capacity_ = operands.cached + tokens;
    const auto size = [](Index elements) { return static_cast<std::size_t>(elements); };
    projected_.resize(size(tokens * width));
    query_.resize(size(tokens * c.query_width()));
    heads_.resize(query_.size());
    out_.resize(size(tokens * c.hidden));
    key_.resize(size(capacity_ * c.kv_width()));
    value_.resize(key_.size());
    for (Index group = 0; group < c.kv_heads; ++group) {
      const Index from = group * operands.cached * c.head_dim, to = group * capacity_ * c.head_dim;
      std::copy_n(operands.key + from, operands.cached * c.head_dim, &key_[size(to)]);
      std::copy_n(operands.value + from, operands.cached * c.head_dim, &value_[size(to)]);
    }
    angles_.resize(size(tokens * c.head_dim));
    const vha::Rope<float> rope(c.rope_theta, c.head_dim);
    for (Index t = 0; t < tokens; ++t) {
      rope.angles(operands.cached + t, &angles_[size(t * c.head_dim)]);
    }
    qkv_ = peer.product(ProductOperands<S>{tokens, c.hidden, width, operands.x, operands.qkv,
                                           projected_.data(), operands.threads});
    core_ = peer.core(CoreOperands<S>{1, tokens, capacity_, capacity_, c.kv_heads, c.group_size(),
                                      c.head_dim, query_.data(), key_.data(), value_.data(),
                                      heads_.data(), operands.threads});
    output_ = peer.product(ProductOperands<S>{tokens, c.query_width(), c.hidden, heads_.data(),
                                              operands.output, out_.data(), operands.threads});
  }

  bool is_complete() const { return qkv_ && core_ && output_; }
  const std::vector<S>& out() const { return out_; }

  void run() {
    qkv_.run();
    // A token at a time is too little for a thread.
    constexpr Index block = 32;
    const Index blocks = (operands_.tokens + block - 1) / block;
    threads_.executor().for_each(blocks, [&](Index task, Index) {
      const Index end = std::min(operands_.tokens, (task + 1) * block);
      for (Index token = task * block; token < end; ++token) split(token);
    });
    core_.run();
    output_.run();
  }

 private:
  /// Norms, turns and moves one token's heads to where the core reads them.
  void split(Index token) {
    const auto& c = operands_.config;
    const Index d = c.head_dim, position = operands_.cached + token;
    const float* const table = angles_.data() + token * d;
    const auto eps = static_cast<float>(c.rms_norm_eps);
    const S* from = projected_.data() + token * (c.query_width() + 2 * c.kv_width());
    for (Index head = 0; head < c.query_heads; ++head, from += d) {
      norm_and_rope(from, operands_.norms, table, eps, d,
                    query_.data() + token * c.query_width() + head * d);
    }
    for (Index group = 0; group < c.kv_heads; ++group, from += d) {
      norm_and_rope(from, operands_.norms + d, table, eps, d,
                    key_.data() + (group * capacity_ + position) * d);
    }
    for (Index group = 0; group < c.kv_heads; ++group, from += d) {
      std::copy_n(from, d, value_.data() + (group * capacity_ + position) * d);
    }
  }

  LayerOperands<S> operands_;
  Threads threads_;
  Index capacity_ = 0;
  std::vector<S> projected_, query_, key_, value_, heads_, out_;
  std::vector<float> angles_;
  Task qkv_, core_, output_;
};

}  // namespace

template <class S>
Task composed_layer(Peer& peer, const LayerOperands<S>& operands) {
  const auto layer = std::make_shared<ComposedLayer<S>>(peer, operands);
  if (!layer->is_complete()) return {};
  return {[layer] { layer->run(); },
          copy_from(layer->out().data(), static_cast<Index>(layer->out().size()))};
}

template Task composed_layer<float>(Peer&, const LayerOperands<float>&);
template Task composed_layer<bfloat16>(Peer&, const LayerOperands<bfloat16>&);

}  // namespace bench
