// SPDX-License-Identifier: Apache-2.0
#include "fault_18_eigen_in_user_code.hpp"
