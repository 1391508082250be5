// SPDX-License-Identifier: Apache-2.0
// expect: vha::absorb: the layer is in its absorbed form already
#include <vha/baselines/latent_attention.hpp>

auto serve(const vha::MlaAttention<float>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::absorb(vha::absorb(layer));
#else
  return vha::absorb(layer);
#endif
}
