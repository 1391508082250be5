// SPDX-License-Identifier: Apache-2.0
// With other.cpp: a function in a header that is not inline is defined twice and does not link, and
// a variable that is not inline has two addresses.
#include "all_headers.hpp"

const int* other_version();

int main() { return other_version() == &vha::version_major ? 0 : 1; }
