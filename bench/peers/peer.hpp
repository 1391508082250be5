// SPDX-License-Identifier: Apache-2.0
// What every other library is asked to do. One peer is one file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../harness.hpp"
#include "../operands.hpp"

namespace bench {

/// Queries that a peer attends with at once, where it is told how many: tokens, each with the heads of
/// a group. Of 4 to 128 the fastest for every peer, by little.
inline constexpr Index tile_tokens = 32;

/// A library that does the same work. A task packs weights and allocates when it is made; its runs
/// read the operands anew.
class Peer {
 public:
  virtual ~Peer() = default;

  virtual std::string name() const = 0;
  /// Its version, and the kernels that it chose where it tells.
  virtual std::string version() const = 0;
  virtual bool supports(Element element) const { return element == Element::float32; }

  virtual Task product(const ProductOperands<float>&) { return {}; }
  virtual Task product(const ProductOperands<bfloat16>&) { return {}; }
  virtual Task core(const CoreOperands<float>&) { return {}; }
  virtual Task core(const CoreOperands<bfloat16>&) { return {}; }
};

/// The peers that were found at configure time.
const std::vector<std::unique_ptr<Peer>>& peers();

/// A whole layer out of the peer's products and core, with the norm and RoPE between them in plain
/// Eigen.
template <class S>
Task composed_layer(Peer& peer, const LayerOperands<S>& operands);

/// The first contender's rivals that `options` wants: `make(peer)` gives each one's task.
template <class Make>
void add_peers(Work& work, const Options& options, const Cost& cost, const Make& make) {
  for (const auto& peer : peers()) {
    if (!peer->supports(work.element) || !options.wants(peer->name())) continue;
    work.contenders.push_back({peer->name(), cost, [make, p = peer.get()] { return make(*p); }});
  }
}

}  // namespace bench
