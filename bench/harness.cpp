// SPDX-License-Identifier: Apache-2.0
#include "harness.hpp"

#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>
#include <vha/cost/roofline.hpp>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <unistd.h>
#endif

#include "block.hpp"
#include "peers/peer.hpp"

namespace bench {

namespace {

void report(benchmark::State& state, Block& block, std::size_t contender) {
  const Measurement& m = block.measurement(contender);
  if (!m.error.empty()) {
    state.SkipWithError(m.error.c_str());
    return;
  }
  for (auto _ : state) state.SetIterationTime(m.seconds);
  const Cost& cost = block.cost(contender);
  const vha::Machine machine{.bandwidth = m.peak_bandwidth, .flops = m.peak_flops};
  auto& counters = state.counters;
  counters["GFLOP/s"] = cost.flops / m.seconds * 1e-9;
  counters["peak_GFLOP/s"] = m.peak_flops * 1e-9;
  if (cost.bytes > 0) {
    counters["GB/s"] = cost.bytes / m.seconds * 1e-9;
    counters["peak_GB/s"] = m.peak_bandwidth * 1e-9;
  }
  counters["share"] = vha::roofline_seconds(machine, cost.flops, cost.bytes) / m.seconds;
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
