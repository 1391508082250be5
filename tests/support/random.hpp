// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace laws {

/// Uniform numbers in [-1, 1) from a fixed seed, the same with every standard library (whose
/// std::uniform_real_distribution may differ).
class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  double operator()() { return static_cast<double>(engine_()) * 0x1p-31 - 1.0; }

  /// `size` numbers, `offset` plus or minus up to `scale`, each a number of the scalar `T`.
  template <class T>
  std::vector<double> values(std::size_t size, double scale = 1, double offset = 0) {
    std::vector<double> result(size);
    for (double& value : result) {
      value = static_cast<double>(static_cast<T>(offset + scale * (*this)()));
    }
    return result;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace laws
