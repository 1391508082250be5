// SPDX-License-Identifier: Apache-2.0
// A small decoder-only language model, Qwen3's architecture, with its backward pass.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention_layer.hpp"
#include "parameter.hpp"
#include "random.hpp"

namespace train {

struct ModelConfig {
  vha::AttentionConfig attention;
  Maps maps;
  Index layers = 2;
  Index intermediate = 0;  ///< channels within the MLP
  Index vocabulary = 0;
};

/// Sequences of one length: a token at each place, and what should follow it, -1 where nothing is
/// asked.
struct SequencesView {
  Index tokens = 0;  ///< of each sequence
  std::span<const std::int32_t> inputs, targets;

  Index sequences() const { return static_cast<Index>(inputs.size()) / tokens; }
};

struct Score {
  double loss = 0;    ///< the sum of -log p over what is asked
  Index correct = 0;  ///< how often that was the likeliest
  Index asked = 0;

  Score& operator+=(const Score& other) {
    loss += other.loss;
    correct += other.correct;
    asked += other.asked;
    return *this;
  }
  double mean_loss() const { return loss / static_cast<double>(asked); }
  double accuracy() const { return static_cast<double>(correct) / static_cast<double>(asked); }
};

/// x + attention(norm(x)), then + down(silu(gate(norm)) ⊙ up(norm)).
template <class T>
struct Block {
  vha::RmsNorm<T> attention_norm;
  AttentionLayer<T> attention;
  vha::RmsNorm<T> mlp_norm;
  vha::Linear<T> gate, up, down;
};

/// The model. Its weights stand in `parameters()`, where an optimiser changes them.
template <class T>
class LanguageModel {
 public:
  LanguageModel(const ModelConfig& config, std::uint64_t seed) : config_(config) {
    vha::require_positive("layers", config.layers);
    vha::require_positive("intermediate", config.intermediate);
    vha::require_positive("vocabulary", config.vocabulary);
    const Index hidden = config.attention.hidden;
    Random seeds({seed});
    const auto add_normal = [&](std::string name, Role role, Index rows, Index cols) {
      return add(std::move(name), role, normal_matrix<T>(rows, cols, projection_std, seeds()));
    };
    const auto add_norm = [&](std::string name) {
      return vha::RmsNorm<T>{
          add(std::move(name), Role::norm, vha::RowMajorMatrix<T>::Ones(1, hidden)),
          config.attention.rms_norm_eps};
    };
    embedding_ =
        add_normal("model.embed_tokens.weight", Role::embedding, config.vocabulary, hidden);
    for (Index layer = 0; layer < config.layers; ++layer) {
      const std::string prefix = vha::text("model.layers.", layer, ".");
      const auto linear = [&](const char* name, Index in, Index out) {
        return vha::Linear<T>{add_normal(prefix + name, Role::projection, in, out)};
      };
      const auto attention = [&] {
        return std::visit(
            [&](const auto& start) -> AttentionLayer<T> { return over_parameters(start, prefix); },
            initialise_attention<T>(config.attention, config.maps, seeds()));
      };
      // In braces, and so in this order, which is that of the parameters.
      blocks_.push_back(
          Block<T>{.attention_norm = add_norm(prefix + "input_layernorm.weight"),
                   .attention = attention(),
                   .mlp_norm = add_norm(prefix + "post_attention_layernorm.weight"),
                   .gate = linear("mlp.gate_proj.weight", hidden, config.intermediate),
                   .up = linear("mlp.up_proj.weight", hidden, config.intermediate),
                   .down = linear("mlp.down_proj.weight", config.intermediate, hidden)});
    }
    norm_ = add_norm("model.norm.weight");
  }
  LanguageModel(const LanguageModel&) = delete;  // layers view the parameters
  LanguageModel& operator=(const LanguageModel&) = delete;

  const ModelConfig& config() const { return config_; }
  std::deque<Parameter<T>>& parameters() { return parameters_; }
  const std::deque<Parameter<T>>& parameters() const { return parameters_; }
  /// `[vocabulary, hidden]`; also the head, transposed.
  const vha::Weight<T>& embedding() const { return embedding_; }
  const std::vector<Block<T>>& blocks() const { return blocks_; }
  const vha::RmsNorm<T>& norm() const { return norm_; }

 private:
  static constexpr double projection_std = 0.02;

  /// Keeps a weight's value and returns the view of it.
  vha::Weight<T> add(std::string name, Role role, vha::RowMajorMatrix<T> value, Index map = 0) {
    const auto& kept =
        parameters_.emplace_back(Parameter<T>{std::move(name), role, map, std::move(value)}).value;
    return vha::Weight<T>::view_in_out(kept.data(), kept.rows(), kept.cols());
  }

  template <class Layer>
  Layer over_parameters(const Layer& layer, const std::string& prefix) {
    std::vector<vha::Weight<T>> views;
    Index maps = 0;
    vha::AttentionGradients<T>().for_each(
        layer, [&](const std::string& name, const vha::Weight<T>& weight, const auto&) {
          const bool is_premix = name.starts_with("premix");
          const Role role = is_premix                     ? Role::premix
                            : name.starts_with("postmix") ? Role::postmix
                            : name.ends_with("norm")      ? Role::norm
                                                          : Role::projection;
          const Index map = is_premix ? maps++ : 0;
          views.push_back(
              add(prefix + std::string(checkpoint_name(name)), role, weight.template to<T>(), map));
        });
    std::size_t next = 0;
    return with_views(layer, [&](const auto&) { return views[next++]; });
  }

  ModelConfig config_;
  std::deque<Parameter<T>> parameters_;  // elements stay where they are
  vha::Weight<T> embedding_;
  std::vector<Block<T>> blocks_;
  vha::RmsNorm<T> norm_;
};

}  // namespace train
