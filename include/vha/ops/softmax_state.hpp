// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <limits>
#include <vha/core/scalar.hpp>
#include <vha/ops/exponential.hpp>

namespace vha {

/// The logit of a key that is not seen: its weight is exactly 0. Logits must stay above it; finite,
/// so that no infinity is needed and the arithmetic holds under -ffast-math too.
template <ComputeScalar T>
inline constexpr T hidden_logit = std::numeric_limits<T>::lowest() / 2;

/// The softmax of `N` rows of logits, a lane each, taken block by block (Milakov and Gimelshein, arXiv
/// 1805.02867): the largest logit so far and the sum of exponentials relative to it. A lane that has
/// seen nothing has the sum 0.
template <ComputeScalar T, Index N>
struct SoftmaxLanes {
  using Packet = typename detail::PacketOf<T, N>::type;
  Packet max = all(std::numeric_limits<T>::lowest());
  Packet sum = all(0);

  /// Takes in a block of logits, `count` keys `stride` apart, and turns them into weights relative to
  /// the new `max`. Returns the factor by which what was accumulated before must be multiplied.
  /// Precondition: one logit or more.
  Packet update(T* logits, Index count, Index stride) {
    namespace packet = Eigen::internal;
    Packet block_max = load(logits);
    for (Index key = 1; key < count; ++key) {
      block_max = packet::pmax(block_max, load(logits + key * stride));
    }
    const Packet factor = rescale_to(larger_max(block_max));
    Packet block_sum = all(0);
    for (Index key = 0; key < count; ++key) {
      const Packet logit = load(logits + key * stride);
      const auto hidden = detail::less_or_equal(logit, all(hidden_logit<T>));
      const Packet weight = detail::exp_nonpositive<T, N>(packet::psub(logit, max));
      const Packet seen = detail::select(hidden, all(0), weight);
      packet::pstoreu(logits + key * stride, seen);
      block_sum = packet::padd(block_sum, seen);
    }
    sum = packet::padd(sum, block_sum);
    return factor;
  }

  /// The state of both rows' logits together; the factors to multiply either's accumulated values
  /// by are written to `factor` and `other_factor`.
  SoftmaxLanes merge(SoftmaxLanes other, Packet& factor, Packet& other_factor) const {
    SoftmaxLanes merged = *this;
    namespace packet = Eigen::internal;
    const Packet new_max = detail::select(other.empty(), max, larger_max(other.max));
    factor = merged.rescale_to(new_max);
    other_factor = other.rescale_to(new_max);
    merged.sum = packet::padd(merged.sum, other.sum);
    return merged;
  }

  /// What the accumulated values are multiplied by at the end: 1 / sum, or 0 where nothing was
  /// seen.
  Packet normalizer() const {
    return detail::select(empty(), all(0), Eigen::internal::pdiv(all(1), sum));
  }

 protected:
  static Packet all(T value) { return Eigen::internal::pset1<Packet>(value); }
  static Packet load(const T* at) { return Eigen::internal::ploadu<Packet>(at); }
  /// The mask of the lanes that have seen nothing.
  auto empty() const { return detail::equal(sum, all(0)); }

  Packet larger_max(const Packet& other) const {
    return detail::select(empty(), other, Eigen::internal::pmax(max, other));
  }
  Packet rescale_to(const Packet& new_max) {
    const Packet kept = detail::exp_nonpositive<T, N>(Eigen::internal::psub(max, new_max));
    const Packet factor = detail::select(empty(), all(0), kept);
    max = new_max;
    sum = Eigen::internal::pmul(sum, factor);
    return factor;
  }
};

/// One row's.
template <ComputeScalar T>
struct SoftmaxState : SoftmaxLanes<T, 1> {
  static constexpr T hidden = hidden_logit<T>;

  using SoftmaxLanes<T, 1>::empty;
  T update(Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> logits) {
    return SoftmaxLanes<T, 1>::update(logits.data(), logits.size(), 1);
  }
  SoftmaxState merge(const SoftmaxState& other, T& factor, T& other_factor) const {
    return {SoftmaxLanes<T, 1>::merge(other, factor, other_factor)};
  }
};

}  // namespace vha
