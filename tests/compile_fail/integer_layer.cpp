// SPDX-License-Identifier: Apache-2.0
// expect: constraint
// expect: StorageScalar
#include <vha/attention/attention.hpp>

#ifdef VHA_COMPILE_FAIL
using Layer = vha::VhaAttention<int>;
#else
using Layer = vha::VhaAttention<vha::half>;
#endif

auto forward(const Layer& layer, const Eigen::MatrixXf& x) {
  return layer.forward(x);
}
