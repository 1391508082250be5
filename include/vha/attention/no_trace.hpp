// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vha/core/scalar.hpp>

namespace vha {

/// The trace of a layer that keeps nothing of its steps.
struct NoTrace {
  template <class Layer>
  void resize(const Layer&, Index, Index) {}
};

}  // namespace vha
