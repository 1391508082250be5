// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <vha/vha.hpp>

int main() {
  std::printf("vha %d.%d.%d\n", vha::version_major, vha::version_minor, vha::version_patch);
  return 0;
}
