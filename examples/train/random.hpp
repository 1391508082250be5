// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <utility>
#include <vector>
#include <vha/vha.hpp>

namespace train {

using vha::Index;

/// Random numbers that are a function of the given words alone, the same on every platform:
/// SplitMix64 (Steele et al., OOPSLA 2014).
class Random {
 public:
  Random(std::initializer_list<std::uint64_t> words) {
    for (const std::uint64_t word : words) state_ = (*this)() ^ word;
  }
  std::uint64_t operator()() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
  }
  /// Uniform in [0, size), but for a bias of size / 2^32. Precondition: size <= 2^32.
  Index below(Index size) {
    return static_cast<Index>(((*this)() >> 32U) * static_cast<std::uint64_t>(size) >> 32U);
  }
  /// `count` different numbers of [first, last), in random order.
  std::vector<Index> different(Index count, Index first, Index last) {
    std::vector<Index> all(static_cast<std::size_t>(last - first));
    std::iota(all.begin(), all.end(), first);
    for (Index k = 0; k < count; ++k) {
      std::swap(all[static_cast<std::size_t>(k)],
                all[static_cast<std::size_t>(k + below(last - first - k))]);
    }
    all.resize(static_cast<std::size_t>(count));
    return all;
  }

 private:
  std::uint64_t state_ = 0;
};

/// A matrix of N(0, std²).
template <class T>
vha::RowMajorMatrix<T> normal_matrix(Index rows, Index cols, double std, std::uint64_t seed) {
  vha::NormalGenerator normal(seed);
  vha::RowMajorMatrix<T> matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = static_cast<T>(std * normal());
  return matrix;
}

}  // namespace train
