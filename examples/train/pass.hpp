// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <variant>
#include <vector>

#include "gradients.hpp"
#include "model.hpp"

namespace train {

/// A forward and a backward through the model on one thread, and the memory for both, kept from call
/// to call. All tokens of all sequences go through each product together.
template <class T>
class Pass {
 public:
  /// What the model makes of the sequences.
  Score score(const LanguageModel<T>& model, const SequencesView& sequences) {
    forward(model, sequences);
    return cross_entropy(sequences, T(1));
  }

  /// The same, and adds `scale` times the gradients of the sum of the losses.
  Score train(const LanguageModel<T>& model, const SequencesView& sequences, T scale,
              Gradients<T>& gradients) {
    forward(model, sequences);
    const Score score = cross_entropy(sequences, scale);
    backward(model, sequences, gradients);
    return score;
  }

 private:
  using Matrix = vha::RowMajorMatrix<T>;
  using Array = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;

  /// What the backward pass of a block needs of its forward.
  struct OfBlock {
    Matrix x, normed_x, middle, normed_middle, gate, up, product;
    vha::AttentionTrace<T> attention;
  };

  static vha::MatrixView<T> view(const Matrix& matrix) {
    return vha::row_major_view(matrix.data(), matrix.rows(), matrix.cols(), matrix.cols());
  }
  static Array flat(Matrix& matrix) { return {matrix.data(), matrix.size()}; }
  /// A row of tokens as a tensor of sequences.
  template <class M>
  auto as_sequences(M& matrix) const {
    return Eigen::TensorMap<vha::Tensor3<T>>(matrix.data(), sequences_, tokens_, matrix.cols());
  }
  static auto rows_of(Matrix& matrix) {
    return vha::token_major_heads(matrix.data(), matrix.rows(), 1, 1, matrix.cols());
  }

  void normalise(const vha::RmsNorm<T>& norm, const Matrix& x, Matrix& normed) {
    normed = x;
    norm(rows_of(normed), scratch_);
  }
  /// Adds to `dx` what `dnormed`, which is overwritten, makes of it.
  void normalise_backward(const vha::RmsNorm<T>& norm, Matrix& x, Matrix& dnormed, Matrix& dx,
                          Matrix& weight_gradient) {
    norm.backward(vha::HeadsView<const T>(rows_of(x)), rows_of(dnormed), weight_gradient.data(),
                  scratch_);
    dx += dnormed;
  }
  void apply(const vha::Linear<T>& linear, const Matrix& x, Matrix& y) {
    y.resize(x.rows(), linear.out());
    linear(view(x), y.data(), y.cols(), product_);
  }

  void forward(const LanguageModel<T>& model, const SequencesView& sequences) {
    tokens_ = sequences.tokens;
    sequences_ = sequences.sequences();
    const auto& embedding = model.embedding();
    const Index hidden = embedding.cols(), rows = sequences_ * tokens_;
    x_.resize(rows, hidden);
    for (Index row = 0; row < rows; ++row) {
      const Index token = sequences.inputs[static_cast<std::size_t>(row)];
      for (Index c = 0; c < hidden; ++c) x_(row, c) = embedding(token, c);
    }
    blocks_.resize(model.blocks().size());
    for (std::size_t k = 0; k < blocks_.size(); ++k) run(model.blocks()[k], blocks_[k]);

    // Nothing is asked of the head where there is no target.
    asked_.clear();
    for (Index row = 0; row < rows; ++row) {
      if (sequences.targets[static_cast<std::size_t>(row)] >= 0) asked_.push_back(row);
    }
    asked_x_.resize(static_cast<Index>(asked_.size()), hidden);
    for (Index row = 0; row < asked_x_.rows(); ++row) asked_x_.row(row) = x_.row(asked(row));
    normalise(model.norm(), asked_x_, normed_);
    logits_.resize(normed_.rows(), embedding.rows());
    multiply(view(normed_), embedding.view().transposed(), logits_.data(), logits_.cols(), false,
             product_);
  }

  Index asked(Index row) const { return asked_[static_cast<std::size_t>(row)]; }

  void run(const Block<T>& block, OfBlock& kept) {
    kept.x = x_;
    normalise(block.attention_norm, kept.x, kept.normed_x);
    kept.middle.resize(x_.rows(), x_.cols());
    std::visit(
        [&](const auto& layer) {
          layer.forward_into(as_sequences(kept.normed_x), as_sequences(kept.middle), attention_, {},
                             &kept.attention);
        },
        block.attention);
    kept.middle += kept.x;
    normalise(block.mlp_norm, kept.middle, kept.normed_middle);
    apply(block.gate, kept.normed_middle, kept.gate);
    apply(block.up, kept.normed_middle, kept.up);
    kept.product.resize(kept.gate.rows(), kept.gate.cols());
    flat(kept.product) = flat(kept.gate) * flat(kept.up) / (T(1) + (-flat(kept.gate)).exp());
    apply(block.down, kept.product, x_);
    x_ += kept.middle;
  }

  /// Turns the logits into `scale` times the gradients of the sum of the losses.
  Score cross_entropy(const SequencesView& sequences, T scale) {
    Score score;
    score.asked = logits_.rows();
    for (Index row = 0; row < logits_.rows(); ++row) {
      Array logits(logits_.row(row).data(), logits_.cols());
      const Index target = sequences.targets[static_cast<std::size_t>(asked(row))];
      Index likeliest = 0;
      const T most = logits.maxCoeff(&likeliest);
      score.correct += likeliest == target ? 1 : 0;
      const T distance = most - logits[target];
      logits = (logits - most).exp();
      const T sum = logits.sum();
      score.loss += static_cast<double>(std::log(sum) + distance);
      logits *= scale / sum;
      logits[target] -= scale;
    }
    return score;
  }

  void backward(const LanguageModel<T>& model, const SequencesView& sequences,
                Gradients<T>& gradients) {
    const auto& embedding = model.embedding();
    const Index hidden = embedding.cols();
    dnormed_.resize(normed_.rows(), hidden);
    multiply(view(logits_), embedding.view(), dnormed_.data(), hidden, false, product_);
    multiply(view(logits_).transposed(), view(normed_), gradients.embedding().data(), hidden, true,
             product_);
    dx_.setZero(x_.rows(), hidden);
    dasked_.setZero(normed_.rows(), hidden);
    normalise_backward(model.norm(), asked_x_, dnormed_, dasked_, gradients.norm());
    for (Index row = 0; row < dasked_.rows(); ++row) dx_.row(asked(row)) = dasked_.row(row);
    for (std::size_t k = blocks_.size(); k-- > 0;) {
      run_backward(model.blocks()[k], blocks_[k], gradients.block(k));
    }
    for (Index row = 0; row < dx_.rows(); ++row) {
      gradients.embedding().row(sequences.inputs[static_cast<std::size_t>(row)]) += dx_.row(row);
    }
  }

  void run_backward(const Block<T>& block, OfBlock& kept, typename Gradients<T>::OfBlock& to) {
    dproduct_.resize(kept.product.rows(), kept.product.cols());
    block.down.backward(view(kept.product), view(dx_), dproduct_.data(), false, to.down, product_);
    // With s = sigmoid(gate): the product is gate·s·up, and silu'(gate) = s·(1 + gate·(1 - s)).
    const Array gate = flat(kept.gate);
    Array up = flat(kept.up), sigmoid = flat(kept.product), dproduct = flat(dproduct_);
    sigmoid = (T(1) + (-gate).exp()).inverse();
    dgate_.resize(kept.gate.rows(), kept.gate.cols());
    flat(dgate_) = dproduct * up * sigmoid * (T(1) + gate * (T(1) - sigmoid));
    dproduct *= gate * sigmoid;
    dnormed_.resize(dx_.rows(), dx_.cols());
    block.gate.backward(view(kept.normed_middle), view(dgate_), dnormed_.data(), false, to.gate,
                        product_);
    block.up.backward(view(kept.normed_middle), view(dproduct_), dnormed_.data(), true, to.up,
                      product_);
    normalise_backward(block.mlp_norm, kept.middle, dnormed_, dx_, to.mlp_norm);
    std::visit(
        [&](const auto& layer) {
          vha::attention_backward(layer, as_sequences(kept.normed_x), kept.attention,
                                  as_sequences(dx_), as_sequences(dnormed_), to.attention,
                                  attention_backward_);
        },
        block.attention);
    normalise_backward(block.attention_norm, kept.x, dnormed_, dx_, to.attention_norm);
  }

  Index sequences_ = 0, tokens_ = 0;
  std::vector<OfBlock> blocks_;
  std::vector<Index> asked_;  ///< the rows with a target
  Matrix x_, asked_x_, normed_, logits_;
  Matrix dx_, dasked_, dnormed_, dproduct_, dgate_;
  vha::Buffer<T> scratch_;
  vha::ProductWorkspace<T> product_;
  vha::AttentionWorkspace<T> attention_;
  vha::AttentionBackwardWorkspace<T> attention_backward_;
};

}  // namespace train
