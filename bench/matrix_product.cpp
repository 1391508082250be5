// SPDX-License-Identifier: Apache-2.0
// The matrix product of the projections, 2048³, float32 and bf16.
#include "ours.hpp"
#include "peers/peer.hpp"

namespace {

using namespace bench;

constexpr Index size = 2048;

template <class S>
Work product(const Options& options, int threads) {
  struct Memory {
    std::vector<S> a = random_numbers<S>(size * size, 1, 1);
    std::vector<S> b = random_numbers<S>(size * size, 1, 2);
    Results<S> results;
  };
  const Lazy<Memory> memory([] { return Memory(); });
  const auto operands = [=] {
    return ProductOperands<S>{size,
                              size,
                              size,
                              (*memory).a.data(),
                              (*memory).b.data(),
                              (*memory).results.add(size * size),
                              threads};
  };
  const Cost cost{.flops = static_cast<double>(vha::product_flops(size, size, size))};
  Work work{"matrix_product/2048", element_of<S>, threads, {}, size * size};
  work.contenders.push_back({"vha", cost, [=] { return our_product(operands()); }});
  add_peers(work, options, cost, [=](Peer& peer) { return peer.product(operands()); });
  return work;
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [](const Options& options) {
    std::vector<Work> works;
    for (const int threads : options.threads) {
      works.push_back(product<float>(options, threads));
      works.push_back(product<bfloat16>(options, threads));
    }
    return works;
  });
}
