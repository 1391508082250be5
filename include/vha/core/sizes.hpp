// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <limits>
#include <span>
#include <string_view>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>

namespace vha {

/// How many pieces of `piece` hold `size`.
constexpr Index pieces(Index size, Index piece) {
  return (size + piece - 1) / piece;
}

/// The product of `sizes`. Throws Error naming `argument` where one is negative or the product does
/// not fit an Index.
inline Index checked_product(std::string_view argument, std::initializer_list<Index> sizes) {
  Index product = 1;
  for (const Index size : sizes) {
    if (size < 0) raise(argument, "sizes of 0 or more", text(size));
    if (size != 0 && product > std::numeric_limits<Index>::max() / size) {
      raise(argument, text("at most ", std::numeric_limits<Index>::max(), " elements"),
            "a product of sizes beyond that");
    }
    product *= size;
  }
  return product;
}

/// Throws Error naming `argument` unless `size` is 1 or more.
inline void require_positive(std::string_view argument, Index size) {
  if (size <= 0) raise(argument, "1 or more", text(size));
}

/// The `count` elements from `first` on.
template <class T>
std::span<T> part(std::span<T> span, Index first, Index count) {
  return span.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

/// Throws Error unless `actual` is `expected`.
inline void require_size(std::string_view argument, Index expected, Index actual) {
  if (actual != expected) raise(argument, text(expected), text(actual));
}

}  // namespace vha
