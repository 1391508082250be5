// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_premix: the layer has no Premix: it was folded already
#include <vha/fold/fold_vha.hpp>

auto serve(const vha::VhaAttention<float>& layer) {
  const auto half_way = vha::fold_premix(layer);
#ifdef VHA_COMPILE_FAIL
  return vha::fold_premix(half_way);
#else
  return vha::fold_postmix(half_way);
#endif
}
