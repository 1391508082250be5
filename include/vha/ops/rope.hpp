// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>
#include <vha/core/activations.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>

namespace vha {

/// Where a token stands in its sequence, counted from 0.
using Position = std::int64_t;

/// Throws Error naming `argument` unless `position` is in the range in which RoPE's angles are exact to
/// 1e-6 rad, from 0 to 2^31 - 1.
inline void require_position(std::string_view argument, Position position) {
  if (position < 0 || position > std::numeric_limits<std::int32_t>::max()) {
    raise(argument, "0 to 2^31 - 1", text(position));
  }
}

/// Rotary position embedding in its half-rotation form: of the first `rotary_dim` channels, channel
/// `i` and channel `i + rotary_dim / 2` are turned together by the angle position · frequency_i,
///
///     frequency_i = theta^(-2i / rotary_dim),   i < rotary_dim / 2
///     x'_i        = x_i · cos - x_(i+n) · sin
///     x'_(i+n)    = x_(i+n) · cos + x_i · sin,  n = rotary_dim / 2
///
/// (Su et al., RoFormer, arXiv 2104.09864, eq. 34, with the pairs of GPT-NeoX and Qwen). The
/// channels after them stay. Angles are taken in double whatever `T` is, and their cosines and
/// sines rounded once: at position 10^6 an angle in float would be wrong by 0.03 rad.
template <ComputeScalar T>
class Rope {
 public:
  /// Precondition: `rotary_dim` is even and positive, `theta` positive; throws Error otherwise.
  Rope(double theta, Index rotary_dim) {
    if (rotary_dim <= 0 || rotary_dim % 2 != 0) {
      raise("rotary_dim", "an even number of 2 or more (it must be even)", text(rotary_dim));
    }
    if (!is_finite(theta) || theta <= 0) raise("theta", "a positive number", text(theta));
    for (Index i = 0; i < rotary_dim; i += 2) {
      frequencies_.push_back(
          std::pow(theta, -static_cast<double>(i) / static_cast<double>(rotary_dim)));
    }
  }

  Index pairs() const { return static_cast<Index>(frequencies_.size()); }
  Index rotary_dim() const { return 2 * pairs(); }

  /// Writes the cosines, then the sines, of one position's angles to `table` `[2, pairs]`.
  void angles(Position position, T* table) const {
    for (Index i = 0; i < pairs(); ++i) {
      const double angle =
          static_cast<double>(position) * frequencies_[static_cast<std::size_t>(i)];
      table[i] = static_cast<T>(std::cos(angle));
      table[pairs() + i] = static_cast<T>(std::sin(angle));
    }
  }

  /// Turns one head, `rotary_dim` channels or more, in place by the angles in `table`.
  void rotate(T* head, const T* table) const {
    const Index half_width = pairs();
    for (Index i = 0; i < half_width; ++i) {
      const T first = head[i];
      const T second = head[half_width + i];
      head[i] = first * table[i] - second * table[half_width + i];
      head[half_width + i] = second * table[i] + first * table[half_width + i];
    }
  }

  /// Turns every head in place, each token by its own position.
  /// Precondition: a position for each token, and heads of `rotary_dim` channels or more.
  void operator()(const HeadsView<T>& heads, std::span<const Position> positions,
                  Buffer<T>& scratch) const {
    T* const table = scratch.reserve(rotary_dim());
    for (Index token = 0; token < heads.tokens; ++token) {
      angles(positions[static_cast<std::size_t>(token)], table);
      for_each_head(heads.slice(token, 1), [&](Index, T* head) { rotate(head, table); });
    }
  }

  /// Turns every head back in place: the transpose of a rotation is its inverse, so this takes the
  /// gradient of the turned heads to that of the heads before.
  void backward(const HeadsView<T>& heads, std::span<const Position> positions,
                Buffer<T>& scratch) const {
    T* const table = scratch.reserve(rotary_dim());
    for (Index token = 0; token < heads.tokens; ++token) {
      angles(positions[static_cast<std::size_t>(token)], table);
      for (Index i = 0; i < pairs(); ++i) table[pairs() + i] = -table[pairs() + i];
      for_each_head(heads.slice(token, 1), [&](Index, T* head) { rotate(head, table); });
    }
  }

  /// The turned heads of a tensor `[batch, tokens, heads, head_dim]` at positions
  /// `[batch, tokens]`. Throws Error where they do not fit.
  Tensor4<T> operator()(Tensor4<T> heads, std::span<const Position> positions) const {
    require_size("positions.size() (batch * tokens)", heads.dimension(0) * heads.dimension(1),
                 static_cast<Index>(positions.size()));
    if (heads.dimension(3) < rotary_dim()) {
      raise("heads.dimension(3)", text("rotary_dim = ", rotary_dim(), " or more"),
            text(heads.dimension(3)));
    }
    Buffer<T> scratch;
    (*this)(heads_view(heads), positions, scratch);
    return heads;
  }

 private:
  std::vector<double> frequencies_;
};

}  // namespace vha
