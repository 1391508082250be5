// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace vha {

/// Pseudo-random normal numbers from a seed, the same on every platform: made with integers alone,
/// since logarithms and cosines differ in their last bits from one C library to the next.
///
/// The method is Karney's exact one (Sampling exactly from the normal distribution, ACM TOMS 42,
/// 2016, algorithm N), on numbers of 24 fractional bits; the bits are SplitMix64's (Steele et al.,
/// OOPSLA 2014).
class NormalGenerator {
 public:
  explicit NormalGenerator(std::uint64_t seed) : state_(seed) {}

  /// One sample of N(0, 1), a multiple of 2^-24.
  double operator()() {
    for (;;) {
      std::uint64_t k = 0;
      while (exp_minus_half()) ++k;  // k with probability e^(-k/2) (1 - e^(-1/2))
      bool accepted = true;
      for (std::uint64_t trial = 0; accepted && trial < k * (k - 1); ++trial) {
        accepted = exp_minus_half();
      }
      if (!accepted) continue;
      const std::uint64_t x = uniform();
      for (std::uint64_t trial = 0; accepted && trial <= k; ++trial) {
        accepted = exp_minus_fraction(k, x);  // all together e^(-x (2k + x) / 2)
      }
      if (!accepted) continue;
      const double magnitude = static_cast<double>((k << bits) + x) / double(1U << bits);
      return (next() & 1U) != 0 ? -magnitude : magnitude;
    }
  }

 private:
  static constexpr int bits = 24;

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
  }

  /// Uniform in [0, 2^24).
  std::uint64_t uniform() { return next() >> (64 - bits); }

  /// True with probability e^(-1/2): the length of a falling run that starts below 1/2 is even.
  bool exp_minus_half() {
    std::uint64_t last = std::uint64_t(1) << (bits - 1);
    for (bool even = true;; even = !even) {
      const std::uint64_t u = uniform();
      if (u >= last) return even;
      last = u;
    }
  }

  /// True with probability e^(-x (2k + x) / (2k + 2)).
  bool exp_minus_fraction(std::uint64_t k, std::uint64_t x) {
    std::uint64_t last = x;
    for (bool even = true;; even = !even) {
      const std::uint64_t u = uniform();
      if (u >= last) return even;
      if (uniform() * (2 * k + 2) >= (2 * k << bits) + x) return even;
      last = u;
    }
  }

  std::uint64_t state_;
};

}  // namespace vha
