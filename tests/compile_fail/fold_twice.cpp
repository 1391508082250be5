// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_vha: the layer has neither Premix nor Postmix: it was folded already
#include <vha/fold/fold_vha.hpp>

auto serve(const vha::VhaAttention<float>& layer) {
  auto served = vha::fold_vha(layer);
#ifdef VHA_COMPILE_FAIL
  return vha::fold_vha(served);
#else
  return served;
#endif
}
