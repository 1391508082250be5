// SPDX-License-Identifier: Apache-2.0
// expect: vha: the activations are an Eigen expression and stand nowhere in memory
// expect: store it first, in a matrix
#include <vha/attention/attention.hpp>

auto residual(const vha::GqaAttention<float>& layer, const Eigen::MatrixXf& x,
              const Eigen::MatrixXf& y) {
#ifdef VHA_COMPILE_FAIL
  return layer.forward(x + y);
#else
  return layer.forward((x + y).eval());
#endif
}
