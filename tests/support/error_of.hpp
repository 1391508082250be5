// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vha/core/error.hpp>

namespace support {

/// The text of the vha::Error that `call` throws.
std::string error_of(const auto& call) {
  try {
    call();
  } catch (const vha::Error& error) {
    return error.what();
  }
  return "no vha::Error";
}

}  // namespace support
