// SPDX-License-Identifier: Apache-2.0
// The fold of all layers of the 1.7B model, float32 weights, summed in float64.
#include <memory>
#include <stdexcept>

#include "ours.hpp"
#include "paper_work.hpp"

namespace {

using namespace bench;

/// Each folded layer is dropped, as by a converter that writes it out. Layers of one model differ in
/// their numbers alone, so one stands for all.
Work fold(int threads) {
  const auto flops = paper_layer.layers * vha::fold_flops(paper_sizes);
  const auto make = [=]() -> Task {
    const auto layer =
        std::make_shared<const vha::VhaAttention<float>>(trained_layer(paper_layer).cast<float>());
    const auto pool = std::make_shared<Threads>(threads);
    return {[=] {
              for (Index i = 0; i < paper_layer.layers; ++i) {
                const auto folded = vha::fold_vha(*layer, pool->executor());
                if (folded.weights().query.out() == 0) throw std::logic_error("nothing folded");
              }
            },
            nullptr};
  };
  return {vha::text("fold/layers:", paper_layer.layers),
          Element::float64,
          threads,
          {{"vha", {.flops = static_cast<double>(flops)}, make}}};
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [](const Options& options) {
    std::vector<Work> works;
    for (const int threads : options.threads) works.push_back(fold(threads));
    return works;
  });
}
