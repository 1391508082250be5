// SPDX-License-Identifier: Apache-2.0
// expect: vha: activations are a tensor of 3 dimensions
#include <vha/attention/attention.hpp>

#ifdef VHA_COMPILE_FAIL
using Tensor = vha::Tensor4<float>;
#else
using Tensor = vha::Tensor3<float>;
#endif

auto forward(const vha::GqaAttention<float>& layer, const Tensor& x) {
  return layer.forward(x);
}
