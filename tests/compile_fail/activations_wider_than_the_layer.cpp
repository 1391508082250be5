// SPDX-License-Identifier: Apache-2.0
// expect: vha: the activations are wider than the layer computes in
// expect: use a layer of double, or convert them to float first
#include <vha/attention/attention.hpp>

auto forward(const vha::GqaAttention<vha::bfloat16>& layer, const Eigen::MatrixXd& x) {
#ifdef VHA_COMPILE_FAIL
  return layer.forward(x);
#else
  return layer.forward(x.cast<float>().eval());
#endif
}
