// SPDX-License-Identifier: Apache-2.0
// What a consumer does: a layer over weights of its own, folded and run.
#include <cstdio>
#include <vector>
#include <vha/vha.hpp>

int main() {
  const vha::AttentionConfig config{.hidden = 6, .head_dim = 4, .query_heads = 4, .kv_heads = 2};
  std::vector<float> bytes(6 * 16);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = 0.1F * static_cast<float>(i % 7) - 0.2F;
  using Weight = vha::Weight<float>;
  const vha::VhaAttention<float> layer(
      config, {.query = {Weight::view_in_out(bytes.data(), 6, 8)},
               .key = {Weight::view_out_in(bytes.data(), 6, 8)},
               .value = {Weight::view_out_in(bytes.data() + 1, 6, 8)},
               .output = {Weight::view_in_out(bytes.data(), 16, 6)},
               .premix = {vha::view_premix_maps<float>(bytes.data() + 2, 2, 4, 4)},
               .postmix = {Weight::view_in_out(bytes.data() + 3, 4, 2),
                           Weight::view_in_out(bytes.data() + 5, 4, 2)}});
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Identity(5, 6);
  const double difference = vha::fold_report(layer, vha::fold_vha(layer), x).largest_difference;
  std::printf("vha %d.%d.%d: fold exact to %.1e\n", vha::version_major, vha::version_minor,
              vha::version_patch, difference);
  return difference < 1e-5 ? 0 : 1;
}
