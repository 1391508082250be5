// SPDX-License-Identifier: Apache-2.0
// One piece of work, measured: its contenders in turn, between two measurements of the machine.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "harness.hpp"

namespace bench {

/// The peaks that bound a piece of work, as they are at the moment.
struct Peaks {
  double flops = 0;
  std::map<double, double> bandwidth;  ///< of working sets, by their bytes

  /// Within 10 %.
  bool agrees_with(const Peaks& other) const;
};

/// What became of one contender.
struct Measurement {
  double seconds = 0;
  double peak_flops = 0;
  double peak_bandwidth = 0;  ///< 0: its bytes are of no account
  bool disturbed = false;     ///< the machine was not the same before and after, however often
  double difference = 0;      ///< of the results, relative to the largest
  std::string error;          ///< why there is none
};

/// Measures all contenders when the first of them is asked for.
class Block {
 public:
  Block(Work work, int rounds);

  const Work& work() const { return work_; }
  const Cost& cost(std::size_t contender) const { return costs_[contender]; }
  const Measurement& measurement(std::size_t contender);

 private:
  Peaks measure_peaks() const;
  bool is_whole(const Peaks& peaks) const;
  void measure();
  std::vector<double> run_rounds(const std::vector<Task>& tasks) const;
  double difference(const Task& task, std::vector<float>& expected) const;

  Work work_;
  int rounds_;
  std::vector<Cost> costs_;
  std::vector<Measurement> measurements_;
};

}  // namespace bench
