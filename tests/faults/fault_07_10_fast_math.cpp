// SPDX-License-Identifier: Apache-2.0
// Fault: a library's care about infinities and NaN is gone once its user compiles with -ffast-math.
#include "fault_07_softmax.hpp"
#include "fault_10_unwritten_cache.hpp"

#ifndef __FAST_MATH__
#error "this source is to be compiled with -ffast-math"
#endif
