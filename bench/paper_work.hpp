// SPDX-License-Identifier: Apache-2.0
// Work on the paper's 1.7B layer that more than one program measures.
#pragma once

#include <string>
#include <utility>

#include "ours.hpp"
#include "peers/peer.hpp"
#include "trained_layer.hpp"

namespace bench {

inline constexpr const PaperShape& paper_layer = paper_shapes[1];
inline constexpr vha::LayerSizes paper_sizes =
    vha::LayerSizes::of(paper_layer.config, paper_layer.postmix_rank);

/// The core over the newest `tokens` of `keys` tokens in each of `batch` sequences. One token is
/// decode, bound by the cache's bytes too.
template <class S>
Work core_work(const Options& options, std::string name, Index batch, Index tokens, Index keys,
               int threads) {
  const auto& c = paper_layer.config;
  struct Memory {
    std::vector<S> query, key, value;
    Results<S> results;
  };
  const Lazy<Memory> memory([=] {
    const Index queries = batch * tokens * c.query_width(), cached = batch * keys * c.kv_width();
    // Queries large enough for the softmax to have peaks.
    return Memory{random_numbers<S>(queries, 4, 1),
                  random_numbers<S>(cached, 1, 2),
                  random_numbers<S>(cached, 1, 3),
                  {}};
  });
  const auto operands = [=] {
    Memory& m = *memory;
    return CoreOperands<S>{batch,
                           tokens,
                           keys,
                           keys,
                           c.kv_heads,
                           c.group_size(),
                           c.head_dim,
                           m.query.data(),
                           m.key.data(),
                           m.value.data(),
                           m.results.add(batch * tokens * c.query_width()),
                           threads};
  };
  const Index pairs = vha::visible_pairs(tokens, keys - tokens);
  const auto bytes =
      vha::decode_bytes(paper_sizes, vha::LayerForm::folded, keys, sizeof(S), sizeof(S), batch);
  const Cost cost{.flops = static_cast<double>(batch * vha::core_flops(paper_sizes, pairs)),
                  .bytes = tokens == 1 ? static_cast<double>(bytes.cache) : 0};
  Work work{std::move(name),
            element_of<S>,
            threads,
            {},
            static_cast<std::size_t>(batch * tokens * c.query_width())};
  work.contenders.push_back({"vha", cost, [=] { return our_core(operands()); }});
  add_peers(work, options, cost, [=](Peer& peer) { return peer.core(operands()); });
  return work;
}

}  // namespace bench
