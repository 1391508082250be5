// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vha/attention/workspace.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>
#include <vha/ops/rms_norm.hpp>
#include <vha/ops/rope.hpp>

namespace vha::detail {

/// A layer's QK-norm, where it has one, and its RoPE, of queries or keys in place.
template <StorageScalar S, ComputeScalar T>
void norm_and_rope(const Weight<S>& norm, double eps, const Rope<T>& rope,
                   const HeadsView<T>& heads, std::span<const Position> positions,
                   AttentionWorkspace<T>& workspace) {
  workspace.for_each_slice(heads.tokens, [&](Index first, Index count, Buffer<T>& scratch) {
    const auto slice = heads.slice(first, count);
    if (!norm.empty()) RmsNorm<S>{norm, eps}(slice, scratch);
    rope(slice, part(positions, first, count), scratch);
  });
}

}  // namespace vha::detail
