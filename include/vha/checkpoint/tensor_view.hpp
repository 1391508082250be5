// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>
#include <vha/checkpoint/dtype.hpp>

namespace vha::checkpoint {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and is used in place: a big-endian host would "
              "read every number wrong");
static_assert(sizeof(std::size_t) >= 8, "checkpoints are larger than a 32-bit address space");

/// A named tensor in row-major order over bytes that somebody else owns.
///
/// `data` need not be aligned for the element type: a header may have any length, so copy elements
/// out with std::memcpy and never cast the pointer.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;  ///< empty for a scalar
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

namespace detail {

/// Bytes of a tensor, or nothing if a dimension is negative or the size does not fit 63 bits.
///
/// Zero dimensions are left out of the product until the end, so that [2^40, 2^40, 0] is refused in
/// whatever order it is written: later stride arithmetic would overflow on it.
inline std::optional<std::uint64_t> tensor_bytes(Dtype dtype,
                                                 const std::vector<std::int64_t>& shape) {
  constexpr auto limit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t product = dtype_size(dtype);
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (product > limit / static_cast<std::uint64_t>(extent)) return std::nullopt;
    product *= static_cast<std::uint64_t>(extent);
  }
  return empty ? 0 : product;
}

/// "F32 [2, 3]".
inline std::string type_text(Dtype dtype, const std::vector<std::int64_t>& shape) {
  constexpr std::size_t most_shown = 16;
  std::string out = std::string(dtype_name(dtype)) + " [";
  for (std::size_t i = 0; i < std::min(shape.size(), most_shown); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return out + (shape.size() > most_shown ? ", ...]" : "]");
}

}  // namespace detail

}  // namespace vha::checkpoint
