// SPDX-License-Identifier: Apache-2.0
// The README's first example.

#include <iostream>
#include <vha/vha.hpp>

int main() {
  // The paper's 1.7B layer: 8 physical query heads, 2 K/V heads, so 16 virtual query heads.
  const vha::AttentionConfig config{
      .hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .rope_theta = 1e6};
  // Your trained weights go here; a fresh layer has B = 0, so take any Postmix to see it fold.
  vha::VhaAttention<float> layer = vha::initialise_vha<float>(config);
  auto weights = layer.weights();
  weights.postmix.b = vha::RowMajorMatrix<float>::Random(16, 4);
  layer = {config, weights};

  // One call: what is served is stock grouped-query attention, with no maps and no new kernel.
  const vha::GqaAttention<float> served = vha::fold_vha(layer);

  // Prefill 31 tokens, then decode one, over a cache that holds 2 K/V heads per token.
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Random(32, 2048);
  vha::KvCache<vha::bfloat16> kv_cache(config, /*batch=*/1, /*capacity=*/4096);
  served.forward(x.topRows(31), kv_cache);
  const auto last = served.forward(x.bottomRows(1), kv_cache);

  std::cout << "output of the last token: " << last.leftCols(3) << " ...\n"
            << "cache per token:          " << kv_cache.bytes_per_token() << " bytes\n"
            << "largest difference between the trained layer and the served one, of the largest\n"
            << "output: " << vha::fold_report(layer, served, x).largest_difference << '\n';
}
