// SPDX-License-Identifier: Apache-2.0
// A forward of the whole 1.7B layer, prefill and decode: the folded layer against the peers, beside
// it the unfolded forms of the same layer and the GQA layer of 8 K/V heads that VHA replaces.
#include <algorithm>
#include <memory>

#include "ours.hpp"
#include "paper_work.hpp"
#include "peers/peer.hpp"

namespace {

using namespace bench;
using vha::LayerForm;

template <class S>
using Vha = vha::VhaAttention<S>;
template <class S>
using Gqa = vha::GqaAttention<S>;

constexpr vha::AttentionConfig gqa_8_config = [] {
  vha::AttentionConfig config = paper_layer.config;
  config.kv_heads = 8;
  return config;
}();

/// A fresh GQA layer of 8 K/V heads.
template <class S>
auto make_gqa_8() {
  const auto& c = gqa_8_config;
  const auto matrix = [](Index rows, Index cols, std::uint32_t seed) {
    const auto numbers = random_numbers<S>(rows * cols, 0.03F, seed);
    return vha::Weight<S>(Eigen::Map<const vha::RowMajorMatrix<S>>(numbers.data(), rows, cols));
  };
  const vha::Weight<S> norm =
      vha::RowMajorMatrix<S>::Constant(1, c.head_dim, vha::convert<S>(1.0F));
  return Gqa<S>(c, {.query = {matrix(c.hidden, c.query_width(), 1)},
                    .key = {matrix(c.hidden, c.kv_width(), 2)},
                    .value = {matrix(c.hidden, c.kv_width(), 3)},
                    .output = {matrix(c.query_width(), c.hidden, 4)},
                    .q_norm = norm,
                    .k_norm = norm});
}

/// One set of weights in every form, as ours and as the peers read them.
template <class S>
struct Layers {
  Vha<S> unfolded;
  decltype(fold_postmix(unfolded)) unfolded_premix = fold_postmix(unfolded);
  Gqa<S> folded = fold_vha(unfolded);
  Gqa<S> gqa_8 = make_gqa_8<S>();
  vha::RowMajorMatrix<S> qkv, output;
  vha::RowMajorMatrix<float> norms;

  explicit Layers(const Vha<S>& layer) : unfolded(layer) {
    const auto& w = folded.weights();
    qkv.resize(w.query.in(), w.query.out() + w.key.out() + w.value.out());
    qkv << w.query.weight.template to<S>(), w.key.weight.template to<S>(),
        w.value.weight.template to<S>();
    output = w.output.weight.template to<S>();
    norms.resize(2, folded.config().head_dim);
    norms << w.q_norm.template to<float>(), w.k_norm.template to<float>();
  }

  /// Made once: its random numbers take longer than most of the runs.
  static const Layers& get() {
    static const Layers layers = [] {
      const auto trained = trained_layer(paper_layer).template cast<S>();
      return Layers(trained);
    }();
    return layers;
  }
};

/// `tokens` new tokens behind `cached` ones.
template <class S>
Work layer_work(const Options& options, std::string name, Index tokens, Index cached, int threads) {
  struct Memory {
    std::vector<S> x, key, value;
  };
  const auto& c = paper_layer.config;
  const Lazy<Memory> memory([=] {
    // As many as the layer with the most K/V heads needs.
    const Index in_cache = std::max<Index>(1, cached) * gqa_8_config.kv_width();
    return Memory{random_numbers<S>(tokens * c.hidden, 1, 1), random_numbers<S>(in_cache, 1, 2),
                  random_numbers<S>(in_cache, 1, 3)};
  });
  const auto operands = [=] {
    const auto& layers = Layers<S>::get();
    const Memory& m = *memory;
    return LayerOperands<S>{c,
                            tokens,
                            cached,
                            m.x.data(),
                            layers.qkv.data(),
                            layers.output.data(),
                            layers.norms.data(),
                            m.key.data(),
                            m.value.data(),
                            threads};
  };
  const auto cost = [=](const vha::LayerSizes& sizes, LayerForm form) {
    const auto flops = vha::layer_flops(sizes, form, tokens, cached).total();
    const auto bytes = vha::decode_bytes(sizes, form, cached, sizeof(S), sizeof(S)).total();
    return Cost{static_cast<double>(flops), tokens == 1 ? static_cast<double>(bytes) : 0};
  };
  Work work{
      std::move(name), element_of<S>, threads, {}, static_cast<std::size_t>(tokens * c.hidden)};
  const auto folded = cost(paper_sizes, LayerForm::folded);
  work.contenders.push_back(
      {"vha", folded, [=] { return our_layer(Layers<S>::get().folded, operands()); }});
  add_peers(work, options, folded, [=](Peer& peer) { return composed_layer<S>(peer, operands()); });
  work.contenders.push_back(
      {"vha_unfolded_premix", cost(paper_sizes, LayerForm::unfolded_premix),
       [=] { return our_layer(Layers<S>::get().unfolded_premix, operands()); }});
  work.contenders.push_back({"vha_unfolded", cost(paper_sizes, LayerForm::unfolded),
                             [=] { return our_layer(Layers<S>::get().unfolded, operands()); }});
  work.contenders.push_back(
      {"gqa_8", cost(vha::LayerSizes::of(gqa_8_config), LayerForm::folded), [=] {
         Task task = our_layer(Layers<S>::get().gqa_8, operands());
         task.copy_result = nullptr;  // another layer
         return task;
       }});
  return work;
}

template <class S>
void add(const Options& options, int threads, std::vector<Work>& works) {
  for (const Index tokens : {512, 2048}) {
    works.push_back(
        layer_work<S>(options, vha::text("prefill_layer/S:", tokens), tokens, 0, threads));
  }
  works.push_back(layer_work<S>(options, "decode_layer/T:4096", 1, 4096, threads));
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
