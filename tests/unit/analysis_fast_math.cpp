// SPDX-License-Identifier: Apache-2.0
// Singular values, and the care about infinities and NaN, under -ffast-math.
#include "postmix_analysis_test.cpp"
#include "premix_analysis_test.cpp"

#ifndef __FAST_MATH__
#error "this source is to be compiled with -ffast-math"
#endif
