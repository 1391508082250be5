// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <string_view>
#include <vector>
#include <vha/attention/postmix.hpp>
#include <vha/attention/premix.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/ops/linear.hpp>
#include <vha/ops/matrix_product.hpp>

// The fold of single weights. Products are summed in double, whatever they are stored in, and
// rounded once.

namespace vha {

namespace detail {

/// Writes `count` products, rounded, to `target`. Throws Error where one is not finite, or becomes
/// so; the message places it at `[row, col + k]` of the weight `name`.
template <StorageScalar To>
void store_rounded(std::string_view name, const double* products, Index count, To* target,
                   Index row, Index col) {
  for (Index k = 0; k < count; ++k) target[k] = convert<To>(products[k]);
  unsigned not_finite = 0;  // not a bool: g++ vectorises this
  for (Index k = 0; k < count; ++k) not_finite |= is_finite(target[k]) ? 0U : 1U;
  if (not_finite == 0) return;
  const Index k = std::find_if_not(target, target + count, is_finite<To>) - target;
  raise(text("folded ", name), "finite products in the range of their stored type",
        text(products[k], " at ", shape_text(row, col + k)));
}

/// One thread's buffers.
struct FoldMemory {
  Buffer<double> wide, products;
  ProductWorkspace<double> product;
};

}  // namespace detail

/// The fold of Premix into rows of the query projection `[rows, H' * physical_head_dim]`:
/// `[rows, G * H' * head_dim]`, where block `g·H' + i` is W_Q^(i)·P_g, stored as `To`. Throws Error
/// naming `name` where a product is not finite.
/// Precondition: the maps have one shape, and it fits the projection.
template <StorageScalar To, StorageScalar S, StorageScalar P>
RowMajorMatrix<To> folded_query(std::string_view name, const Weight<S>& query,
                                const std::vector<Weight<P>>& maps, const Executor& executor = {}) {
  const Index groups = static_cast<Index>(maps.size());
  const Index physical_head_dim = maps.front().rows();
  const Index head_dim = maps.front().cols();
  const Index heads = query.cols() / physical_head_dim;
  const Index group_width = heads * head_dim;
  RowMajorMatrix<To> folded(query.rows(), groups * group_width);

  // A block of rows [rows, H' * physical_head_dim] is at the same time [rows * H',
  // physical_head_dim], so that one product with P_g folds all its heads.
  static constexpr Index row_block = 64;
  std::vector<detail::FoldMemory> thread_memory(static_cast<std::size_t>(executor.threads()));
  executor.for_each(pieces(query.rows(), row_block), [&](Index task, Index thread) {
    auto& memory = thread_memory[static_cast<std::size_t>(thread)];
    const Index row = task * row_block;
    const Index rows = std::min(row_block, query.rows() - row);
    double* const wide = memory.wide.reserve(rows * query.cols());
    double* const products = memory.products.reserve(rows * group_width);
    copy_elements(query.view().block(row, 0, rows, query.cols()), wide);
    const auto blocks =
        row_major_view<double>(wide, rows * heads, physical_head_dim, physical_head_dim);
    for (Index group = 0; group < groups; ++group) {
      multiply(blocks, maps[static_cast<std::size_t>(group)].view(), products, head_dim, false,
               memory.product);
      for (Index i = 0; i < rows; ++i) {
        const Index col = group * group_width;
        detail::store_rounded(name, products + i * group_width, group_width, &folded(row + i, col),
                              row + i, col);
      }
    }
  });
  return folded;
}

/// The fold of Postmix into the output projection `[heads * head_dim, hidden]`: block `j` is
/// Σ_i M[i,j] · (block i of W_O), for M `[heads, heads]`, stored as `To`. Throws Error naming
/// `name` where a product is not finite. Precondition: the projection has a block of rows for each
/// head.
template <StorageScalar To, StorageScalar S>
RowMajorMatrix<To> folded_output(std::string_view name, const Weight<S>& output,
                                 const RowMajorMatrix<double>& mixing,
                                 const Executor& executor = {}) {
  const Index heads = mixing.rows();
  const Index head_dim = output.rows() / heads;
  RowMajorMatrix<To> folded(output.rows(), output.cols());

  // Row c of every head's block, one under the other, is a matrix [heads, hidden] that Mᵀ
  // multiplies.
  const auto mixing_transposed = row_major_view(mixing.data(), heads, heads, heads).transposed();
  struct Memory : detail::FoldMemory {
    Buffer<S> rows;
  };
  static constexpr Index channel_block = 16;
  std::vector<Memory> thread_memory(static_cast<std::size_t>(executor.threads()));
  executor.for_each(pieces(head_dim, channel_block), [&](Index task, Index thread) {
    auto& memory = thread_memory[static_cast<std::size_t>(thread)];
    double* const products = memory.products.reserve(heads * output.cols());
    const Index first = task * channel_block;
    const Index channels = std::min(channel_block, head_dim - first);
    const auto block = [&](Index head) {
      return output.view().block(head * head_dim + first, 0, channels, output.cols());
    };
    // [heads, channels, hidden]; where rows lie across the memory, laid out along it.
    MatrixView<S> all = block(0);
    Index head_stride = head_dim * all.row_stride;
    if (all.col_stride != 1) {
      S* const rows = memory.rows.reserve(heads * channels * output.cols());
      head_stride = channels * output.cols();
      for (Index head = 0; head < heads; ++head) {
        copy_elements(block(head), rows + head * head_stride);
      }
      all = row_major_view(rows, channels, output.cols(), output.cols());
    }
    for (Index channel = 0; channel < channels; ++channel) {
      const MatrixView<S> rows{all.address(channel, 0), heads, all.cols, head_stride, 1};
      multiply(mixing_transposed, rows, products, output.cols(), false, memory.product);
      for (Index head = 0; head < heads; ++head) {
        const Index row = head * head_dim + first + channel;
        detail::store_rounded(name, products + head * output.cols(), output.cols(), &folded(row, 0),
                              row, 0);
      }
    }
  });
  return folded;
}

/// The query projection with Premix in it, `[hidden, G * H' * head_dim]`; a bias folds as a row.
/// Throws Error where shapes do not fit or a product is not finite.
template <StorageScalar To, StorageScalar S, Activation A>
Linear<To> fold_premix(const Linear<S>& query, const Premix<S, A>& premix,
                       const Executor& executor = {}) {
  static_assert(std::same_as<A, Identity>,
                "vha::fold_premix: an activation stands after Premix, so its map is not linear and "
                "does not fold into W_Q; serve the layer as it is");
  if (premix.maps.empty()) raise("premix.maps", "a map for each of kv_heads", "none");
  premix.require_shape(premix.kv_heads(), premix.maps.front().cols());
  const Index physical_head_dim = premix.physical_head_dim();
  if (physical_head_dim == 0 || query.out() == 0 || query.out() % physical_head_dim != 0) {
    raise("query.weight",
          text("a positive multiple of ", physical_head_dim, " (Premix's input width) columns"),
          shape_text(query.in(), query.out()));
  }
  Linear<To> folded;
  folded.weight =
      Weight<To>::own(folded_query<To>("query.weight", query.weight, premix.maps, executor));
  if (!query.bias.empty()) {
    require_vector("query.bias", query.bias, query.out());
    folded.bias = Weight<To>::own(folded_query<To>("query.bias", query.bias, premix.maps));
  }
  return folded;
}

/// The output projection with Postmix in it, of the same shape; its bias stays.
/// Throws Error where shapes do not fit or a product is not finite.
template <StorageScalar To, StorageScalar S, Activation A>
Linear<To> fold_postmix(const Linear<S>& output, const Postmix<S, A>& postmix,
                        const Executor& executor = {}) {
  static_assert(std::same_as<A, Identity>,
                "vha::fold_postmix: an activation stands between Postmix and W_O, so Postmix does "
                "not fold; serve the layer as it is");
  postmix.require_shape(postmix.a.rows());
  if (output.in() == 0 || output.in() % postmix.a.rows() != 0) {
    raise("output.weight", text("a positive multiple of ", postmix.a.rows(), " (query heads) rows"),
          shape_text(output.in(), output.out()));
  }
  return {
      Weight<To>::own(folded_output<To>("output.weight", output.weight, postmix.dense(), executor)),
      output.bias.template cast<To>()};
}

}  // namespace vha
