// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vha/vha.hpp>

namespace train {

/// What a weight is, by which it is stored and trained.
enum class Role {
  embedding,   ///< `[vocabulary, hidden]`
  projection,  ///< `[in, out]`; stored as `[out, in]`
  norm,        ///< `[1, channels]`; stored as `[channels]`
  premix,      ///< one of the K/V heads' maps, stored together as `[kv_heads, d, d]`
  postmix,     ///< `[query_heads, rank]`
};

inline bool is_map(Role role) {
  return role == Role::premix || role == Role::postmix;
}

/// A weight in training.
template <class T>
struct Parameter {
  std::string name;  ///< that of the checkpoint's tensor
  Role role;
  vha::Index map = 0;  ///< of a Premix, which of the K/V heads' maps
  vha::RowMajorMatrix<T> value;
};

}  // namespace train
