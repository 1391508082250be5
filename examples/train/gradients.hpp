// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <variant>
#include <vector>

#include "model.hpp"

namespace train {

/// The gradients of all of a model's parameters.
template <class T>
class Gradients {
 public:
  struct OfBlock {
    vha::RowMajorMatrix<T> attention_norm, mlp_norm;
    vha::AttentionGradients<T> attention;
    vha::LinearGradients<T> gate, up, down;
  };

  /// Zeros; those of maps have no elements, and cost nothing, where these are frozen.
  Gradients(const LanguageModel<T>& model, bool freeze_maps) : blocks_(model.blocks().size()) {
    const auto add = [&](vha::RowMajorMatrix<T>& gradient) {
      const auto& parameter = model.parameters()[in_order_.size()];
      if (!freeze_maps || !is_map(parameter.role)) {
        gradient.setZero(parameter.value.rows(), parameter.value.cols());
      }
      in_order_.push_back(&gradient);
    };
    add(embedding_);
    for (std::size_t k = 0; k < blocks_.size(); ++k) {
      OfBlock& block = blocks_[k];
      add(block.attention_norm);
      std::visit(
          [&](const auto& layer) {
            block.attention.for_each(
                layer, [&](const auto&, const auto&, auto& gradient) { add(gradient); });
          },
          model.blocks()[k].attention);
      add(block.mlp_norm);
      for (auto* const linear : {&block.gate, &block.up, &block.down}) add(linear->weight);
    }
    add(norm_);
  }
  Gradients(const Gradients&) = delete;  // in_order() points into it
  Gradients& operator=(const Gradients&) = delete;

  vha::RowMajorMatrix<T>& embedding() { return embedding_; }
  OfBlock& block(std::size_t layer) { return blocks_[layer]; }
  vha::RowMajorMatrix<T>& norm() { return norm_; }

  /// One for each parameter, in the model's order.
  const std::vector<vha::RowMajorMatrix<T>*>& in_order() const { return in_order_; }

  void set_zero() {
    for (auto* const gradient : in_order_) gradient->setZero();
  }

 private:
  vha::RowMajorMatrix<T> embedding_, norm_;
  std::vector<OfBlock> blocks_;
  std::vector<vha::RowMajorMatrix<T>*> in_order_;
};

}  // namespace train
