// SPDX-License-Identifier: Apache-2.0
// Faults: bfloat16 by cutting bits off, or rounded at every step of a fold; and biases that a fold
// forgets, or invents.

#include <cmath>

#include "fault_support.hpp"

namespace faults {
namespace {

using vha::bfloat16;

template <class From>
class Fault11Rounding : public testing::Test {};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(Fault11Rounding, ComputeScalars);

TYPED_TEST(Fault11Rounding, ToNearestEvenBfloat16) {
  const auto rounded = [](double value) {
    return bits(vha::convert<bfloat16>(static_cast<TypeParam>(value)));
  };
  EXPECT_EQ(rounded(0.2691408770292272), 0x3E8A);
  EXPECT_EQ(rounded(3.14), 0x4049);
  EXPECT_EQ(rounded(1.00390625), 0x3F80);
  EXPECT_EQ(rounded(1.01171875), 0x3F82);
  EXPECT_EQ(rounded(3.4028234e38), 0x7F80);
  EXPECT_EQ(rounded(-3.14), 0xC049);
  EXPECT_EQ(rounded(-1.00390625), 0xBF80);
  EXPECT_EQ(rounded(-3.4028234e38), 0xFF80);
  EXPECT_EQ(rounded(-0.0), 0x8000);
  const float signalling = std::bit_cast<float>(0x7F800001U);
  for (const auto nan_bits : {bits(vha::convert<bfloat16>(signalling)),
                              bits(vha::convert<bfloat16>(vha::convert<double>(signalling)))}) {
    EXPECT_EQ(nan_bits & 0x7F80, 0x7F80);
    EXPECT_NE(nan_bits & 0x007F, 0);
  }
}

/// Every number of the narrow scalar `S` comes back from `From`, and what lies between two
/// neighbours goes to the nearer one, or to the even one.
template <class S, class From>
void expect_every_number_right(unsigned largest_bits) {
  const auto number = [](unsigned b) { return std::bit_cast<S>(static_cast<std::uint16_t>(b)); };
  for (unsigned b = 0; b < largest_bits; ++b) {
    const double low = vha::convert<double>(number(b)), high = vha::convert<double>(number(b + 1));
    ASSERT_LT(low, high);
    const auto middle = static_cast<From>(low / 2 + high / 2);
    for (const From sign : {From(1), From(-1)}) {
      const unsigned sign_bit = sign < 0 ? 0x8000U : 0U;
      const auto rounded = [&](From value) { return bits(vha::convert<S>(sign * value)); };
      ASSERT_EQ(rounded(static_cast<From>(low)), b | sign_bit);
      ASSERT_EQ(rounded(middle), (b + (b & 1U)) | sign_bit) << middle;
      ASSERT_EQ(rounded(std::nextafter(middle, From(0))), b | sign_bit) << middle;
      ASSERT_EQ(rounded(std::nextafter(middle, From(1e39))), (b + 1) | sign_bit) << middle;
    }
  }
}

TYPED_TEST(Fault11Rounding, EveryNumberAndEveryMiddle) {
  // In float the middle of the smallest bfloat16 and 0 is a subnormal number, but there is one.
  expect_every_number_right<bfloat16, TypeParam>(0x7F7F);
  expect_every_number_right<vha::half, TypeParam>(0x7BFF);
}

template <class S>
class Fault11Fold : public testing::Test {};
TYPED_TEST_SUITE(Fault11Fold, Scalars);

// M is [[1 + 2^-9, 0], [-1, 1]]: rounded to bfloat16 first, its column 0 would cancel.
TYPED_TEST(Fault11Fold, MixingIsNotRounded) {
  const vha::Postmix<TypeParam> postmix{weight<TypeParam>(2, 1, {1, 0}),
                                        weight<TypeParam>(2, 1, {0x1p-9, -1})};
  const vha::Linear<TypeParam> output{weight<TypeParam>(2, 1, {1, 1})};
  EXPECT_EQ(elements(vha::fold_postmix<TypeParam>(output, postmix).weight),
            (std::vector<double>{0.001953125, 1.0}));
}

/// Counts the elements of `folded` that are not the nearest number to `exact(row, col)`, which is
/// right to `error`.
template <class S>
Index wrongly_rounded(const Weight<S>& folded, double error, const auto& exact) {
  Index wrong = 0;
  for (Index row = 0; row < folded.rows(); ++row) {
    for (Index col = 0; col < folded.cols(); ++col) {
      const auto value = static_cast<double>(exact(row, col));
      const double stored = vha::convert<double>(folded(row, col));
      wrong += stored < vha::convert<double>(vha::convert<S>(value - error)) ||
               stored > vha::convert<double>(vha::convert<S>(value + error));
    }
  }
  return wrong;
}

TYPED_TEST(Fault11Fold, EveryElementIsRoundedOnce) {
  using S = TypeParam;
  constexpr Index hidden = 33, d = 16, physical = 3, groups = 2, heads = 6;
  const double error = std::is_same_v<S, double> ? 1e-14 : 1e-12;
  Random random(4);
  const auto w =
      random_layer<vha::VhaAttention<S>>(
          {.hidden = hidden, .head_dim = d, .query_heads = heads, .kv_heads = groups}, random)
          .weights();
  const auto query = w.query.weight.template to<double>();
  const auto query_product = [&](Index row, Index col) {
    const Index head = col / d, i = head % physical;
    const auto& map = w.premix.maps[static_cast<std::size_t>(head / physical)];
    long double sum = 0;
    for (Index c = 0; c < d; ++c) {
      sum +=
          static_cast<long double>(query(row, i * d + c)) * vha::convert<double>(map(c, col % d));
    }
    return sum;
  };
  const auto output = w.output.weight.template to<double>();
  const auto output_product = [&](Index row, Index col) {
    long double sum = output(row, col);
    for (Index i = 0; i < heads; ++i) {
      for (Index k = 0; k < w.postmix.rank(); ++k) {
        sum += static_cast<long double>(vha::convert<double>(w.postmix.b(i, k))) *
               vha::convert<double>(w.postmix.a(row / d, k)) * output(i * d + row % d, col);
      }
    }
    return sum;
  };
  EXPECT_EQ(wrongly_rounded(vha::fold_premix<S>(w.query, w.premix).weight, error, query_product),
            0);
  EXPECT_EQ(
      wrongly_rounded(vha::fold_postmix<S>(w.output, w.postmix).weight, error, output_product), 0);
  EXPECT_EQ(
      wrongly_rounded(vha::fold_premix<bfloat16>(w.query, w.premix).weight, error, query_product),
      0);
  // What is wrong is noticed: the fold rounded on its way through bfloat16.
  if constexpr (std::is_same_v<S, float>) {
    const auto twice = vha::fold_premix<bfloat16>(w.query, w.premix).weight.template cast<float>();
    EXPECT_GT(wrongly_rounded(twice, error, query_product), 0);
  }
}

template <class S>
class Fault12Bias : public testing::Test {};
TYPED_TEST_SUITE(Fault12Bias, Scalars);

TYPED_TEST(Fault12Bias, FoldsAsARowOfTheProjection) {
  const vha::Premix<TypeParam> premix{
      {weight<TypeParam>(2, 2, {1, 0, 0, 1}), weight<TypeParam>(2, 2, {2, 0, 3, 1})}};
  const vha::Linear<TypeParam> query{weight<TypeParam>(2, 4, {1, 0, 10, 0, 0, 1, 0, 10}),
                                     weight<TypeParam>(1, 4, {1, 2, 5, 7})};
  EXPECT_EQ(elements(vha::fold_premix<TypeParam>(query, premix).bias),
            (std::vector<double>{1, 2, 5, 7, 8, 2, 31, 7}));
}

TYPED_TEST(Fault12Bias, OtherBiasesStayAndNoneIsInvented) {
  using Layer = vha::VhaAttention<TypeParam>;
  Random random(5);
  const vha::AttentionConfig config{.hidden = 5, .head_dim = 4, .query_heads = 6, .kv_heads = 3};
  const auto layer = random_layer<Layer>(config, random);
  const auto folded = vha::fold_vha(layer).weights();
  EXPECT_EQ(elements(folded.key.bias), elements(layer.weights().key.bias));
  EXPECT_EQ(elements(folded.value.bias), elements(layer.weights().value.bias));
  EXPECT_EQ(elements(folded.output.bias), elements(layer.weights().output.bias));
  EXPECT_EQ(folded.query.bias.cols(), 24);

  const std::vector<vha::Linear<TypeParam> Layer::Weights::*> projections = {
      &Layer::Weights::query, &Layer::Weights::key, &Layer::Weights::value,
      &Layer::Weights::output};
  for (unsigned present = 0; present < 16; ++present) {
    auto w = layer.weights();
    for (std::size_t k = 0; k < 4; ++k) {
      if ((present >> k & 1U) == 0) (w.*projections[k]).bias = {};
    }
    const Layer some(config, w);
    const auto served = vha::fold_vha(some);
    const auto& f = served.weights();
    EXPECT_EQ(!f.query.bias.empty(), (present & 1U) != 0);
    EXPECT_EQ(!f.key.bias.empty(), (present & 2U) != 0);
    EXPECT_EQ(!f.value.bias.empty(), (present & 4U) != 0);
    EXPECT_EQ(!f.output.bias.empty(), (present & 8U) != 0);
    const auto x = random_matrix<vha::Compute<TypeParam>>(7, 5, random);
    const double limit = sizeof(TypeParam) == 8 ? 1e-13 : sizeof(TypeParam) == 4 ? 1e-4 : 0.3;
    EXPECT_LE(largest_difference(served.forward(x), some.forward(x)), limit);
  }
}

}  // namespace
}  // namespace faults
