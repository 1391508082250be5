// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>
#include <vha/core/weight.hpp>

#include "error_of.hpp"

namespace {

using vha::bfloat16;
using vha::Index;
using vha::Weight;

using support::error_of;

/// 0, 1, 2, …
template <class T>
std::vector<T> counted(std::size_t size) {
  std::vector<T> values(size);
  std::iota(values.begin(), values.end(), T(0));
  return values;
}

TEST(View, ReadsByStrides) {
  const auto memory = counted<float>(24);
  const vha::MatrixView<float> view{reinterpret_cast<const std::byte*>(memory.data() + 1), 3, 2, 7,
                                    2};
  EXPECT_EQ(view(0, 0), 1);
  EXPECT_EQ(view(2, 1), 1 + 2 * 7 + 2);
  EXPECT_EQ(view.transposed()(1, 2), view(2, 1));
  EXPECT_EQ(view.transposed().rows, 2);
  const auto block = view.block(1, 1, 2, 1);
  EXPECT_EQ(block.rows, 2);
  EXPECT_EQ(block.cols, 1);
  EXPECT_EQ(block(1, 0), view(2, 1));
}

// Transposed matrices are copied tile by tile: sizes on both sides of a tile's.
TEST(View, CopiesElementsOfAnyOrderRowByRow) {
  for (const Index rows : {1, 31, 32, 33, 70}) {
    for (const Index cols : {1, 2, 63, 64, 65, 130}) {
      struct Strides {
        Index row, col;
      };
      for (const auto [row_stride, col_stride] :
           {Strides{cols, 1}, Strides{1, rows}, Strides{2, 2 * rows + 1}, Strides{3 * cols, 3}}) {
        std::vector<float> source(static_cast<std::size_t>(rows * row_stride + cols * col_stride));
        std::iota(source.begin(), source.end(), 1.0F);
        const vha::MatrixView<float> view{reinterpret_cast<const std::byte*>(source.data()), rows,
                                          cols, row_stride, col_stride};
        std::vector<double> copied(static_cast<std::size_t>(rows * cols + 1), -1);
        vha::copy_elements(view, copied.data());
        for (Index k = 0; k < rows * cols; ++k) {
          ASSERT_EQ(copied[static_cast<std::size_t>(k)], view(k / cols, k % cols))
              << rows << 'x' << cols << ' ' << row_stride << ' ' << col_stride << ' ' << k;
        }
        EXPECT_EQ(copied.back(), -1);
      }
    }
  }
}

TEST(View, HeadsInBothOrders) {
  auto memory = counted<double>(2 * 3 * 4 * 5);  // tokens, groups, group_size, head_dim
  const auto by_token = vha::token_major_heads(memory.data(), 2, 3, 4, 5);
  EXPECT_EQ(*by_token.head(1, 2, 3), 1 * 60 + 2 * 20 + 3 * 5);
  const auto by_group = vha::group_major_heads(memory.data(), 2, 3, 4, 5);
  EXPECT_EQ(*by_group.head(1, 2, 3), 2 * 40 + 1 * 20 + 3 * 5);

  const vha::HeadsView<const double> last = by_group.slice(1, 1);
  EXPECT_EQ(last.tokens, 1);
  EXPECT_EQ(last.head(0, 2, 3), by_group.head(1, 2, 3));

  std::vector<double> visited;
  vha::for_each_head(by_group, [&](Index token, const double* head) {
    EXPECT_EQ(token, static_cast<Index>(visited.size()) / 12);
    visited.push_back(*head);
  });
  ASSERT_EQ(visited.size(), 24U);
  EXPECT_EQ(visited[1], 5);   // the next head of the group
  EXPECT_EQ(visited[4], 40);  // the next group
}

TEST(View, BufferGrowsAndNeverShrinks) {
  vha::Buffer<float> buffer;
  float* const large = buffer.reserve(100);
  EXPECT_EQ(buffer.reserve(7), large);
  EXPECT_EQ(buffer.reserve(100), large);
}

TEST(Weight, IsEmptyByDefault) {
  const Weight<float> weight;
  EXPECT_TRUE(weight.empty());
  EXPECT_EQ(weight.size(), 0);
  EXPECT_EQ(weight.to<double>().size(), 0);
}

TEST(Weight, SameBytesInBothLayouts) {
  const auto memory = counted<double>(6);
  const auto paddle = Weight<double>::view_in_out(memory.data(), 2, 3);
  const auto hugging_face = Weight<double>::view_out_in(memory.data(), 3, 2);
  ASSERT_EQ(hugging_face.rows(), 3);
  ASSERT_EQ(hugging_face.cols(), 2);
  for (Index i = 0; i < 2; ++i) {
    for (Index j = 0; j < 3; ++j) {
      EXPECT_EQ(paddle(i, j), static_cast<double>(3 * i + j));
      EXPECT_EQ(hugging_face(j, i), paddle(i, j));
    }
  }
}

TEST(Weight, ViewsMisalignedAndStridedMemory) {
  const auto values = counted<double>(20);
  std::vector<char> memory(20 * sizeof(double) + 3);
  std::memcpy(memory.data() + 3, values.data(), 20 * sizeof(double));
  const auto weight = Weight<double>::view(memory.data() + 3, 3, 2, 6, 3);
  vha::RowMajorMatrix<float> expected(3, 2);
  expected << 0, 3, 6, 9, 12, 15;
  EXPECT_EQ(weight.to<float>(), expected);
}

TEST(Weight, TakesBitsOfTwoBytes) {
  const std::array<std::uint16_t, 2> bits{0x3F80, 0xC000};  // 1, -2
  const auto check = [&](const Weight<bfloat16>& weight) {
    EXPECT_EQ(weight.to<double>()(0, 0), 1);
    EXPECT_EQ(weight.to<double>()(0, 1), -2);
  };
  check(Weight<bfloat16>::view_vector(bits.data(), 2));
  check(Weight<bfloat16>::view_vector(static_cast<const void*>(bits.data()), 2));
  check(Weight<bfloat16>::view_vector(reinterpret_cast<const std::byte*>(bits.data()), 2));
  check(Weight<bfloat16>::view_vector(reinterpret_cast<const char*>(bits.data()), 2));
}

TEST(Weight, CopiesAnEigenMatrixInAnyOrder) {
  Eigen::MatrixXf matrix = Eigen::MatrixXf::Zero(2, 3);
  matrix(0, 2) = 5;
  const Weight<float> weight = matrix;
  const Weight<float> sum = matrix + matrix;
  matrix.setConstant(-1);
  EXPECT_EQ(weight.rows(), 2);
  EXPECT_EQ(weight.cols(), 3);
  EXPECT_EQ(weight(0, 2), 5);
  EXPECT_EQ(sum(0, 2), 10);
}

TEST(Weight, AVectorOfEitherShapeIsARow) {
  const Eigen::VectorXf column = Eigen::VectorXf::LinSpaced(4, 0, 3);
  for (const Weight<float>& weight : {Weight<float>(column), Weight<float>(column.transpose())}) {
    EXPECT_EQ(weight.rows(), 1);
    ASSERT_EQ(weight.cols(), 4);
    EXPECT_EQ(weight(0, 3), 3);
  }
}

TEST(Weight, OwnsWithoutACopyAndSharesOnCopy) {
  vha::RowMajorMatrix<float> matrix = vha::RowMajorMatrix<float>::Constant(5, 7, 2);
  const auto* const address = reinterpret_cast<const std::byte*>(matrix.data());
  auto original = std::make_unique<Weight<float>>(Weight<float>::own(std::move(matrix)));
  EXPECT_EQ(original->view().data, address);
  const Weight<float> copy = *original;
  const Weight<float> cast = original->cast<float>();
  original.reset();
  EXPECT_EQ(copy.view().data, address);
  EXPECT_EQ(cast.view().data, address);
  EXPECT_EQ(copy.to<float>(), (vha::RowMajorMatrix<float>::Constant(5, 7, 2)));
}

TEST(Weight, CastRoundsEachElementOnce) {
  const Weight<double> weight = Eigen::RowVector2d(1 + 0x1p-8 + 0x1p-40, -3);
  const auto cast = weight.cast<bfloat16>();
  EXPECT_EQ(vha::convert<double>(cast(0, 0)), 1 + 0x1p-7);
  EXPECT_EQ(vha::convert<double>(cast(0, 1)), -3);
}

TEST(Weight, CastRefusesToMakeAnInfinity) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Weight<double> weight = Eigen::RowVector2d(1, -1e5);
  EXPECT_NO_THROW(weight.cast<bfloat16>());
  EXPECT_EQ(error_of([&] { weight.cast<vha::half>(); }),
            "weight: expected elements in the range of the new type, got -100000");
  EXPECT_NO_THROW(Weight<double>(Eigen::RowVector2d(infinity, 1)).cast<vha::half>());
}

TEST(Weight, MovedFromIsWhatItWas) {
  Weight<float> weight = Eigen::MatrixXf::Constant(2, 3, 5);
  const Weight<float> taken = std::move(weight);
  EXPECT_EQ(weight.to<float>(), taken.to<float>());
  EXPECT_EQ(weight(1, 2), 5);
}

TEST(Weight, CopyToWritesRowByRow) {
  const auto memory = counted<float>(6);
  std::array<double, 6> target{};
  Weight<float>::view_out_in(memory.data(), 2, 3).copy_to(target.data());
  EXPECT_EQ(target, (std::array<double, 6>{0, 2, 4, 1, 3, 5}));
}

TEST(Weight, RefusesWhatCannotBeViewed) {
  const float element = 0;
  const float* const null = nullptr;
  EXPECT_EQ(error_of([&] { Weight<float>::view_in_out(null, 2, 3); }),
            "weight: expected [2, 3], got a null pointer");
  EXPECT_EQ(error_of([&] { Weight<float>::view_in_out(&element, -1, 3); }),
            "weight: expected sizes of 0 or more, got -1");
  const Index half_of_all = std::numeric_limits<Index>::max() / 2 + 1;
  EXPECT_EQ(error_of([&] { Weight<float>::view_in_out(&element, half_of_all, 2); }),
            "weight: expected at most 9223372036854775807 elements, got a product of sizes beyond "
            "that");
  EXPECT_EQ(Weight<float>::view_in_out(null, 0, 3).size(), 0);  // but not absent
  EXPECT_FALSE(Weight<float>::view_in_out(null, 0, 3).empty());
}

TEST(Weight, ShapeChecksNameBothShapes) {
  const Weight<float> weight = Eigen::MatrixXf::Zero(2, 3);
  EXPECT_NO_THROW(vha::require_shape("w", weight, 2, 3));
  EXPECT_EQ(error_of([&] { vha::require_shape("w", weight, 3, 2); }),
            "w: expected [3, 2], got [2, 3]");
  EXPECT_EQ(error_of([&] { vha::require_vector("w", weight, 6); }),
            "w: expected [1, 6], got [2, 3]");
  EXPECT_NO_THROW(vha::require_vector("w", Weight<float>(Eigen::RowVector3f::Zero()), 3));
  EXPECT_EQ(error_of([&] { vha::require_vector("w", Weight<float>(), 4); }),
            "w: expected [1, 4], got [0, 0]");
}

TEST(Sizes, ProductsAreChecked) {
  EXPECT_EQ(vha::checked_product("n", {3, 5, 7}), 105);
  EXPECT_EQ(vha::checked_product("n", {}), 1);
  EXPECT_EQ(vha::checked_product("n", {std::numeric_limits<Index>::max(), 0}), 0);
  EXPECT_EQ(vha::checked_product("n", {std::numeric_limits<Index>::max(), 1}),
            std::numeric_limits<Index>::max());
  EXPECT_THROW(vha::checked_product("n", {Index(1) << 32, Index(1) << 31}), vha::Error);
  EXPECT_EQ(error_of([] { vha::require_size("n", 3, 4); }), "n: expected 3, got 4");
}

}  // namespace
