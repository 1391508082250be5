// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <type_traits>
#include <unsupported/Eigen/CXX11/Tensor>
#include <vha/core/scalar.hpp>
#include <vha/core/view.hpp>

namespace vha {

template <class T>
using Tensor3 = Eigen::Tensor<T, 3, Eigen::RowMajor>;
template <class T>
using Tensor4 = Eigen::Tensor<T, 4, Eigen::RowMajor>;

/// The activations of a batch, `[batch, tokens, channels]`, in the caller's memory.
template <class T>
struct ActivationsView {
  T* data = nullptr;
  Index batch = 0;
  Index tokens = 0;
  Index channels = 0;
  Index batch_stride = 0;
  Index token_stride = 0;
  Index channel_stride = 1;

  T& operator()(Index row, Index token, Index channel) const {
    return data[row * batch_stride + token * token_stride + channel * channel_stride];
  }
};

namespace detail {

template <class X>
concept EigenMatrix = std::is_base_of_v<Eigen::MatrixBase<X>, X>;

template <class X>
concept EigenTensor = std::is_base_of_v<Eigen::TensorBase<X, Eigen::ReadOnlyAccessors>, X> ||
    std::is_base_of_v<Eigen::TensorBase<X, Eigen::WriteAccessors>, X>;

// An Eigen::TensorRef holds an expression; its data() is null.
template <class X>
inline constexpr bool is_tensor_ref = false;
template <class Plain>
inline constexpr bool is_tensor_ref<Eigen::TensorRef<Plain>> = true;

/// True for a matrix or a tensor that stands in memory, false for an expression of one.
template <class X>
constexpr bool stands_in_memory() {
  if constexpr (EigenMatrix<X>) {
    return (X::Flags & Eigen::DirectAccessBit) != 0;
  } else {
    return !is_tensor_ref<X> && requires(X x) {
      x.dimensions();
      x.data();
    };
  }
}

}  // namespace detail

/// What a layer takes: an Eigen matrix, map, block or Ref `[tokens, channels]` (one sequence), or a
/// Tensor or TensorMap `[batch, tokens, channels]`.
template <class X>
concept Activations =
    detail::EigenMatrix<std::remove_cvref_t<X>> || detail::EigenTensor<std::remove_cvref_t<X>>;

/// The view of `x`, in whatever storage order it is.
template <Activations X>
auto activations_view(X&& x) {
  using Plain = std::remove_cvref_t<X>;
  static_assert(
      detail::stands_in_memory<Plain>(),
      "vha: the activations are an Eigen expression and stand nowhere in memory; store it "
      "first, in a matrix (.eval()) or in a Tensor");
  using T = std::remove_pointer_t<decltype(x.data())>;
  static_assert(StorageScalar<std::remove_const_t<T>>,
                "vha: activations are of double, float, bfloat16 or half");
  if constexpr (detail::EigenMatrix<Plain>) {
    return ActivationsView<T>{x.data(),     1, x.rows(), x.cols(), x.size(), x.rowStride(),
                              x.colStride()};
  } else {
    static_assert(Plain::NumDimensions == 3,
                  "vha: activations are a tensor of 3 dimensions, [batch, tokens, channels]");
    const Index batch = x.dimension(0), tokens = x.dimension(1), channels = x.dimension(2);
    if constexpr (static_cast<int>(Plain::Layout) == static_cast<int>(Eigen::RowMajor)) {
      return ActivationsView<T>{x.data(), batch, tokens, channels, tokens * channels, channels, 1};
    } else {
      return ActivationsView<T>{x.data(), batch, tokens, channels, 1, batch, batch * tokens};
    }
  }
}

/// The heads of a tensor `[batch, tokens, heads, head_dim]`, `group_size` of them in each of
/// `heads / group_size` groups; its batch and tokens are one axis of the view.
template <class Tensor>
auto heads_view(Tensor& tensor, Index group_size = 1) {
  static_assert(detail::stands_in_memory<std::remove_const_t<Tensor>>(),
                "vha: the heads are a tensor expression and stand nowhere in memory; store it in a "
                "Tensor first");
  static_assert(
      Tensor::NumDimensions == 4 &&
          static_cast<int>(Tensor::Layout) == static_cast<int>(Eigen::RowMajor),
      "vha: heads are a row-major tensor of 4 dimensions, [batch, tokens, heads, head_dim]");
  return token_major_heads(tensor.data(), tensor.dimension(0) * tensor.dimension(1),
                           tensor.dimension(2) / group_size, group_size, tensor.dimension(3));
}

}  // namespace vha
