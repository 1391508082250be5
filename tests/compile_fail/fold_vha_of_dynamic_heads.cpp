// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_vha: the maps between this layer's heads
// expect: serve the layer as it is trained
#include <vha/baselines/dynamic_heads.hpp>
#include <vha/fold/fold_vha.hpp>

auto serve(const vha::DynamicHeadsAttention<float>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::fold_vha(layer);
#else
  return layer;
#endif
}
