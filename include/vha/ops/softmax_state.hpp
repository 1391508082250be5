// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <vha/core/scalar.hpp>

namespace vha {

/// The softmax of one row of logits, taken block by block (Milakov and Gimelshein, arXiv
/// 1805.02867): the largest logit so far and the sum of exponentials relative to it.
///
/// A state that has seen nothing has the sum 0; no infinity stands for it, so that the arithmetic
/// holds under -ffast-math too.
template <ComputeScalar T>
struct SoftmaxState {
  T max = std::numeric_limits<T>::lowest();
  T sum = 0;

  bool empty() const { return sum == 0; }

  /// The logit of a key that is not seen: its weight is exactly 0. Logits must stay above it; finite,
  /// so that no infinity is needed.
  static constexpr T hidden = std::numeric_limits<T>::lowest() / 2;

  /// Takes a block of logits in and turns them into weights relative to the new `max`. Returns the
  /// factor by which what was accumulated before must be multiplied. Precondition: one logit or more.
  T update(Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> logits) {
    if ((logits <= hidden).all()) {
      logits.setZero();
      return T(1);
    }
    const T block_max = logits.maxCoeff();
    const T new_max = empty() ? block_max : std::max(max, block_max);
    const T factor = rescale_to(new_max);
    // Eigen's vector exponential stops short of 0, near the smallest normal number.
    constexpr T least = 4 * std::numeric_limits<T>::min();
    logits = (logits - new_max).exp();
    logits = (logits <= least).select(T(0), logits);
    sum += logits.sum();
    return factor;
  }

  /// The state of both rows' logits together; the factors to multiply either's accumulated values
  /// by are written to `factor` and `other_factor`.
  SoftmaxState merge(SoftmaxState other, T& factor, T& other_factor) const {
    SoftmaxState merged = *this;
    const T new_max = empty() ? other.max : other.empty() ? max : std::max(max, other.max);
    factor = merged.rescale_to(new_max);
    other_factor = other.rescale_to(new_max);
    merged.sum += other.sum;
    return merged;
  }

  /// What the accumulated values are multiplied by at the end: 1 / sum, or 0 where nothing was
  /// seen.
  T normalizer() const { return empty() ? T(0) : T(1) / sum; }

 private:
  T rescale_to(T new_max) {
    const T factor = empty() ? T(0) : std::exp(max - new_max);
    max = new_max;
    sum *= factor;
    return factor;
  }
};

}  // namespace vha
