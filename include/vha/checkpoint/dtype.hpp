// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace vha::checkpoint {

/// Element types of the format. Those of less than one byte (F4, F6) are unknown here.
enum class Dtype {
  boolean,
  u8,
  i8,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  i64,
  u64,
  f64,
};

namespace detail {

struct DtypeInfo {
  std::string_view name;
  std::size_t size;
};

/// In the order of Dtype.
inline constexpr std::array<DtypeInfo, 16> dtypes{{{"BOOL", 1},
                                                   {"U8", 1},
                                                   {"I8", 1},
                                                   {"F8_E4M3", 1},
                                                   {"F8_E5M2", 1},
                                                   {"F8_E8M0", 1},
                                                   {"I16", 2},
                                                   {"U16", 2},
                                                   {"F16", 2},
                                                   {"BF16", 2},
                                                   {"I32", 4},
                                                   {"U32", 4},
                                                   {"F32", 4},
                                                   {"I64", 8},
                                                   {"U64", 8},
                                                   {"F64", 8}}};
static_assert(dtypes.size() == static_cast<std::size_t>(Dtype::f64) + 1);

}  // namespace detail

/// The format's name of `dtype`, such as "BF16".
constexpr std::string_view dtype_name(Dtype dtype) {
  return detail::dtypes[static_cast<std::size_t>(dtype)].name;
}

/// Bytes per element.
constexpr std::size_t dtype_size(Dtype dtype) {
  return detail::dtypes[static_cast<std::size_t>(dtype)].size;
}

/// The type of that name, or nothing if the name is not exactly one of the format's.
constexpr std::optional<Dtype> parse_dtype(std::string_view name) {
  for (std::size_t i = 0; i < detail::dtypes.size(); ++i) {
    if (detail::dtypes[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

}  // namespace vha::checkpoint
