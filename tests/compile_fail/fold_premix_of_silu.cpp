// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_premix: an activation stands after Premix
// expect: serve the layer as it is
#include <vha/fold/fold_vha.hpp>

// Postmix still folds.
auto serve(const vha::VhaAttention<float, vha::NoGate, vha::Silu>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::fold_premix(layer);
#else
  return vha::fold_postmix(layer);
#endif
}
