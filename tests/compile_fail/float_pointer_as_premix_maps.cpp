// SPDX-License-Identifier: Apache-2.0
// expect: vha::Weight<S>::view: the pointer must be to S, to bytes, to void
#include <vha/attention/premix.hpp>

#ifdef VHA_COMPILE_FAIL
using Stored = vha::bfloat16;
#else
using Stored = float;
#endif

auto maps(const float* tensor) {
  return vha::view_premix_maps<Stored>(tensor, 2, 4, 4);
}
