// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_postmix: an activation stands between Postmix and W_O
// expect: serve the layer as it is
#include <vha/fold/fold_vha.hpp>

// Premix still folds.
auto serve(const vha::VhaAttention<float, vha::NoGate, vha::Identity, vha::Silu>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::fold_postmix(layer);
#else
  return vha::fold_premix(layer);
#endif
}
