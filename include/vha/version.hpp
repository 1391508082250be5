// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace vha {

inline constexpr int version_major = 0;
inline constexpr int version_minor = 1;
inline constexpr int version_patch = 0;

}  // namespace vha
