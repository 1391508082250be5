// SPDX-License-Identifier: Apache-2.0
// expect: vha::Weight<S>::view: the pointer must be to S, to bytes, to void
#include <vha/core/weight.hpp>

// Both are of 2 bytes, but not the same bytes.
#ifdef VHA_COMPILE_FAIL
using Stored = vha::half;
#else
using Stored = vha::bfloat16;
#endif

vha::Weight<vha::bfloat16> weight(const Stored* data) {
  return vha::Weight<vha::bfloat16>::view_in_out(data, 4, 6);
}
