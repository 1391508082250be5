// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs of a layer, each into memory that was NaN before.

#include <limits>
#include <type_traits>
#include <vha/vha.hpp>

#include "tolerance.hpp"

namespace laws {

template <class X>
using ScalarOf = std::remove_const_t<typename X::Scalar>;

/// A row-major matrix or tensor of NaN, of the shape of `x`.
template <class X>
auto poisoned_like(const X& x) {
  using T = ScalarOf<X>;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  if constexpr (vha::detail::EigenMatrix<X>) {
    return vha::RowMajorMatrix<T>(vha::RowMajorMatrix<T>::Constant(x.rows(), x.cols(), nan));
  } else {
    vha::Tensor3<T> out(x.dimension(0), x.dimension(1), x.dimension(2));
    out.setConstant(nan);
    return out;
  }
}

/// The outputs of `layer` for `x`.
template <class Layer, class X>
Array run(const Layer& layer, const X& x, const vha::TokenLayout& layout = {},
          typename Layer::Trace* trace = nullptr) {
  auto out = poisoned_like(x);
  typename Layer::Workspace workspace;
  layer.forward_into(x, out, workspace, layout, trace);
  return array_of(out);
}

/// The same behind the tokens in `cache`; `layer` may be a PrefillDecode.
template <class Layer, class X, class C>
Array run(const Layer& layer, const X& x, vha::KvCache<C>& cache,
          const vha::TokenLayout& layout = {}) {
  auto out = poisoned_like(x);
  typename Layer::Workspace workspace;
  layer.forward_into(x, cache, out, workspace, layout);
  return array_of(out);
}

/// The outputs for `x` fed to `cache` in chunks of these sizes, one below the other.
template <class Layer, class X, class C>
Array run_in_chunks(const Layer& layer, const X& x, vha::KvCache<C>& cache,
                    const std::vector<Eigen::Index>& chunks) {
  Array outputs{{0, x.cols()}, {}};
  for (const Eigen::Index size : chunks) {
    const Array part = run(layer, x.middleRows(outputs.shape[0], size), cache);
    outputs.values.insert(outputs.values.end(), part.values.begin(), part.values.end());
    outputs.shape[0] += size;
  }
  return outputs;
}

inline Array first_rows(const Array& array, Eigen::Index rows) {
  const auto end = array.values.begin() + rows * array.shape[1];
  return {{rows, array.shape[1]}, {array.values.begin(), end}};
}

}  // namespace laws
