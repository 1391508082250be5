// SPDX-License-Identifier: Apache-2.0
// Faults: the gradient of a shared head that misses some of its users, a row that sees no key and
// makes gradients NaN or moves those of other rows, and logits so far apart that the weights made
// again in the backward pass overflow.

#include "fault_support.hpp"

namespace faults {
namespace {

using vha::AttentionConfig;
using vha::AttentionGradients;
using Matrix = RowMajorMatrix<double>;

template <class Layer>
AttentionGradients<double> gradients_of(const Layer& layer, const Matrix& x,
                                        const Matrix& upstream) {
  vha::AttentionTrace<double> trace;
  typename Layer::Workspace forward_workspace;
  Matrix out(x.rows(), x.cols()), dx(x.rows(), x.cols());
  layer.forward_into(x, out, forward_workspace, {}, &trace);
  auto gradients = AttentionGradients<double>::zeros_like(layer);
  vha::AttentionBackwardWorkspace<double> workspace;
  vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace);
  return gradients;
}

void expect_near(const Matrix& actual, const Matrix& expected) {
  EXPECT_LE((actual - expected).cwiseAbs().maxCoeff(), 1e-12 * expected.cwiseAbs().maxCoeff());
}

// The folded layer knows nothing of the maps: its gradients dW' and dW_O' pass through the fold's own
// transpose. dW_Q^(i) = Σ_g dW'_(g,i)·P_gᵀ, dP_g = Σ_i W_Q^(i)ᵀ·dW'_(g,i); and with W_O'_j = Σ_i M_ij W_O_i,
// dM_ij = <W_O_i, dW_O'_j>, dA = dMᵀ·B, dB = dM·A.
TEST(Fault19Backward, SharedHeadsSumOverTheirUsers) {
  constexpr Index groups = 3, heads = 2, d = 4, hidden = 9, rank = 2, tokens = 11;
  const AttentionConfig config{
      .hidden = hidden, .head_dim = d, .query_heads = groups * heads, .kv_heads = groups};
  Random random(1);
  const auto matrix = [&](Index rows, Index cols) {
    Matrix result(rows, cols);
    for (Index k = 0; k < result.size(); ++k) result.data()[k] = random();
    return result;
  };
  vha::VhaAttention<double>::Weights weights{
      .query = {matrix(hidden, heads * d)},
      .key = {matrix(hidden, groups * d)},
      .value = {matrix(hidden, groups * d)},
      .output = {matrix(groups * heads * d, hidden)},
      .q_norm = matrix(1, d),
      .k_norm = matrix(1, d),
      .premix = {{matrix(d, d), matrix(d, d), matrix(d, d)}},
      .postmix = {matrix(groups * heads, rank), matrix(groups * heads, rank)}};
  const vha::VhaAttention<double> layer(config, weights);
  const auto folded = vha::fold_vha(layer);
  const Matrix x = matrix(tokens, hidden), upstream = matrix(tokens, hidden);
  const auto of_layer = gradients_of(layer, x, upstream);
  const auto of_folded = gradients_of(folded, x, upstream);

  const Matrix query = weights.query.weight.to<double>();
  Matrix dquery = Matrix::Zero(hidden, heads * d);
  for (Index g = 0; g < groups; ++g) {
    const Matrix map = weights.premix.maps[static_cast<std::size_t>(g)].to<double>();
    Matrix dmap = Matrix::Zero(d, d);
    for (Index i = 0; i < heads; ++i) {
      const Matrix block = of_folded.query.weight.middleCols((g * heads + i) * d, d);
      dquery.middleCols(i * d, d) += block * map.transpose();
      dmap += query.middleCols(i * d, d).transpose() * block;
    }
    expect_near(of_layer.premix[static_cast<std::size_t>(g)], dmap);
  }
  expect_near(of_layer.query.weight, dquery);

  const Matrix output = weights.output.weight.to<double>();
  const Matrix mixing = weights.postmix.dense();
  Matrix dmixing(groups * heads, groups * heads);
  Matrix doutput = Matrix::Zero(output.rows(), hidden);
  for (Index i = 0; i < groups * heads; ++i) {
    for (Index j = 0; j < groups * heads; ++j) {
      const Matrix block = of_folded.output.weight.middleRows(j * d, d);
      dmixing(i, j) = output.middleRows(i * d, d).cwiseProduct(block).sum();
      doutput.middleRows(i * d, d) += mixing(i, j) * block;
    }
  }
  expect_near(of_layer.output.weight, doutput);
  expect_near(of_layer.postmix_a, dmixing.transpose() * weights.postmix.b.to<double>());
  expect_near(of_layer.postmix_b, dmixing * weights.postmix.a.to<double>());
  expect_near(of_layer.key.weight, of_folded.key.weight);
  expect_near(of_layer.value.weight, of_folded.value.weight);
  expect_near(of_layer.q_norm, of_folded.q_norm);
}

/// One group of two heads over some keys: the core and its gradients.
template <class T>
struct Core {
  Index tokens, keys, head_dim = 6;
  std::vector<T> query, key, value, upstream;
  std::vector<Position> query_positions, key_positions;
  std::vector<T> out, softmax, dquery, dkey, dvalue;
  double scale = 1;

  Core(Index tokens_, Index keys_) : tokens(tokens_), keys(keys_) {
    Random random(4);
    const auto fill = [&](std::vector<T>& numbers, Index count) {
      numbers.resize(static_cast<std::size_t>(count));
      for (T& number : numbers) number = static_cast<T>(random());
    };
    fill(query, tokens * 2 * head_dim);
    fill(key, keys * head_dim);
    fill(value, keys * head_dim);
    fill(upstream, tokens * 2 * head_dim);
    for (Index k = 0; k < tokens; ++k) query_positions.push_back(k);
    for (Index k = 0; k < keys; ++k) key_positions.push_back(k);
  }

  void run() {
    out.assign(query.size(), T(-7));
    softmax.assign(static_cast<std::size_t>(tokens * 4), T(-7));
    dquery.assign(query.size(), T(0));
    dkey.assign(key.size(), T(0));
    dvalue.assign(value.size(), T(0));
    const auto queries = [&](auto& numbers, Index width) {
      return vha::token_major_heads(numbers.data(), tokens, 1, 2, width);
    };
    const auto read = [](auto heads) { return vha::HeadsView<const T>(heads); };
    const auto of_keys = [&](auto& numbers) {
      return vha::token_major_heads(numbers.data(), keys, 1, 1, head_dim);
    };
    const vha::CausalAttentionOptions options{scale, {}};
    vha::CausalAttentionWorkspace<T> workspace;
    vha::causal_attention(read(queries(query, head_dim)), read(of_keys(key)), read(of_keys(value)),
                          query_positions, key_positions, options, queries(out, head_dim),
                          workspace, queries(softmax, 2));
    vha::CausalAttentionBackwardWorkspace<T> backward_workspace;
    vha::causal_attention_backward<T>(
        read(queries(query, head_dim)), read(of_keys(key)), read(of_keys(value)),
        read(queries(out, head_dim)), read(queries(softmax, 2)), read(queries(upstream, head_dim)),
        query_positions, key_positions, options, queries(dquery, head_dim), of_keys(dkey),
        of_keys(dvalue), backward_workspace);
  }
};

template <class T>
class Fault07Backward : public testing::Test {};
using Computed = testing::Types<double, float>;
TYPED_TEST_SUITE(Fault07Backward, Computed);

TYPED_TEST(Fault07Backward, ARowThatSeesNothingHasNoGradientAndMovesNoOther) {
  using T = TypeParam;
  Core<T> without(4, 5), with(5, 5);
  // The same four rows, and a fifth that stands before all keys.
  for (Position& position : with.key_positions) position += 1;
  for (Position& position : without.key_positions) position += 1;
  without.query_positions = {1, 2, 3, 9};
  with.query_positions = {1, 2, 3, 9, 0};
  without.value = with.value;
  without.key = with.key;
  std::copy_n(with.query.begin(), without.query.size(), without.query.begin());
  std::copy_n(with.upstream.begin(), without.upstream.size(), without.upstream.begin());
  without.run();
  with.run();
  for (std::size_t c = without.query.size(); c < with.query.size(); ++c) {
    EXPECT_EQ(with.out[c], T(0));
    EXPECT_EQ(with.dquery[c], T(0));
  }
  for (std::size_t c = 0; c < without.query.size(); ++c) {
    EXPECT_EQ(bits(with.dquery[c]), bits(without.dquery[c]));
  }
  for (std::size_t c = 0; c < with.key.size(); ++c) {
    EXPECT_EQ(bits(with.dkey[c]), bits(without.dkey[c]));
    EXPECT_EQ(bits(with.dvalue[c]), bits(without.dvalue[c]));
  }
}

TYPED_TEST(Fault07Backward, KeysThatNobodySeesHaveNoGradient) {
  using T = TypeParam;
  Core<T> core(3, 200);  // more keys than a block holds
  core.run();
  for (std::size_t c = static_cast<std::size_t>(3 * core.head_dim); c < core.key.size(); ++c) {
    EXPECT_EQ(core.dkey[c], T(0));
    EXPECT_EQ(core.dvalue[c], T(0));
  }
}

TYPED_TEST(Fault07Backward, LogitsFarApartGiveFiniteGradients) {
  using T = TypeParam;
  for (const double size : {1e3, 2e6}) {
    Core<T> core(6, 6);
    core.scale = size;
    core.run();
    for (const auto* gradient : {&core.dquery, &core.dkey, &core.dvalue}) {
      for (const T value : *gradient) EXPECT_TRUE(vha::is_finite(value)) << size;
    }
    // The winner takes it all: each row's upstream goes to one value whole.
    T sum = 0, given = 0;
    for (const T value : core.dvalue) sum += value;
    for (const T value : core.upstream) given += value;
    EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(given), 1e-4);
  }
}

}  // namespace
}  // namespace faults
