// SPDX-License-Identifier: Apache-2.0
// expect: vha::Weight<S>::view: the pointer must be to S, to bytes, to void
// expect: name the stored scalar as S
#include <cstdint>
#include <vha/core/weight.hpp>

vha::Weight<vha::bfloat16> bits(const std::uint16_t* data) {
  return vha::Weight<vha::bfloat16>::view_out_in(data, 4, 6);
}

#ifdef VHA_COMPILE_FAIL
vha::Weight<vha::bfloat16> weight(const float* data) {
  return vha::Weight<vha::bfloat16>::view_out_in(data, 4, 6);
}
#else
vha::Weight<float> weight(const float* data) {
  return vha::Weight<float>::view_out_in(data, 4, 6);
}
#endif
