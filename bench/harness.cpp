// SPDX-License-Identifier: Apache-2.0
#include "harness.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <unistd.h>
#endif

#include "peers/peer.hpp"

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

/// The peaks that bound a piece of work, as they are at the moment.
struct Peaks {
  double flops = 0;
  double bandwidth = 0;  // 0: of no account

  bool agrees_with(const Peaks& other) const {
    const auto close = [](double a, double b) { return std::abs(a - b) <= 0.1 * std::max(a, b); };
    return close(flops, other.flops) && close(bandwidth, other.bandwidth);
  }
};

/// What became of one contender.
struct Measurement {
  double seconds = 0;
  Peaks peaks;
  bool disturbed = false;
  double difference = 0;  // of the results, relative to the largest
  std::string error;
};

/// One piece of work: measured when the first of its contenders is asked for.
class Block {
 public:
  Block(Work work, int rounds) : work_(std::move(work)), rounds_(rounds) {
    for (const auto& contender : work_.contenders) costs_.push_back(contender.cost);
  }

  const Work& work() const { return work_; }
  const Cost& cost(std::size_t contender) const { return costs_[contender]; }
  const Measurement& measurement(std::size_t contender) {
    if (measurements_.empty()) measure();
    return measurements_[contender];
  }

 private:
  static constexpr int attempts = 4;

  Peaks measure_peaks() const {
    double bytes = 0;
    for (const auto& cost : costs_) bytes = std::max(bytes, cost.bytes);
    settle(work_.threads);
    return {peak_flops(work_.element, work_.threads),
            bytes > 0 ? read_bandwidth(static_cast<std::size_t>(bytes), work_.threads) : 0};
  }

  /// False where the machine does less than it did before in this program: its cores are shared.
  bool is_whole(const Peaks& peaks) const {
    static std::map<std::pair<Element, int>, double> best;
    double& most = best[{work_.element, work_.threads}];
    most = std::max(most, peaks.flops);
    return peaks.flops >= 0.9 * most;
  }

  void measure() {
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
        measurements_[i].peaks = {(before.flops + after.flops) / 2,
                                  (before.bandwidth + after.bandwidth) / 2};
        measurements_[i].disturbed = !quiet;
      }
      break;
    }
    work_.contenders.clear();  // and the operands that they share
  }

  /// The median time of each task over rounds in which each has its turn.
  std::vector<double> run_rounds(const std::vector<Task>& tasks) const {
    std::vector<std::vector<double>> samples(tasks.size());
    for (int round = 0; round < rounds_; ++round) {
      for (std::size_t i = 0; i < tasks.size(); ++i) {
        if (!tasks[i]) continue;
        settle(work_.threads);
        constexpr double least = 0.01;  // of seconds, for a sample
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
  double difference(const Task& task, std::vector<float>& expected) const {
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

  Work work_;
  int rounds_;
  std::vector<Cost> costs_;
  std::vector<Measurement> measurements_;
};

void report(benchmark::State& state, Block& block, std::size_t contender) {
  const Measurement& m = block.measurement(contender);
  if (!m.error.empty()) {
    state.SkipWithError(m.error.c_str());
    return;
  }
  for (auto _ : state) state.SetIterationTime(m.seconds);
  const Cost& cost = block.cost(contender);
  const double by_flops = cost.flops / m.peaks.flops;
  const double by_bytes = m.peaks.bandwidth > 0 ? cost.bytes / m.peaks.bandwidth : 0;
  auto& counters = state.counters;
  counters["GFLOP/s"] = cost.flops / m.seconds * 1e-9;
  counters["peak_GFLOP/s"] = m.peaks.flops * 1e-9;
  if (cost.bytes > 0) {
    counters["GB/s"] = cost.bytes / m.seconds * 1e-9;
    counters["peak_GB/s"] = m.peaks.bandwidth * 1e-9;
  }
  counters["share"] = std::max(by_flops, by_bytes) / m.seconds;
  if (m.difference > 0) counters["difference"] = m.difference;
  if (m.disturbed) counters["disturbed"] = 1;
}

/// Peaks at the start, in the context that Google Benchmark prints and writes.
void add_context() {
  benchmark::AddCustomContext("machine", machine_name());
  std::vector<int> counts{1};
  if (hardware_threads() > 1) counts.push_back(hardware_threads());
  for (const int threads : counts) {
    std::ostringstream text;
    text.precision(3);
    for (const Element element : {Element::float64, Element::float32, Element::bf16}) {
      text << to_string(element) << ' ' << peak_flops(element, threads) * 1e-9 << " GFLOP/s, ";
    }
    text << "reads";
    for (const std::size_t mebibytes : {8U, 64U, 320U}) {
      text << ' ' << read_bandwidth(mebibytes << 20, threads) * 1e-9 << " GB/s of " << mebibytes
           << " MiB" << (mebibytes < 320 ? "," : "");
    }
    benchmark::AddCustomContext("peaks, " + std::to_string(threads) + " threads", text.str());
  }
}

/// Settings that libraries read before main starts, or that must hold for all of them.
void prepare_process(char** argv) {
#ifdef __linux__
  // A preset kernel can halve OpenBLAS, which reads this when it is loaded.
  if (std::getenv("OPENBLAS_CORETYPE") != nullptr) {
    unsetenv("OPENBLAS_CORETYPE");
    execv("/proc/self/exe", argv);
  }
#endif
#ifdef __GLIBC__
  // Memory that a library allocates in each call is kept, not handed back and touched anew.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
#endif
  static_cast<void>(argv);
}

/// Takes the flags of our own out of the command line. False where one cannot be.
bool parse(int& argc, char** argv, Options& options) {
  const auto value_of = [](std::string_view argument, std::string_view flag) -> const char* {
    return argument.starts_with(flag) ? argument.data() + flag.size() : nullptr;
  };
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (const char* threads = value_of(argv[i], "--threads=")) {
      std::istringstream list(threads);
      for (std::string one; std::getline(list, one, ',');) {
        options.threads.push_back(std::atoi(one.c_str()));
        if (options.threads.back() < 1) return false;
      }
    } else if (const char* rounds = value_of(argv[i], "--rounds=")) {
      options.rounds = std::atoi(rounds);
      if (options.rounds < 1) return false;
    } else if (const char* peers = value_of(argv[i], "--peers=")) {
      options.peers = peers;
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  return true;
}

}  // namespace

bool Options::wants(const std::string& peer) const {
  return peers == "all" || (',' + peers + ',').find(',' + peer + ',') != std::string::npos;
}

int run_benchmarks(int argc, char** argv,
                   const std::function<std::vector<Work>(const Options&)>& list) {
  prepare_process(argv);
  benchmark::Initialize(&argc, argv);
  Options options{.threads = {}, .peers = "all"};
  if (!parse(argc, argv, options) || benchmark::ReportUnrecognizedArguments(argc, argv)) {
    std::fprintf(stderr, "our own flags: --threads=1,2 --rounds=5 --peers=all|none|NAME,NAME\n");
    return 2;
  }
  if (options.threads.empty()) {
    options.threads = {1};
    if (hardware_threads() > 1) options.threads.push_back(hardware_threads());
  }
  for (auto& work : list(options)) {
    const auto block = std::make_shared<Block>(std::move(work), options.rounds);
    const Work& w = block->work();
    for (std::size_t i = 0; i < w.contenders.size(); ++i) {
      const std::string name = w.name + '/' + to_string(w.element) +
                               "/threads:" + std::to_string(w.threads) + '/' + w.contenders[i].name;
      benchmark::RegisterBenchmark(
          name.c_str(), [block, i](benchmark::State& state) { report(state, *block, i); })
          ->UseManualTime()
          ->Iterations(1)
          ->Unit(benchmark::kMillisecond);
    }
  }
  add_context();
  for (const auto& peer : peers()) {
    if (options.wants(peer->name())) {
      benchmark::AddCustomContext("peer " + peer->name(), peer->version());
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace bench
