// SPDX-License-Identifier: Apache-2.0
#include "block.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

namespace bench {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& run, int calls) {
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) run();
  return std::chrono::duration<double>(Clock::now() - begin).count() / calls;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Waits until the threads of the library that ran last stop spinning on our cores.
void settle(int threads) {
  if (threads > 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

/// A library's threads that slept wake on one core, and take a while to part.
void warm_up(const std::function<void()>& run, int threads) {
  const auto enough = std::chrono::milliseconds(threads > 1 ? 30 : 0);
  for (const auto begin = Clock::now(); Clock::now() - begin < enough;) run();
}

// How often a block is run where the machine is not quiet.
constexpr int attempts = 4;

}  // namespace

bool Peaks::agrees_with(const Peaks& other) const {
  const auto close = [](double a, double b) { return std::abs(a - b) <= 0.1 * std::max(a, b); };
  if (!close(flops, other.flops)) return false;
  return std::equal(bandwidth.begin(), bandwidth.end(), other.bandwidth.begin(),
                    other.bandwidth.end(),
                    [&](const auto& a, const auto& b) { return close(a.second, b.second); });
}

Block::Block(Work work, int rounds) : work_(std::move(work)), rounds_(rounds) {
  for (const auto& contender : work_.contenders) costs_.push_back(contender.cost);
}

const Measurement& Block::measurement(std::size_t contender) {
  if (measurements_.empty()) measure();
  return measurements_[contender];
}

Peaks Block::measure_peaks() const {
  settle(work_.threads);
  Peaks peaks{peak_flops(work_.element, work_.threads), {}};
  for (const auto& cost : costs_) {
    if (cost.bytes == 0 || peaks.bandwidth.contains(cost.bytes)) continue;
    peaks.bandwidth[cost.bytes] =
        read_bandwidth(static_cast<std::size_t>(cost.bytes), work_.threads);
  }
  return peaks;
}

/// False where the machine does less than it did before in this program: its cores are shared.
bool Block::is_whole(const Peaks& peaks) const {
  static std::map<std::pair<Element, int>, double> best;
  double& most = best[{work_.element, work_.threads}];
  most = std::max(most, peaks.flops);
  return peaks.flops >= 0.9 * most;
}

void Block::measure() {
  const std::size_t count = work_.contenders.size();
  measurements_.resize(count);
  std::vector<Task> tasks(count);
  std::vector<float> expected;
  for (std::size_t i = 0; i < count; ++i) {
    try {
      tasks[i] = work_.contenders[i].make();
      if (!tasks[i]) throw std::runtime_error("does not do this");
      tasks[i].run();
      measurements_[i].difference = difference(tasks[i], expected);
    } catch (const std::exception& error) {
      tasks[i] = {};
      measurements_[i].error = error.what();
    }
  }
  for (int attempt = 1; attempt <= attempts; ++attempt) {
    const Peaks before = measure_peaks();
    const auto seconds = run_rounds(tasks);
    const Peaks after = measure_peaks();
    const bool quiet = before.agrees_with(after) && is_whole(before) && is_whole(after);
    if (!quiet && attempt < attempts) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      continue;
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!tasks[i]) continue;
      measurements_[i].seconds = seconds[i];
      measurements_[i].peak_flops = (before.flops + after.flops) / 2;
      if (const double bytes = costs_[i].bytes; bytes > 0) {
        measurements_[i].peak_bandwidth =
            (before.bandwidth.at(bytes) + after.bandwidth.at(bytes)) / 2;
      }
      measurements_[i].disturbed = !quiet;
    }
    break;
  }
  work_.contenders.clear();  // and the operands that they share
}

/// The median time of each task over rounds in which each has its turn.
std::vector<double> Block::run_rounds(const std::vector<Task>& tasks) const {
  std::vector<std::vector<double>> samples(tasks.size());
  for (int round = 0; round < rounds_; ++round) {
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (!tasks[i]) continue;
      settle(work_.threads);
      warm_up(tasks[i].run, work_.threads);
      constexpr double least = 0.02;  // of seconds, for a sample
      double seconds = seconds_of(tasks[i].run, 1);
      if (seconds < least) {
        seconds = seconds_of(tasks[i].run, static_cast<int>(std::ceil(least / seconds)));
      }
      samples[i].push_back(seconds);
    }
  }
  std::vector<double> medians;
  for (auto& sample : samples) medians.push_back(sample.empty() ? 0 : median(std::move(sample)));
  return medians;
}

/// Holds a result against the first one, relative to its largest: the same computation, or no
/// comparison. Throws where they differ.
double Block::difference(const Task& task, std::vector<float>& expected) const {
  if (work_.result_size == 0 || !task.copy_result) return 0;
  std::vector<float> actual(work_.result_size);
  task.copy_result(actual.data());
  if (expected.empty()) expected = actual;
  double largest = 0, difference = 0;
  for (std::size_t k = 0; k < actual.size(); ++k) {
    largest = std::max(largest, std::abs(double(expected[k])));
    // Not NaN, which would compare as no difference.
    difference = std::max(difference, std::isnan(actual[k])
                                          ? std::numeric_limits<double>::infinity()
                                          : std::abs(double(expected[k]) - double(actual[k])));
  }
  const double bound = work_.element == Element::bf16 ? 3e-2 : 1e-4;
  if (difference > bound * largest) {
    throw std::runtime_error("the result differs from ours by " +
                             std::to_string(difference / largest));
  }
  return difference / largest;
}

}  // namespace bench
