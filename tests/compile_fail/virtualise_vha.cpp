// SPDX-License-Identifier: Apache-2.0
// expect: vha::virtualise: the layer has Premix or Postmix: it is a VHA layer already
#include <vha/fold/virtualise.hpp>

auto warm_start(const vha::VhaAttention<float>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::virtualise(layer);
#else
  return vha::virtualise(vha::fold_vha(layer));
#endif
}
