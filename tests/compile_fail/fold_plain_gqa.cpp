// SPDX-License-Identifier: Apache-2.0
// expect: vha::fold_vha: the layer has neither Premix nor Postmix
// expect: a plain GQA layer
#include <vha/fold/fold_vha.hpp>

// What a plain layer is asked for in place of a fold: another storage.
auto serve(const vha::GqaAttention<float>& layer) {
#ifdef VHA_COMPILE_FAIL
  return vha::fold_vha<vha::bfloat16>(layer);
#else
  return layer.cast<vha::bfloat16>();
#endif
}
