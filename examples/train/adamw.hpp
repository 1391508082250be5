// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <numbers>
#include <vector>

#include "gradients.hpp"
#include "parameter.hpp"

namespace train {

struct AdamWOptions {
  double learning_rate = 1e-3;
  double map_learning_rate = 3e-3;  ///< of Premix and Postmix
  double weight_decay = 0.1;        ///< of projections and the embedding; not of norms and maps
  double clip = 1;                  ///< the longest that the gradient may be; 0: any
  Index warm_up = 100;
  Index steps = 1000;
};

/// What the learning rates are multiplied by in a step, counted from 0: rises to 1 during the
/// warm-up, then falls to a tenth along a cosine.
inline double schedule(const AdamWOptions& options, Index step) {
  if (step < options.warm_up) {
    return static_cast<double>(step + 1) / static_cast<double>(options.warm_up);
  }
  const auto done = static_cast<double>(step - options.warm_up) /
                    static_cast<double>(std::max<Index>(1, options.steps - options.warm_up));
  return 0.55 + 0.45 * std::cos(std::numbers::pi * std::min(1.0, done));
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).
template <class T>
class AdamW {
 public:
  /// Running means of a parameter's gradient and of its square.
  struct Moments {
    vha::RowMajorMatrix<T> first, second;
  };

  AdamW(const std::deque<Parameter<T>>& parameters, const AdamWOptions& options)
      : options_(options) {
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      const auto& value = parameters[k].value;
      moments_.emplace_back();
      for (auto* const moment : {&moments_[k].first, &moments_[k].second}) {
        moment->setZero(value.rows(), value.cols());
      }
      for (Index first = 0; first < value.size(); first += piece_size) {
        pieces_.push_back({k, first, std::min(piece_size, value.size() - first), 0});
      }
    }
  }

  std::vector<Moments>& moments() { return moments_; }
  const std::vector<Moments>& moments() const { return moments_; }

  /// One step, counted from 0, by the sum of the `shares`, which ends in the first of them. Returns
  /// the length of the gradient before it is clipped. The bits do not depend on the threads.
  double step(Index step, std::deque<Parameter<T>>& parameters, std::deque<Gradients<T>>& shares,
              const vha::Executor& executor) {
    const auto each_piece = [&](auto&& body) {
      executor.for_each(static_cast<Index>(pieces_.size()), [&](Index task, Index) {
        Piece& piece = pieces_[static_cast<std::size_t>(task)];
        auto& gradient = *shares.front().in_order()[piece.parameter];
        if (gradient.size() > 0) body(piece, part(gradient, piece));
      });
    };
    each_piece([&](Piece& piece, auto gradient) {
      for (std::size_t share = 1; share < shares.size(); ++share) {
        gradient += part(*shares[share].in_order()[piece.parameter], piece);
      }
      piece.squares = gradient.template cast<double>().square().sum();
    });
    double squares = 0;
    for (const Piece& piece : pieces_) squares += piece.squares;
    const double length = std::sqrt(squares);
    if (!vha::is_finite(length)) {
      vha::raise(vha::text("step ", step, ": gradient"),
                 "finite numbers (a lower --learning-rate may help)", vha::text(length));
    }
    const bool clips = options_.clip > 0 && length > options_.clip;
    const T scale = static_cast<T>(clips ? options_.clip / length : 1);
    each_piece([&](Piece& piece, auto gradient) {
      update(step, parameters[piece.parameter], piece, gradient, scale);
    });
    return length;
  }

 private:
  static constexpr double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
  static constexpr Index piece_size = 1 << 14;

  /// Elements of a parameter, what one thread does at a time.
  struct Piece {
    std::size_t parameter;
    Index first, count;
    double squares;  // of the gradient's elements
  };

  static auto part(vha::RowMajorMatrix<T>& matrix, const Piece& piece) {
    return Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(matrix.data() + piece.first, piece.count);
  }

  template <class Gradient>
  void update(Index step, Parameter<T>& parameter, const Piece& piece, Gradient gradient, T scale) {
    const bool map = is_map(parameter.role);
    const double rate =
        schedule(options_, step) * (map ? options_.map_learning_rate : options_.learning_rate);
    const bool decays = !map && parameter.role != Role::norm;
    const auto count = static_cast<double>(step + 1);
    const T rate_now = static_cast<T>(rate / (1 - std::pow(beta1, count)));
    const T unbias = static_cast<T>(1 / (1 - std::pow(beta2, count)));
    auto value = part(parameter.value, piece);
    auto first = part(moments_[piece.parameter].first, piece);
    auto second = part(moments_[piece.parameter].second, piece);
    gradient *= scale;
    first += static_cast<T>(1 - beta1) * (gradient - first);
    second += static_cast<T>(1 - beta2) * (gradient.square() - second);
    if (decays) value *= static_cast<T>(1 - rate * options_.weight_decay);
    value -= rate_now * first / ((unbias * second).sqrt() + static_cast<T>(epsilon));
  }

  AdamWOptions options_;
  std::vector<Moments> moments_;
  std::vector<Piece> pieces_;
};

}  // namespace train
