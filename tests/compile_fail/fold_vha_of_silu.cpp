// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_premix: an activation stands after Premix
#include <vha/fold/fold_vha.hpp>

#ifdef VHA_COMPILE_FAIL
using Layer = vha::VhaAttention<float, vha::NoGate, vha::Silu>;
#else
using Layer = vha::VhaAttention<float>;
#endif

auto serve(const Layer& layer) {
  return vha::fold_vha(layer);
}
