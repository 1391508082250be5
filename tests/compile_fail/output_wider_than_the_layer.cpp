// SPDX-License-Identifier: Apache-2.0
// expect: vha: the activations are wider than the layer computes in
#include <vha/attention/attention.hpp>

#ifdef VHA_COMPILE_FAIL
using Output = Eigen::MatrixXd;
#else
using Output = Eigen::MatrixXf;
#endif

void forward(const vha::GqaAttention<float>& layer, const Eigen::MatrixXf& x, Output& out,
             vha::GqaAttention<float>::Workspace& workspace) {
  layer.forward_into(x, out, workspace);
}
