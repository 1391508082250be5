// SPDX-License-Identifier: Apache-2.0
#include "all_headers.hpp"

const int* other_version();

const int* other_version() { return &vha::version_major; }
