// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <concepts>
#include <cstddef>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>

namespace vha {

template <class T>
using RowMajorMatrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// A trained matrix, `[in, out]` for a projection, or vector, `[1, size]`. Either it views memory
/// of the caller's, which must then live as long as the weight and its copies, or it holds a matrix
/// of its own, which its copies share. It is never written to.
///
///     Weight<float> copied = some_eigen_matrix;
///     auto hugging_face = Weight<bfloat16>::view_out_in(bytes, in, out);  // nn.Linear.weight
///     auto paddle       = Weight<bfloat16>::view_in_out(bytes, in, out);
template <StorageScalar S>
class Weight {
 public:
  using Scalar = S;

  /// No weight, as an absent bias.
  Weight() = default;
  // Without moves of its own: a weight that was moved from stays what it was.
  Weight(const Weight&) = default;
  Weight& operator=(const Weight&) = default;

  /// A copy of `matrix`; a column vector becomes `[1, size]`.
  template <class Derived>
  requires std::same_as<typename Derived::Scalar, S> Weight(
      const Eigen::MatrixBase<Derived>& matrix) {  // NOLINT: a matrix serves as a weight
    *this = own(matrix);
    if (Derived::ColsAtCompileTime == 1) view_ = view_.transposed();
  }

  /// Takes `matrix` over without a copy.
  static Weight own(RowMajorMatrix<S> matrix) {
    const auto owner = std::make_shared<const RowMajorMatrix<S>>(std::move(matrix));
    Weight weight;
    weight.view_ = row_major_view(owner->data(), owner->rows(), owner->cols(), owner->cols());
    weight.owner_ = owner;
    return weight;
  }

  /// Views `rows` x `cols` elements at `data`, of any alignment, `row_stride` and `col_stride`
  /// elements apart. `data` points to `S`, or to bits of it: std::byte or a character type, any trivial type of S's
  /// own size, such as `std::uint16_t` for a bfloat16, or void.
  template <class Bits>
  static Weight view(const Bits* data, Index rows, Index cols, Index row_stride, Index col_stride) {
    static_assert(holds_bits<Bits>(),
                  "vha::Weight<S>::view: the pointer must be to S, to bytes, to void, or (bfloat16 "
                  "and half) to a trivial type of 2 bytes; name the stored scalar as S");
    const Index size = checked_product("weight", {rows, cols, sizeof(S)});
    if (size > 0 && data == nullptr) raise("weight", shape_text(rows, cols), "a null pointer");
    Weight weight;
    weight.view_ = {reinterpret_cast<const std::byte*>(data), rows, cols, row_stride, col_stride};
    return weight;
  }

  /// Views a row-major `[in, out]` array (Paddle's linear layers).
  template <class Bits>
  static Weight view_in_out(const Bits* data, Index in, Index out) {
    return view(data, in, out, out, 1);
  }

  /// Views a row-major `[out, in]` array (linear layers of PyTorch and Hugging Face).
  template <class Bits>
  static Weight view_out_in(const Bits* data, Index in, Index out) {
    return view(data, in, out, 1, in);
  }

  /// Views `size` contiguous elements, as a bias or the weight of a norm.
  template <class Bits>
  static Weight view_vector(const Bits* data, Index size) {
    return view(data, 1, size, size, 1);
  }

  /// True where there is no weight at all.
  bool empty() const { return view_.rows == 0 && view_.cols == 0; }
  Index rows() const { return view_.rows; }
  Index cols() const { return view_.cols; }
  Index size() const { return view_.rows * view_.cols; }
  S operator()(Index row, Index col) const { return view_(row, col); }
  const MatrixView<S>& view() const { return view_; }

  /// The `block_rows` x `block_cols` elements from (`row`, `col`) on, where they stand; what holds the
  /// memory lives on with them. Precondition: they lie within the weight.
  Weight block(Index row, Index col, Index block_rows, Index block_cols) const {
    Weight part = *this;
    part.view_ = view_.block(row, col, block_rows, block_cols);
    return part;
  }

  /// The elements in the scalar `T`, row-major.
  template <StorageScalar T>
  RowMajorMatrix<T> to() const {
    RowMajorMatrix<T> matrix(rows(), cols());
    copy_to(matrix.data());
    return matrix;
  }

  /// Writes the elements, row by row, to `target`.
  template <StorageScalar T>
  void copy_to(T* target) const {
    copy_elements(view_, target);
  }

  /// The weight stored as `T`, each element rounded once; itself where `T` is `S`. Throws Error where
  /// a number is beyond `T`'s range.
  template <StorageScalar T>
  Weight<T> cast() const {
    if constexpr (std::same_as<T, S>) {
      return *this;
    } else {
      RowMajorMatrix<T> stored = to<T>();
      constexpr bool holds_all = sizeof(T) > sizeof(S);
      for (Index row = 0; !holds_all && row < rows(); ++row) {
        for (Index col = 0; col < cols(); ++col) {
          const S source = view_(row, col);
          if (!is_finite(stored(row, col)) && is_finite(source)) {
            raise("weight", "elements in the range of the new type",
                  text(static_cast<double>(source)));
          }
        }
      }
      return Weight<T>::own(std::move(stored));
    }
  }

 private:
  template <class Bits>
  static constexpr bool holds_bits() {
    if constexpr (std::is_void_v<Bits>) {
      return true;
    } else {
      const bool any_two_bytes = sizeof(S) == 2 && !StorageScalar<Bits> && sizeof(Bits) == 2;
      const bool is_bytes = std::same_as<Bits, std::byte> || std::same_as<Bits, char> ||
                            std::same_as<Bits, unsigned char>;
      return std::is_trivially_copyable_v<Bits> &&
             (std::same_as<Bits, S> || any_two_bytes || is_bytes);
    }
  }

  std::shared_ptr<const void> owner_;
  MatrixView<S> view_;
};

/// Throws Error naming `argument` unless `weight` is `[rows, cols]`.
template <StorageScalar S>
void require_shape(std::string_view argument, const Weight<S>& weight, Index rows, Index cols) {
  if (weight.rows() != rows || weight.cols() != cols) {
    raise(argument, shape_text(rows, cols), shape_text(weight.rows(), weight.cols()));
  }
}

/// Throws Error naming `argument` unless `weight` is a vector of `size` elements.
template <StorageScalar S>
void require_vector(std::string_view argument, const Weight<S>& weight, Index size) {
  if (weight.size() != size || weight.rows() != 1) {
    raise(argument, shape_text(1, size), shape_text(weight.rows(), weight.cols()));
  }
}

}  // namespace vha
