// SPDX-License-Identifier: Apache-2.0
// Runs contenders on the same work in turn, holds their results against each other, and reports to
// Google Benchmark.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "machine.hpp"

namespace bench {

/// Something that was made ready to be run many times: all memory is there already.
struct Task {
  std::function<void()> run;
  std::function<void(float*)> copy_result;  ///< of the last run; empty: not to be compared

  explicit operator bool() const { return static_cast<bool>(run); }
};

/// What a piece of work takes at least, by the cost headers.
struct Cost {
  double flops = 0;
  double bytes = 0;  ///< that must be read; 0: the work is bound by its FLOPs
};

/// One library's, or one form's, way to do the work.
struct Contender {
  std::string name;
  Cost cost;
  std::function<Task()> make;
};

/// A piece of work and who does it. The first contender's result is what the others' are held
/// against.
struct Work {
  std::string name;  ///< as "prefill_core/S:2048"
  Element element;
  int threads;
  std::vector<Contender> contenders;
  std::size_t result_size = 0;
};

/// What the command line says.
struct Options {
  std::vector<int> threads;  ///< thread counts to run with
  int rounds = 5;            ///< runs of each contender, in turn; the median counts
  std::string peers;         ///< names, separated by commas; "all" or "none"

  bool wants(const std::string& peer) const;
};

/// A program's main: `add` lists its works. Flags besides Google Benchmark's own:
/// --threads=1,2 --rounds=5 --peers=all|none|eigen,openblas,…
int run_benchmarks(int argc, char** argv,
                   const std::function<std::vector<Work>(const Options&)>& list);

}  // namespace bench
