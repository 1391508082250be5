// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <concepts>
#include <vha/core/scalar.hpp>

namespace vha {

/// 1 / (1 + e^-x), without overflow.
template <ComputeScalar T>
T sigmoid(T x) {
  const T small = std::exp(-std::abs(x));
  return (x < 0 ? small : T(1)) / (T(1) + small);
}

/// A function of one channel that stands after a map.
template <class A>
concept Activation = requires(const A& activation, float x, double y) {
  { activation(x) } -> std::same_as<float>;
  { activation(y) } -> std::same_as<double>;
};

/// An activation that gradients can pass through.
template <class A>
concept DifferentiableActivation = Activation<A> &&
    requires(const A& activation, float x, double y) {
  { activation.derivative(x) } -> std::same_as<float>;
  { activation.derivative(y) } -> std::same_as<double>;
};

/// No activation: the map stays linear and folds.
struct Identity {
  template <ComputeScalar T>
  T operator()(T x) const {
    return x;
  }
  template <ComputeScalar T>
  T derivative(T) const {
    return T(1);
  }
};

/// x · sigmoid(x), the paper's ablation. A map that it follows does not fold.
struct Silu {
  template <ComputeScalar T>
  T operator()(T x) const {
    return x * sigmoid(x);
  }
  template <ComputeScalar T>
  T derivative(T x) const {
    const T s = sigmoid(x);
    return s * (T(1) + x * (T(1) - s));
  }
};

/// x · Φ(x), Φ the distribution function of the standard normal distribution (GELU, arXiv 1606.08415,
/// in its exact form, by erf).
struct Gelu {
  template <ComputeScalar T>
  T operator()(T x) const {
    return x * (T(1) + std::erf(x * static_cast<T>(0.70710678118654752440))) / 2;
  }
};

}  // namespace vha
