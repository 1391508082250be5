// SPDX-License-Identifier: Apache-2.0
// A dense Qwen3 model around the library's attention layers: the worked example of a model code base
// that includes vha. It runs VHA and folded checkpoints alike.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>
#include <vha/checkpoint/model.hpp>
#include <vha/vha.hpp>

using Matrix = vha::RowMajorMatrix<float>;  // activations, [tokens, channels]

/// The type that all of a model's tensors are stored as, or float where they differ: it holds the
/// values of the others, so that none is rounded.
inline vha::checkpoint::Dtype common_dtype(const vha::checkpoint::Model& model) {
  using vha::checkpoint::Dtype;
  const Dtype dtype = model.linear(0, "self_attn.q_proj", "weight").dtype();
  const bool is_common = std::ranges::all_of(model.names(), [&](const std::string& name) {
    return vha::checkpoint::floating_dtype(name, model.at(name).dtype) == dtype;
  });
  return is_common ? dtype : Dtype::f32;
}

/// Weights stored as `S`, viewed in the checkpoint where they can be.
template <class S>
class Qwen3 {
 public:
  using Caches = std::vector<vha::KvCache<float>>;

  /// Throws vha::Error where the checkpoint is of another architecture. `model` must live as long.
  explicit Qwen3(const vha::checkpoint::Model& model) : config_(model.attention_config(0)) {
    if (model.config().is_moe()) {
      vha::raise(model.config().label("num_experts"), "a dense model", "experts");
    }
    model.config().require_plain_rope();
    if (const auto act = model.config().string("hidden_act", "silu"); act != "silu") {
      vha::raise(model.config().label("hidden_act"), "silu", act);
    }
    const bool tied = model.config().flag("tie_word_embeddings");
    const auto& embedding = model.at("embed_tokens.weight");
    // [hidden, vocabulary], as the head of a model that ties them is.
    embedding_ =
        vha::checkpoint::LinearSource(vha::checkpoint::LinearLayout::out_in, embedding.shape[1],
                                      {{&embedding, 0, embedding.shape[0]}})
            .template weight<S>();
    head_.weight = tied ? embedding_ : model.linear("lm_head", "weight").template weight<S>();
    norm_ = model.vector<S>("norm.weight");
    for (vha::Index k = 0; k < model.layers(); ++k) blocks_.push_back(load_block(model, k));
  }

  vha::Index vocabulary() const { return embedding_.cols(); }

  /// An empty cache for each layer.
  Caches caches(vha::Index capacity) const {
    Caches result;
    for (std::size_t k = 0; k < blocks_.size(); ++k) result.emplace_back(config_, 1, capacity);
    return result;
  }

  /// Logits `[tokens, vocabulary]` of the tokens, which follow those in the caches and are put there.
  Matrix logits(const std::vector<vha::Index>& tokens, Caches& caches) const {
    Matrix x(static_cast<vha::Index>(tokens.size()), config_.hidden);
    for (vha::Index t = 0; t < x.rows(); ++t) {
      const vha::Index token = tokens[static_cast<std::size_t>(t)];
      if (token < 0 || token >= vocabulary()) {
        vha::raise("token", vha::text("0 to ", vocabulary() - 1), vha::text(token));
      }
      for (vha::Index c = 0; c < x.cols(); ++c) {
        x(t, c) = vha::convert<float>(embedding_(c, token));
      }
    }
    for (std::size_t k = 0; k < blocks_.size(); ++k) {
      const Block& block = blocks_[k];
      x += block.attention(normed(x, block.attention_norm), caches[k]);
      const Matrix y = normed(x, block.mlp_norm);
      Matrix gate = block.gate(y);
      gate = gate.unaryExpr(vha::Silu()).cwiseProduct(block.up(y));
      x += block.down(gate);
    }
    return head_(normed(x, norm_));
  }

 private:
  struct Block {
    vha::Weight<S> attention_norm, mlp_norm;
    /// VHA or GQA: the one place where the two differ.
    std::function<Matrix(const Matrix&, vha::KvCache<float>&)> attention;
    vha::Linear<S> gate, up, down;
  };

  Block load_block(const vha::checkpoint::Model& model, vha::Index layer) const {
    const auto linear = [&](const char* name) {
      return vha::Linear<S>{model.linear(layer, name, "weight").template weight<S>()};
    };
    Block block{
        .attention_norm = model.vector<S>(model.layer_name(layer, "input_layernorm.weight")),
        .mlp_norm = model.vector<S>(model.layer_name(layer, "post_attention_layernorm.weight")),
        .attention = {},
        .gate = linear("mlp.gate_proj"),
        .up = linear("mlp.up_proj"),
        .down = linear("mlp.down_proj")};
    model.with_layer<S>(layer, [&](const auto& attention) {
      block.attention = [attention](const Matrix& x, vha::KvCache<float>& cache) -> Matrix {
        return attention.forward(x, cache);
      };
    });
    return block;
  }

  Matrix normed(Matrix x, const vha::Weight<S>& weight) const {
    vha::Buffer<float> scratch;
    vha::RmsNorm<S>{weight, config_.rms_norm_eps}(
        vha::token_major_heads(x.data(), x.rows(), 1, 1, x.cols()), scratch);
    return x;
  }

  vha::AttentionConfig config_;
  vha::Weight<S> embedding_;
  std::vector<Block> blocks_;
  vha::Weight<S> norm_;
  vha::Linear<S> head_;
};
