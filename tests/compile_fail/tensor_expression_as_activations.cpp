// SPDX-License-Identifier: Apache-2.0
// expect: vha: the activations are an Eigen expression and stand nowhere in memory
// expect: or in a Tensor
#include <vha/attention/attention.hpp>

auto residual(const vha::GqaAttention<float>& layer, const vha::Tensor3<float>& x,
              const vha::Tensor3<float>& y) {
#ifdef VHA_COMPILE_FAIL
  return layer.forward(x + y);
#else
  const vha::Tensor3<float> sum = x + y;
  return layer.forward(sum);
#endif
}
