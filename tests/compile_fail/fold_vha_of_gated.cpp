// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_vha: a gate stands between Postmix and W_O
// expect: use fold_premix
#include <vha/fold/fold_vha.hpp>

auto serve(const vha::VhaAttention<float, vha::SigmoidGate<float>>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::fold_vha(layer);
#else
  return vha::fold_premix(layer);
#endif
}
