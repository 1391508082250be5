// SPDX-License-Identifier: Apache-2.0
// The two maps by themselves, as they run in an unfolded layer: Premix on the physical heads, Postmix
// on the outputs of the heads.
#include <utility>

#include "ours.hpp"
#include "paper_work.hpp"

namespace {

using namespace bench;

/// The weights of a fresh layer: B = 0, so that Postmix, which works in place, can do so again and
/// again.
template <class S>
const auto& fresh_weights() {
  static const auto weights =
      vha::initialise_vha<S>(paper_layer.config, {.postmix_rank = paper_layer.postmix_rank})
          .weights();
  return weights;
}

/// Float activations, and maps stored as `S`.
template <class S>
Work premix(Index tokens, int threads) {
  const auto flops = vha::prefill_flops(paper_sizes, vha::LayerForm::unfolded, tokens).premix;
  const auto make = [=]() -> Task {
    struct State {
      Threads threads;
      vha::ProductWorkspace<float> workspace;
      std::vector<float> physical, heads;

      explicit State(int count) : threads(count) {}
    };
    const auto& c = paper_layer.config;
    const auto state = std::make_shared<State>(threads);
    state->physical = random_numbers<float>(tokens * paper_sizes.physical_width(), 1, 1);
    state->heads.resize(static_cast<std::size_t>(tokens * c.query_width()));
    state->workspace.executor = state->threads.executor();
    const auto run = [=] {
      fresh_weights<S>().premix(std::as_const(state->physical).data(),
                                vha::group_major_heads(state->heads.data(), tokens, c.kv_heads,
                                                       c.group_size(), c.head_dim),
                                state->workspace);
    };
    return {run, nullptr};
  };
  return {vha::text("premix/S:", tokens),
          element_of<S>,
          threads,
          {{"vha", {.flops = static_cast<double>(flops)}, make}}};
}

template <class S>
Work postmix(Index tokens, int threads) {
  const auto flops = vha::prefill_flops(paper_sizes, vha::LayerForm::unfolded, tokens).postmix;
  const auto& c = paper_layer.config;
  // It reads every head once: its bytes bound it, not its few multiply-adds.
  const Index bytes = vha::head_bytes(paper_sizes, tokens, sizeof(float));
  const auto make = [=]() -> Task {
    struct State {
      vha::Buffer<float> scratch;
      std::vector<float> heads;
    };
    const auto state = std::make_shared<State>();
    state->heads = random_numbers<float>(tokens * c.query_width(), 1, 1);
    const auto run = [=] {
      fresh_weights<S>().postmix(vha::token_major_heads(state->heads.data(), tokens, c.kv_heads,
                                                        c.group_size(), c.head_dim),
                                 state->scratch);
    };
    return {run, nullptr};
  };
  return {
      vha::text("postmix/S:", tokens),
      element_of<S>,
      threads,
      {{"vha", {.flops = static_cast<double>(flops), .bytes = static_cast<double>(bytes)}, make}}};
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [](const Options& options) {
    std::vector<Work> works;
    for (const int threads : options.threads) {
      for (const Index tokens : {1, 512, 2048}) {
        works.push_back(premix<float>(tokens, threads));
        if (threads == 1) works.push_back(postmix<float>(tokens, threads));  // the layer slices it
      }
    }
    return works;
  });
}
