// SPDX-License-Identifier: Apache-2.0
// expect: is not split over ranks as it is trained
// expect: vha::fold_vha
#include <vha/baselines/mfa_attention.hpp>
#include <vha/fold/fold_vha.hpp>
#include <vha/parallel/parallel_attention.hpp>

auto part(const vha::MfaAttention<float>& layer, vha::SingleProcess& alone) {
#ifdef VHA_COMPILE_FAIL
  return vha::ParallelAttention(layer, alone);
#else
  return vha::ParallelAttention(vha::fold_vha(layer), alone);
#endif
}
