// SPDX-License-Identifier: Apache-2.0
// multiply(A, B) is the product in three loops, whatever the sizes, strides and scalars.

#include <vha/ops/matrix_product.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "random.hpp"
#include "tolerance.hpp"

namespace laws {
namespace {

using vha::Index;

/// A matrix of numbers of `S` in bytes of its own, `[rows, cols]`, somehow laid out.
template <class S>
class StoredMatrix {
 public:
  enum class Layout { row_major, column_major, strided, misaligned };
  static constexpr Layout layouts[] = {Layout::row_major, Layout::column_major, Layout::strided,
                                       Layout::misaligned};

  StoredMatrix(Index rows, Index cols, Layout layout, Random& random) {
    view_ = {nullptr, rows, cols, cols, 1};
    if (layout == Layout::column_major) view_.row_stride = 1, view_.col_stride = rows;
    if (layout == Layout::strided) view_.row_stride = 2 * cols + 3, view_.col_stride = 2;
    const std::size_t skip = layout == Layout::misaligned ? 1 : 0;
    const Index last = std::max<Index>(rows - 1, 0) * view_.row_stride +
                       std::max<Index>(cols - 1, 0) * view_.col_stride;
    bytes_.resize(skip + static_cast<std::size_t>(last + 1) * sizeof(S), std::byte{0xFF});  // NaN
    view_.data = bytes_.data() + skip;
    values_ = random.values<S>(static_cast<std::size_t>(rows * cols));
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < cols; ++j) {
        const S value = static_cast<S>(at(i, j));
        std::memcpy(bytes_.data() + (view_.address(i, j) - bytes_.data()), &value, sizeof(S));
      }
    }
  }
  StoredMatrix(StoredMatrix&&) = delete;

  const vha::MatrixView<S>& view() const { return view_; }
  double at(Index i, Index j) const {
    return values_[static_cast<std::size_t>(i * view_.cols + j)];
  }

 private:
  std::vector<std::byte> bytes_;
  std::vector<double> values_;
  vha::MatrixView<S> view_;
};

/// `multiply` into the middle of memory that was NaN, rows `cols + 5` apart: what it wrote. Expects
/// that it left the memory between the rows as it was.
template <class T, class A, class B>
Array product(const vha::MatrixView<A>& a, const vha::MatrixView<B>& b) {
  const Index stride = b.cols + 5;
  std::vector<T> memory(static_cast<std::size_t>((a.rows + 1) * stride + 1),
                        std::numeric_limits<T>::quiet_NaN());
  vha::ProductWorkspace<T> workspace;
  vha::multiply(a, b, memory.data() + 1, stride, false, workspace);
  Array result{{a.rows, b.cols}, {}};
  for (std::size_t k = 0; k < memory.size(); ++k) {
    const Index row = (static_cast<Index>(k) - 1) / stride,
                col = (static_cast<Index>(k) - 1) % stride;
    if (k > 0 && row < a.rows && col < b.cols) {
      result.values.push_back(static_cast<double>(memory[k]));
    } else {
      EXPECT_TRUE(std::isnan(memory[k])) << "wrote outside C, " << k << " elements in";
    }
  }
  return result;
}

template <class A, class B>
std::vector<double> naive_product(const StoredMatrix<A>& a, const StoredMatrix<B>& b) {
  std::vector<double> result;
  for (Index i = 0; i < a.view().rows; ++i) {
    for (Index j = 0; j < b.view().cols; ++j) {
      long double sum = 0;
      for (Index k = 0; k < a.view().cols; ++k)
        sum += static_cast<long double>(a.at(i, k)) * b.at(k, j);
      result.push_back(static_cast<double>(sum));
    }
  }
  return result;
}

/// The scalar of the sums, and the operands.
template <class Sum, class Left, class Right>
struct Operands {
  using T = Sum;
  using Stored = Left;
  using A = StoredMatrix<Left>;
  using B = StoredMatrix<Right>;
};
using AllOperands =
    testing::Types<Operands<double, double, double>, Operands<float, float, float>,
                   Operands<float, float, vha::bfloat16>, Operands<float, vha::half, float>,
                   Operands<double, vha::bfloat16, double>, Operands<double, double, float>>;

template <class Operands>
class MatrixProduct : public testing::Test {};
TYPED_TEST_SUITE(MatrixProduct, AllOperands);

TYPED_TEST(MatrixProduct, IsThatOfThreeLoops) {
  using A = typename TypeParam::A;
  using B = typename TypeParam::B;
  using T = typename TypeParam::T;
  Random random(1);
  const auto check = [&](Index rows, Index depth, Index cols, auto a_layout, auto b_layout) {
    SCOPED_TRACE(testing::PrintToString(std::tuple(rows, depth, cols)));
    const A a(rows, depth, a_layout, random);
    const B b(depth, cols, b_layout, random);
    EXPECT_TRUE(close(product<T>(a.view(), b.view()), naive_product(a, b),
                      tolerance<T>(static_cast<std::size_t>(depth))));
  };
  for (const Index rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 14, 15, 29}) {
    for (const Index depth : {0, 1, 9}) {
      for (const Index cols : {0, 1, 3, 8, 15, 16, 17, 31, 32, 33, 81}) {
        check(rows, depth, cols, A::Layout::row_major, B::Layout::row_major);
      }
    }
  }
  for (const auto a_layout : A::layouts) {
    for (const auto b_layout : B::layouts) check(15, 9, 35, a_layout, b_layout);
  }
  // Beyond one block of depth, of rows and of columns.
  check(3, 1031, 5, A::Layout::row_major, B::Layout::row_major);
  check(231, 3, 7, A::Layout::column_major, B::Layout::strided);
  check(2, 3, 2075, A::Layout::strided, B::Layout::column_major);
  check(227, 515, 33, A::Layout::row_major, B::Layout::row_major);
}

TYPED_TEST(MatrixProduct, IsAddedWhereAsked) {
  using T = typename TypeParam::T;
  Random random(2);
  for (const Index depth : {0, 1, 9, 1031}) {
    const typename TypeParam::A a(9, depth, TypeParam::A::Layout::row_major, random);
    const typename TypeParam::B b(depth, 37, TypeParam::B::Layout::row_major, random);
    const std::vector<double> start = random.values<T>(9 * 37);
    std::vector<double> expected = naive_product(a, b);
    Array c{{9, 37}, {}};
    std::vector<T> memory(start.begin(), start.end());
    vha::ProductWorkspace<T> workspace;
    vha::multiply(a.view(), b.view(), memory.data(), 37, true, workspace);
    for (std::size_t k = 0; k < expected.size(); ++k) expected[k] += start[k];
    c.values.assign(memory.begin(), memory.end());
    EXPECT_TRUE(close(c, expected, tolerance<T>(static_cast<std::size_t>(depth)))) << depth;
  }
}

TYPED_TEST(MatrixProduct, HasRowsThatDependOnNoOtherRow) {
  using T = typename TypeParam::T;
  Random random(3);
  for (const auto& [rows, depth, cols] :
       {std::tuple(29, 9, 37), std::tuple(31, 700, 5), std::tuple(240, 5, 16)}) {
    const typename TypeParam::A a(rows, depth, TypeParam::A::Layout::row_major, random);
    const typename TypeParam::B b(depth, cols, TypeParam::B::Layout::row_major, random);
    const Array whole = product<T>(a.view(), b.view());
    for (Index first = 0; first < rows; ++first) {
      for (const Index count : {1, 2, 5, 11, 17}) {
        if (first + count > rows) continue;
        const Array part = product<T>(a.view().block(first, 0, count, depth), b.view());
        const auto begin = whole.values.begin() + first * cols;
        ASSERT_TRUE(same_bits(part, {{count, cols}, {begin, begin + count * cols}}))
            << count << " rows from row " << first;
      }
    }
  }
}

TYPED_TEST(MatrixProduct, HasTheSameBitsInAccumulatingCalls) {
  using T = typename TypeParam::T;
  Random random(5);
  const typename TypeParam::A a(15, 256, TypeParam::A::Layout::row_major, random);
  const typename TypeParam::B b(256, 37, TypeParam::B::Layout::row_major, random);
  const Array whole = product<T>(a.view(), b.view());
  for (const Index cut : {0, 1, 9, 81, 255}) {
    std::vector<T> memory(15 * 37, std::numeric_limits<T>::quiet_NaN());
    vha::ProductWorkspace<T> workspace;
    vha::multiply(a.view().block(0, 0, 15, cut), b.view().block(0, 0, cut, 37), memory.data(), 37,
                  false, workspace);
    vha::multiply(a.view().block(0, cut, 15, 256 - cut), b.view().block(cut, 0, 256 - cut, 37),
                  memory.data(), 37, true, workspace);
    EXPECT_TRUE(same_bits({{15, 37}, {memory.begin(), memory.end()}}, whole)) << cut;
  }
}

TYPED_TEST(MatrixProduct, KeepsNanInItsRowAndColumn) {
  using A = typename TypeParam::A;
  using T = typename TypeParam::T;
  using Stored = typename TypeParam::Stored;
  Random random(4);
  const A a(17, 9, A::Layout::row_major, random);
  const typename TypeParam::B b(9, 37, TypeParam::B::Layout::row_major, random);
  const Array clean = product<T>(a.view(), b.view());
  for (Index bad = 0; bad < 17; ++bad) {
    std::vector<Stored> values;
    for (Index i = 0; i < 17; ++i) {
      for (Index k = 0; k < 9; ++k) {
        values.push_back(i == bad ? std::numeric_limits<Stored>::quiet_NaN()
                                  : static_cast<Stored>(a.at(i, k)));
      }
    }
    Array result = product<T>(vha::row_major_view(values.data(), 17, 9, 9), b.view());
    for (Index j = 0; j < 37; ++j) {
      const auto at = static_cast<std::size_t>(bad * 37 + j);
      EXPECT_TRUE(std::isnan(result.values[at])) << "row " << bad << ", column " << j;
      result.values[at] = clean.values[at];
    }
    EXPECT_TRUE(same_bits(result, clean)) << "row " << bad << " of A is NaN";
  }
}

}  // namespace
}  // namespace laws
