// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vha/checkpoint/tensor_view.hpp>

namespace support {

inline std::string data_of(const vha::checkpoint::TensorView& tensor) {
  return {reinterpret_cast<const char*>(tensor.data), tensor.bytes};
}

}  // namespace support
