// SPDX-License-Identifier: Apache-2.0
// However the same numbers stand in memory, a layer gives the same bits.

#include <cstring>
#include <list>

#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

using vha::Index;

/// Bytes that weights view, kept for as long as the layer.
class Memory {
 public:
  /// Puts the elements `value(0)`, `value(1)`, … to addresses `first + step·k`, in elements, behind
  /// `skip` bytes. All that stands between them is NaN.
  template <class S, class Value>
  std::byte* put(Index skip, Index step, Index count, Value&& value) {
    auto& bytes = blocks_.emplace_back(
        static_cast<std::size_t>(skip + step * count * static_cast<Index>(sizeof(S))),
        std::byte{0xFF});
    for (Index k = 0; k < count; ++k) {
      const S element = static_cast<S>(value(k));
      std::memcpy(bytes.data() + skip + step * k * static_cast<Index>(sizeof(S)), &element,
                  sizeof(S));
    }
    return bytes.data() + skip;
  }

 private:
  std::list<std::vector<std::byte>> blocks_;
};

template <class Kind>
class WeightViews : public testing::Test {
 protected:
  using S = typename Kind::S;

  /// Expects a layer whose weights are made by `view(memory, values, rows, cols)` to be the layer
  /// that owns them.
  template <class Layer, class View>
  static void expect_same_bits(const naive::Layer& twin, naive::Index tokens, Random& random,
                               View&& view) {
    using T = typename Kind::T;
    Memory memory;
    const auto viewing = library_layer<Layer>(twin, [&](const auto& values, naive::Index rows) {
      const auto cols = static_cast<Index>(values.size() / rows);
      return view(memory, values, static_cast<Index>(rows), cols);
    });
    const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
    const Array expected = run(library_layer<Layer>(twin), x);
    EXPECT_TRUE(same_bits(run(viewing, x), expected));
    if constexpr (!Layer::Weights::has_gate) {
      EXPECT_TRUE(same_bits(run(vha::fold_vha(viewing), x),
                            run(vha::fold_vha(library_layer<Layer>(twin)), x)));
    }
  }

  template <class View>
  static void for_each_layer(std::uint32_t seed, View&& view) {
    Random random(seed);
    for_each_shape<Kind>([&](const LayerShape& shape, naive::Index tokens) {
      const auto twin = random_gated_layer<S>(shape, random);
      expect_same_bits<typename Kind::Vha>(twin, tokens, random, view);
      expect_same_bits<typename Kind::Gated>(twin, tokens, random, view);
    });
  }
};
TYPED_TEST_SUITE(WeightViews, Kinds);

TYPED_TEST(WeightViews, InOutAtAnyAlignmentAreTheOwnedWeights) {
  using Weight = vha::Weight<typename TypeParam::S>;
  for (const Index skip : {0, 1, 2, 4}) {
    this->for_each_layer(1, [&](Memory& memory, const auto& values, Index rows, Index cols) {
      const auto at = [&](Index k) { return values[static_cast<std::size_t>(k)]; };
      return Weight::view_in_out(memory.put<typename TypeParam::S>(skip, 1, rows * cols, at), rows,
                                 cols);
    });
  }
}

TYPED_TEST(WeightViews, OutInAtAnyAlignmentAreTheOwnedWeights) {
  using Weight = vha::Weight<typename TypeParam::S>;
  for (const Index skip : {0, 1, 2, 4}) {
    this->for_each_layer(2, [&](Memory& memory, const auto& values, Index rows, Index cols) {
      const auto transposed = [&](Index k) {
        return values[static_cast<std::size_t>(k % rows * cols + k / rows)];
      };
      return Weight::view_out_in(
          memory.put<typename TypeParam::S>(skip, 1, rows * cols, transposed), rows, cols);
    });
  }
}

TYPED_TEST(WeightViews, WithStridesAreTheOwnedWeights) {
  using Weight = vha::Weight<typename TypeParam::S>;
  this->for_each_layer(3, [&](Memory& memory, const auto& values, Index rows, Index cols) {
    const auto at = [&](Index k) {
      // One element between columns, one column between rows.
      const Index col = k % (cols + 1), row = k / (cols + 1);
      return col == cols ? std::nan("") : values[static_cast<std::size_t>(row * cols + col)];
    };
    return Weight::view(memory.put<typename TypeParam::S>(1, 2, rows * (cols + 1), at), rows, cols,
                        2 * (cols + 1), 2);
  });
}

TYPED_TEST(WeightViews, OfThePremixTensorAreItsMaps) {
  using Stored = typename TypeParam::S;
  Random random(4);
  const auto values = random.values<Stored>(3 * 5 * 2);
  Memory memory;
  const auto maps = vha::view_premix_maps<Stored>(
      memory.put<Stored>(1, 1, 30, [&](Index k) { return values[static_cast<std::size_t>(k)]; }), 3,
      5, 2);
  ASSERT_EQ(maps.size(), 3U);
  for (std::size_t group = 0; group < 3; ++group) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(group * 10);
    EXPECT_TRUE(
        same_bits(array_of(maps[group].template to<double>()), {{5, 2}, {begin, begin + 10}}));
  }
}

/// What activations are stored in, for a layer that computes in `T`.
template <class T>
class ActivationForms : public testing::Test {
 protected:
  static constexpr Index tokens = 9;

  void SetUp() override {
    Random random(5);
    const LayerShape& shape = layer_shapes[3];
    twin = random_layer<T>(shape, random);
    x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
    expected = run(layer(), x);
  }
  vha::VhaAttention<T> layer() const { return library_layer<vha::VhaAttention<T>>(twin); }
  Index hidden() const { return x.cols(); }

  /// Writes the outputs for `input` to `out`, which then reads as `expected`.
  template <class X, class Out>
  void expect_into(const X& input, Out&& out) const {
    vha::AttentionWorkspace<T> workspace;
    layer().forward_into(input, out, workspace);
    const auto view = vha::activations_view(out);
    Array actual{{tokens, hidden()}, {}};
    for (Index t = 0; t < tokens; ++t) {
      for (Index c = 0; c < hidden(); ++c)
        actual.values.push_back(static_cast<double>(view(0, t, c)));
    }
    EXPECT_TRUE(same_bits(actual, expected));
  }
  template <class X>
  void expect_from(const X& input) const {
    expect_into(input, poisoned_like(x));
    EXPECT_EQ(array_of(layer().forward(input)).values, expected.values);
  }

  naive::Layer twin;
  vha::RowMajorMatrix<T> x;
  Array expected;
};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(ActivationForms, ComputeScalars);

TYPED_TEST(ActivationForms, OfMatricesGiveTheSameBits) {
  using Matrix = Eigen::Matrix<TypeParam, Eigen::Dynamic, Eigen::Dynamic>;
  const Index rows = this->tokens, cols = this->hidden();
  const Matrix column_major = this->x;
  this->expect_from(column_major);
  this->expect_from(Eigen::Ref<const Matrix>(column_major));
  this->expect_into(this->x, Matrix(Matrix::Constant(rows, cols, NAN)));

  Matrix larger = Matrix::Constant(rows + 3, cols + 2, NAN);
  larger.block(2, 1, rows, cols) = this->x;
  this->expect_from(larger.block(2, 1, rows, cols));
  Matrix larger_out = Matrix::Constant(rows + 3, cols + 2, NAN);
  this->expect_into(this->x, larger_out.block(2, 1, rows, cols));
  larger_out.block(2, 1, rows, cols).setConstant(NAN);
  EXPECT_TRUE(larger_out.array().isNaN().all()) << "wrote beside the block";

  const Matrix transposed = this->x.transpose();
  this->expect_from(transposed.transpose());
}

TYPED_TEST(ActivationForms, OfMapsGiveTheSameBits) {
  using Matrix = vha::RowMajorMatrix<TypeParam>;
  using Stride = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  const Index rows = this->tokens, cols = this->hidden(), outer = 2 * cols + 3;
  const auto size = static_cast<std::size_t>(rows * outer + 1);
  std::vector<TypeParam> memory(size, NAN), out_memory(size, NAN);
  Eigen::Map<Matrix> misaligned(memory.data() + 1, rows, cols);
  misaligned = this->x;
  this->expect_into(misaligned, Eigen::Map<Matrix>(out_memory.data() + 1, rows, cols));

  std::fill(memory.begin(), memory.end(), NAN);
  std::fill(out_memory.begin(), out_memory.end(), NAN);
  const Stride strides(outer, 2);
  Eigen::Map<Matrix, 0, Stride>(memory.data() + 1, rows, cols, strides) = this->x;
  const Eigen::Map<const Matrix, 0, Stride> strided(memory.data() + 1, rows, cols, strides);
  this->expect_from(strided);
  Eigen::Map<Matrix, 0, Stride> strided_out(out_memory.data() + 1, rows, cols, strides);
  this->expect_into(strided, strided_out);
  strided_out.setConstant(NAN);
  for (const TypeParam value : out_memory) EXPECT_TRUE(std::isnan(value)) << "wrote between";
}

TYPED_TEST(ActivationForms, OfTensorsGiveTheSameBits) {
  const Index rows = this->tokens, cols = this->hidden();
  vha::Tensor3<TypeParam> row_major(1, rows, cols);
  std::copy_n(this->x.data(), this->x.size(), row_major.data());
  const Eigen::Tensor<TypeParam, 3> column_major =
      row_major.swap_layout().shuffle(Eigen::array<int, 3>{2, 1, 0});
  this->expect_from(row_major);
  this->expect_from(column_major);
  this->expect_from(Eigen::TensorMap<const vha::Tensor3<TypeParam>>(this->x.data(), 1, rows, cols));

  auto out = poisoned_like(row_major);
  this->expect_into(row_major,
                    Eigen::TensorMap<vha::Tensor3<TypeParam>>(out.data(), 1, rows, cols));
  Eigen::Tensor<TypeParam, 3> column_major_out(1, rows, cols);
  column_major_out.setConstant(NAN);
  this->expect_into(row_major, column_major_out);
}

/// Narrow activations are converted, exactly, to what the layer computes in, and rounded once back.
template <class Narrow>
class NarrowActivations : public testing::Test {};
using NarrowScalars = testing::Types<vha::bfloat16, vha::half>;
TYPED_TEST_SUITE(NarrowActivations, NarrowScalars);

TYPED_TEST(NarrowActivations, AreTheRoundedOnesOfFloat) {
  Random random(6);
  for_each_shape<Kind<float>>([&](const LayerShape& shape, naive::Index tokens) {
    const auto twin = random_layer<float>(shape, random);
    const auto layer = library_layer<vha::VhaAttention<float>>(twin);
    const auto narrow =
        matrix_of<TypeParam>(random_tokens<TypeParam>(tokens, twin, random), tokens);
    const vha::RowMajorMatrix<float> wide = narrow.template cast<float>();
    const vha::RowMajorMatrix<float> out = layer.forward(wide);
    EXPECT_TRUE(same_bits(run(layer, narrow), array_of(out.template cast<TypeParam>().eval())));
  });
}

}  // namespace
}  // namespace laws
