// SPDX-License-Identifier: Apache-2.0
// Fault: heads in another order than the weights were trained for. K/V heads are tiled where they
// should be repeated, virtual heads stand physical head first, or a map is read transposed.

#include "fault_support.hpp"
#include "fixtures.hpp"

namespace faults {
namespace {

template <class S>
class Fault01HeadOrder : public testing::Test {};
TYPED_TEST_SUITE(Fault01HeadOrder, Scalars);

/// A layer of hidden size 1 in which K/V head `g` has the value `g + 1` and W_O reads channel 0 of
/// head `j` with the weight 10^j, so that the digits of the output tell which head read what.
template <class S>
vha::VhaAttention<S> digit_layer(Index physical_heads, Index kv_heads, Index head_dim) {
  const Index heads = physical_heads * kv_heads;
  typename vha::VhaAttention<S>::Weights w;
  std::vector<double> value, output, map(static_cast<std::size_t>(head_dim * head_dim));
  for (Index g = 0; g < kv_heads; ++g) {
    for (Index c = 0; c < head_dim; ++c) value.push_back(static_cast<double>(g + 1));
  }
  for (Index j = 0; j < heads; ++j) {
    output.push_back(std::pow(10.0, static_cast<double>(j)));
    for (Index c = 1; c < head_dim; ++c) output.push_back(0);
  }
  Random random(1);
  const auto some = [&](Index rows, Index cols) {
    return Weight<S>::own(random_matrix<S>(rows, cols, random));
  };
  w.query.weight = some(1, physical_heads * head_dim);
  w.key.weight = some(1, kv_heads * head_dim);
  w.value.weight = weight<S>(1, kv_heads * head_dim, value);
  w.output.weight = weight<S>(heads * head_dim, 1, output);
  for (Index g = 0; g < kv_heads; ++g) w.premix.maps.push_back(some(head_dim, head_dim));
  w.postmix.a = some(heads, 1);
  w.postmix.b = weight<S>(heads, 1, std::vector<double>(static_cast<std::size_t>(heads)));
  return {{.hidden = 1, .head_dim = head_dim, .query_heads = heads, .kv_heads = kv_heads}, w};
}

TYPED_TEST(Fault01HeadOrder, ConsecutiveHeadsShareAKvHead) {
  struct Case {
    Index physical_heads, kv_heads, head_dim;
    double output;
  };
  for (const Case& c : {Case{2, 2, 2, 2211},
                        {3, 2, 2, 222111},
                        {2, 3, 4, 332211},
                        {1, 3, 2, 321},
                        {4, 1, 2, 1111},
                        {1, 1, 6, 1}}) {
    // The weights 1, 10, 100 and so on are numbers of a narrow scalar only up to a point.
    if (sizeof(TypeParam) == 2 && c.output > 3000) continue;
    const auto layer = digit_layer<TypeParam>(c.physical_heads, c.kv_heads, c.head_dim);
    const double limit = std::is_same_v<TypeParam, vha::bfloat16> ? 0x1p-8 : 1e-6;
    const auto expect_digits = [&](double output) {
      EXPECT_NEAR(output, c.output, limit * c.output) << c.physical_heads << " x " << c.kv_heads;
    };
    const auto x = matrix<vha::Compute<TypeParam>>(1, 1, {1});
    expect_digits(layer.forward(x)(0, 0));
    expect_digits(vha::fold_vha(layer).forward(x)(0, 0));
    vha::KvCache<TypeParam> cache(layer.config(), 1, 4);
    for (int token = 0; token < 4; ++token) expect_digits(layer.forward(x, cache)(0, 0));
  }
}

TYPED_TEST(Fault01HeadOrder, ConsecutiveHeadsShareAKvHeadInTheCore) {
  vha::Tensor4<TypeParam> query(2, 1, 6, 2), key(2, 1, 3, 2), value(2, 1, 3, 1);
  query.setConstant(vha::convert<TypeParam>(0.5));
  key.setConstant(vha::convert<TypeParam>(0.5));
  for (Index k = 0; k < 6; ++k) value.data()[k] = vha::convert<TypeParam>(static_cast<double>(k));
  const auto out = vha::causal_attention(query, key, value);
  for (Index k = 0; k < 12; ++k) {
    EXPECT_EQ(static_cast<double>(out.data()[k]), static_cast<double>(k / 2));
  }
}

TYPED_TEST(Fault01HeadOrder, FoldedQueryRows) {
  const std::vector<double> rows = {1, 0, 0, 1, 10, 0, 0, 10, 2, 3, 0, 1, 20, 30, 0, 10};
  const auto heads = matrix<TypeParam>(4, 2, {1, 0, 0, 1, 10, 0, 0, 10});  // [out, in]
  // As column operators I and [[2, 3], [0, 1]], so the latter's transpose as it multiplies rows.
  const vha::Premix<TypeParam> premix{
      {weight<TypeParam>(2, 2, {1, 0, 0, 1}), weight<TypeParam>(2, 2, {2, 0, 3, 1})}};
  const vha::Linear<TypeParam> hugging_face{Weight<TypeParam>::view_out_in(heads.data(), 2, 4)};
  EXPECT_EQ(out_in(vha::fold_premix<TypeParam>(hugging_face, premix).weight), rows);
  const RowMajorMatrix<TypeParam> turned = heads.transpose();
  const vha::Linear<TypeParam> paddle{Weight<TypeParam>::view_in_out(turned.data(), 2, 4)};
  EXPECT_EQ(out_in(vha::fold_premix<TypeParam>(paddle, premix).weight), rows);

  // Premix as a functor puts the heads in the same order.
  vha::Tensor4<vha::Compute<TypeParam>> physical(1, 1, 2, 2);
  physical.setValues({{{{1, 2}, {5, 7}}}});
  const auto virtual_heads = premix(physical);
  const std::vector<double> expected = {1, 2, 5, 7, 8, 2, 31, 7};
  EXPECT_EQ(std::vector<double>(virtual_heads.data(), virtual_heads.data() + 8), expected);
}

// M = I + B·Aᵀ with one entry off the diagonal: head 1 gets head 0's output, not the other way.
TYPED_TEST(Fault01HeadOrder, PostmixMixesIntoTheHeadOfB) {
  const vha::Postmix<TypeParam> postmix{weight<TypeParam>(3, 1, {1, 0, 0}),
                                        weight<TypeParam>(3, 1, {0, 1, 0})};
  vha::Tensor4<vha::Compute<TypeParam>> heads(1, 1, 3, 2);
  heads.setValues({{{{1, 2}, {10, 20}, {100, 200}}}});
  const auto mixed = postmix(heads);
  const std::vector<double> expected = {1, 2, 11, 22, 100, 200};
  EXPECT_EQ(std::vector<double>(mixed.data(), mixed.data() + 6), expected);

  // Folded, block 0 of W_O is what reads head 0, directly and by way of head 1.
  const vha::Linear<TypeParam> output{weight<TypeParam>(6, 1, {1, 2, 10, 20, 100, 200})};
  EXPECT_EQ(elements(vha::fold_postmix<TypeParam>(output, postmix).weight),
            (std::vector<double>{11, 22, 10, 20, 100, 200}));
}

naive::Vector transposed(const naive::Vector& matrices, Index size) {
  naive::Vector result;
  const auto area = static_cast<std::size_t>(size * size);
  for (std::size_t start = 0; start < matrices.size(); start += area) {
    const Eigen::Map<const RowMajorMatrix<double>> map(matrices.data() + start, size, size);
    const RowMajorMatrix<double> turned = map.transpose();
    result.insert(result.end(), turned.data(), turned.data() + turned.size());
  }
  return result;
}

/// The layer whose virtual head `i·G + g`, not `g·H' + i`, is Q_i·P_g, without a Premix.
naive::Layer head_major(const naive::Layer& layer) {
  naive::Layer wrong = naive::fold(layer);
  const auto width = static_cast<Index>(layer.head_dim);
  const auto heads = static_cast<Index>(layer.query_heads());
  const auto groups = static_cast<Index>(layer.kv_heads);
  const auto rows = static_cast<Index>(layer.hidden);
  auto wq = matrix<double>(rows, heads * width, wrong.wq);
  const auto right = wq;
  for (Index g = 0; g < groups; ++g) {
    for (Index i = 0; i < heads / groups; ++i) {
      wq.middleCols((i * groups + g) * width, width) =
          right.middleCols((g * (heads / groups) + i) * width, width);
    }
  }
  wrong.wq.assign(wq.data(), wq.data() + wq.size());
  return wrong;
}

// What the wrong readings compute, so that the right one cannot pass by chance.
TEST(Fault01HeadOrderOfALayer, NoWrongReadingAgrees) {
  Random random(3);
  for (const laws::LayerShape& shape :
       {laws::LayerShape{"2 x 3", 11, 6, 2, 3}, {"3 x 2", 7, 4, 3, 2}, {"2 x 2", 5, 8, 2, 2}}) {
    const naive::Layer right = laws::random_layer<double>(shape, random);
    naive::Layer premix_transposed = right, postmix_transposed = right;
    premix_transposed.premix = transposed(right.premix, static_cast<Index>(right.head_dim));
    std::swap(postmix_transposed.postmix_a, postmix_transposed.postmix_b);
    const auto tokens = laws::random_tokens<double>(9, right, random);
    const auto x = laws::matrix_of<double>(tokens, 9);
    const auto distance = [&](const auto& outputs, const naive::Layer& layer) {
      return largest_difference(outputs,
                                naive::forward(layer, tokens, laws::counted_positions(9)).out);
    };
    const auto layer = laws::library_layer<vha::VhaAttention<double>>(right);
    for (const auto& outputs :
         {layer.forward(x), vha::fold_vha(layer).forward(x), vha::fold_premix(layer).forward(x),
          vha::fold_postmix(layer).forward(x)}) {
      EXPECT_LE(distance(outputs, right), 1e-12) << shape.name;
      EXPECT_GT(distance(outputs, premix_transposed), 1e-2) << shape.name;
      EXPECT_GT(distance(outputs, postmix_transposed), 1e-2) << shape.name;
      EXPECT_GT(distance(outputs, head_major(right)), 1e-2) << shape.name;
    }
  }
}

}  // namespace
}  // namespace faults
