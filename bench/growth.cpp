// SPDX-License-Identifier: Apache-2.0
// How the time per token grows with the context, 1K to 64K tokens: decode of one token, and prefill
// of the last block of a prompt, in the blocks in which a layer takes it. Both ought to be straight
// lines. compare.py draws them.
#include "ours.hpp"
#include "paper_work.hpp"

namespace {

using namespace bench;

constexpr Index prefill_block = 512;

template <class S>
void add(const Options& options, int threads, std::vector<Work>& works) {
  for (Index context = 1024; context <= 65536; context *= 2) {
    works.push_back(
        core_work<S>(options, vha::text("growth_decode/T:", context), 1, 1, context, threads));
    works.push_back(core_work<S>(options, vha::text("growth_prefill/T:", context), 1, prefill_block,
                                 context, threads));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [](const Options& given) {
    Options options = given;
    options.peers = "none";
    std::vector<Work> works;
    for (const int threads : options.threads) {
      add<float>(options, threads, works);
      add<bfloat16>(options, threads, works);
    }
    return works;
  });
}
