// SPDX-License-Identifier: Apache-2.0
// expect: vha::Attention: HeadDim must be even and positive, or Eigen::Dynamic
#include <vha/attention/attention.hpp>

#ifdef VHA_COMPILE_FAIL
constexpr int head_dim = 63;
#else
constexpr int head_dim = 64;
#endif

auto forward(const vha::GqaAttention<float, vha::NoGate, head_dim>& layer,
             const Eigen::MatrixXf& x) {
  return layer.forward(x);
}
