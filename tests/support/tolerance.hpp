// SPDX-License-Identifier: Apache-2.0
#pragma once

// How results are compared, and the one table of how far apart they may be.

#include <gtest/gtest.h>

#include <Eigen/Core>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace laws {

/// The largest error that is allowed, relative to the largest value expected, where sums of
/// `length` terms were taken in `S`, or where values were rounded to `S` on the way.
///
/// | scalar | unit roundoff u | allowed |
/// |---|---|---|
/// | double | 2^-53 | 8 u √length: a chain of such sums, whose errors go either way |
/// | float | 2^-24 | 8 u √length |
/// | half | 2^-11 | 4 u: stored once, summed in float |
/// | bfloat16 | 2^-8 | 4 u |
template <class S>
double tolerance(std::size_t length) {
  const double growth = std::sqrt(static_cast<double>(std::max<std::size_t>(length, 1)));
  if constexpr (std::is_same_v<S, double>) return 8 * 0x1p-53 * growth;
  if constexpr (std::is_same_v<S, float>) return 8 * 0x1p-24 * growth;
  if constexpr (std::is_same_v<S, Eigen::half>) return 4 * 0x1p-11;
  if constexpr (std::is_same_v<S, Eigen::bfloat16>) return 4 * 0x1p-8;
}

/// Results, row-major and in double, which holds every scalar exactly.
struct Array {
  std::vector<Eigen::Index> shape;
  std::vector<double> values;

  /// "[2, 0, 5]", the place of element `flat`.
  std::string place(std::size_t flat) const {
    std::string text;
    for (auto size = shape.rbegin(); size != shape.rend(); ++size) {
      const auto extent = static_cast<std::size_t>(*size);
      text = std::to_string(flat % extent) + (text.empty() ? "" : ", ") + text;
      flat /= extent;
    }
    return "[" + text + "]";
  }
};

template <class Derived>
Array array_of(const Eigen::DenseBase<Derived>& matrix) {
  Array array{{matrix.rows(), matrix.cols()}, {}};
  for (Eigen::Index i = 0; i < matrix.rows(); ++i) {
    for (Eigen::Index j = 0; j < matrix.cols(); ++j) {
      array.values.push_back(static_cast<double>(matrix(i, j)));
    }
  }
  return array;
}

/// Of a row-major Eigen tensor.
template <class Tensor>
requires requires(const Tensor& tensor) {
  tensor.dimensions();
}
Array array_of(const Tensor& tensor) {
  static_assert(static_cast<int>(Tensor::Layout) == static_cast<int>(Eigen::RowMajor));
  Array array{{tensor.dimensions().begin(), tensor.dimensions().end()}, {}};
  for (Eigen::Index k = 0; k < tensor.size(); ++k) {
    array.values.push_back(static_cast<double>(tensor.data()[k]));
  }
  return array;
}

/// Success where no element of `actual` is further from `expected` than `tolerance` times the
/// largest of `expected`. NaN is far from everything.
inline testing::AssertionResult close(const Array& actual, const std::vector<double>& expected,
                                      double tolerance) {
  if (actual.values.size() != expected.size()) {
    return testing::AssertionFailure()
           << actual.values.size() << " elements, not " << expected.size();
  }
  double largest = 0, worst_absolute = -1, worst_relative = -1;
  std::size_t absolute_at = 0, relative_at = 0;
  const auto take_worse = [](double error, std::size_t k, double& worst, std::size_t& at) {
    if (!(error <= worst) && !std::isnan(worst)) worst = error, at = k;
  };
  for (std::size_t k = 0; k < expected.size(); ++k) {
    const double error = std::abs(actual.values[k] - expected[k]);
    largest = std::max(largest, std::abs(expected[k]));
    take_worse(error, k, worst_absolute, absolute_at);
    take_worse(error == 0 ? 0 : error / std::abs(expected[k]), k, worst_relative, relative_at);
  }
  if (worst_absolute <= tolerance * largest) return testing::AssertionSuccess();
  const auto both = [&](std::size_t k) {
    return testing::PrintToString(actual.values[k]) + " for " +
           testing::PrintToString(expected[k]) + " at " + actual.place(k);
  };
  return testing::AssertionFailure()
         << "worst absolute error " << worst_absolute << ": " << both(absolute_at)
         << "\nworst relative error " << worst_relative << ": " << both(relative_at) << "\nallowed "
         << tolerance * largest << ", that is " << tolerance << " of the largest value " << largest;
}

inline testing::AssertionResult close(const Array& actual, const Array& expected,
                                      double tolerance) {
  if (actual.shape != expected.shape) {
    return testing::AssertionFailure() << "shape " << testing::PrintToString(actual.shape)
                                       << ", not " << testing::PrintToString(expected.shape);
  }
  return close(actual, expected.values, tolerance);
}

/// Success where both have the same shape and every element the same bits.
inline testing::AssertionResult same_bits(const Array& actual, const Array& expected) {
  if (actual.shape != expected.shape) return close(actual, expected, 0);
  const auto bits = [](double value) { return std::bit_cast<std::uint64_t>(value); };
  for (std::size_t k = 0; k < expected.values.size(); ++k) {
    if (bits(actual.values[k]) == bits(expected.values[k])) continue;
    return testing::AssertionFailure() << "other bits, first at " << actual.place(k) << "\n"
                                       << close(actual, expected, 0).message();
  }
  return testing::AssertionSuccess();
}

}  // namespace laws
