// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_vha: a layer that caches latents
// expect: vha::absorb
#include <vha/baselines/latent_attention.hpp>
#include <vha/fold/fold_vha.hpp>

auto serve(const vha::GvaAttention<float>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::fold_vha(layer);
#else
  return vha::absorb(layer);
#endif
}
