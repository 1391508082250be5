// SPDX-License-Identifier: Apache-2.0
// Any bytes at all as a safetensors file: it opens, with all tensors within it, or vha::Error says why
// not.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vha/checkpoint/safetensors.hpp>
#include <vha/core/error.hpp>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = ::memfd_create("input", MFD_CLOEXEC);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<::ssize_t>(size)) {
    std::abort();
  }
  try {
    const vha::checkpoint::SafetensorsFile opened("/proc/self/fd/" + std::to_string(file));
    std::size_t bytes = 0;
    unsigned sum = 0;
    for (const auto& tensor : opened.tensors()) {
      for (std::size_t k = 0; k < tensor.bytes; ++k)
        sum += std::to_integer<unsigned>(tensor.data[k]);
      if (opened.find(tensor.name) != &tensor) std::abort();
      bytes += tensor.bytes;
    }
    if (bytes > size || (sum > 0 && bytes == 0)) std::abort();
  } catch (const vha::Error&) {
    // Refused, which is an answer.
  }
  return 0;
}
