// SPDX-License-Identifier: Apache-2.0
// expect: vha: the output must be writable
#include <vha/attention/attention.hpp>

#ifdef VHA_COMPILE_FAIL
using Output = const vha::Tensor3<float>;
#else
using Output = vha::Tensor3<float>;
#endif

void forward(const vha::GqaAttention<float>& layer, const vha::Tensor3<float>& x, Output& out,
             vha::GqaAttention<float>::Workspace& workspace) {
  layer.forward_into(x, out, workspace);
}
