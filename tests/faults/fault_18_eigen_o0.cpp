// SPDX-License-Identifier: Apache-2.0
#include "fault_18_eigen_in_user_code.hpp"

#ifdef __OPTIMIZE__
#error "this source is to be compiled with -O0"
#endif
