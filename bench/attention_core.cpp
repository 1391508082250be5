// SPDX-License-Identifier: Apache-2.0
// The attention core of the 1.7B layer: prefill, and decode from a cache in and beyond the
// processor's own.
#include "ours.hpp"
#include "paper_work.hpp"
#include "peers/peer.hpp"

namespace {

using namespace bench;

template <class S>
void add(const Options& options, int threads, std::vector<Work>& works) {
  for (const Index tokens : {512, 2048, 4096}) {
    works.push_back(
        core_work<S>(options, vha::text("prefill_core/S:", tokens), 1, tokens, tokens, threads));
  }
  for (const Index cached : {4096, 32768}) {
    works.push_back(
        core_work<S>(options, vha::text("decode_core/T:", cached), 1, 1, cached, threads));
  }
  // 512 MiB of float, 256 of bf16.
  works.push_back(core_work<S>(options, "decode_core/B:4/T:65536", 4, 1, 65536, threads));
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [](const Options& options) {
    std::vector<Work> works;
    for (const int threads : options.threads) {
      add<float>(options, threads, works);
      add<bfloat16>(options, threads, works);
    }
    return works;
  });
}
