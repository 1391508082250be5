// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layers that ranks run together, against the same layers run by one process. The checks are the same for
// ranks that are threads and for ranks of MPI.

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>
#include <vha/vha.hpp>

#include "fixtures.hpp"
#include "run.hpp"

namespace parallel {

using laws::Array;
using laws::array_of;
using laws::LayerShape;
using vha::Index;
using Matrix = vha::RowMajorMatrix<double>;
using Tensor = vha::Tensor3<double>;

inline constexpr double tolerance = 1e-12;

using Vha = vha::VhaAttention<double>;
using Gated = vha::VhaAttention<double, vha::SigmoidGate<double>>;
using Curved = vha::VhaAttention<double, vha::NoGate, vha::Silu, vha::Silu>;

/// hidden, head_dim, physical heads, K/V heads, and what else is awkward.
inline const LayerShape shapes[] = {
    {.name = "two groups of four", .hidden = 11, .head_dim = 6, .physical_heads = 4, .kv_heads = 2},
    {.name = "one group, no norm",
     .hidden = 7,
     .head_dim = 8,
     .physical_heads = 4,
     .kv_heads = 1,
     .qk_norm = false},
    {.name = "three groups, biases",
     .hidden = 10,
     .head_dim = 4,
     .physical_heads = 2,
     .kv_heads = 3,
     .biases = true},
    {.name = "four groups of one, no norm",
     .hidden = 9,
     .head_dim = 4,
     .physical_heads = 1,
     .kv_heads = 4,
     .postmix_rank = 1,
     .qk_norm = false},
    {.name = "narrow physical heads, biases, window, partial rotary",
     .hidden = 13,
     .head_dim = 8,
     .physical_heads = 4,
     .kv_heads = 2,
     .physical_head_dim = 3,
     .postmix_rank = 5,
     .biases = true,
     .window = 4,
     .rotary_dim = 4,
     .value_scale = -1.75},
};

inline bool fits(const LayerShape& shape, Index ranks) {
  return vha::splits_evenly(static_cast<Index>(shape.physical_heads * shape.kv_heads),
                            static_cast<Index>(shape.kv_heads), ranks);
}

/// Random numbers, the same on every rank.
inline Tensor random_tensor(Index batch, Index tokens, Index channels, laws::Random& random) {
  Tensor tensor(batch, tokens, channels);
  for (Index k = 0; k < tensor.size(); ++k) tensor.data()[k] = random();
  return tensor;
}

/// The part of a whole weight that a rank has, by name: where AttentionWeights' table says it is.
inline Matrix part_of(const std::string& name, const Matrix& whole, const vha::AttentionConfig& c,
                      bool has_premix, Index rank, Index ranks) {
  const Index heads = c.query_heads / ranks, first = rank * heads;
  const Index kv = std::max<Index>(c.kv_heads / ranks, 1);
  const Index first_kv = first / c.group_size();
  const auto cols_of = [&](Index all, Index from, Index count) {
    const Index width = whole.cols() / all;
    return Matrix(whole.middleCols(from * width, count * width));
  };
  const std::string_view view(name);
  if (view.starts_with("query") && has_premix) {
    return cols_of(c.group_size(), first % c.group_size(), std::min(heads, c.group_size()));
  }
  if (view.starts_with("query") || view.starts_with("gate")) {
    return cols_of(c.query_heads, first, heads);
  }
  if (view.starts_with("key") || view.starts_with("value")) {
    return cols_of(c.kv_heads, first_kv, kv);
  }
  if (name == "output.weight") return whole.middleRows(first * c.head_dim, heads * c.head_dim);
  if (view.starts_with("postmix")) return whole.middleRows(first, heads);
  return whole;
}

struct Gradients {
  Tensor out, dx;
  vha::AttentionGradients<double> weights;
};

/// Forward and backward; the weights' gradients are added to ones.
template <class Layer>
Gradients run_backward(const Layer& layer, const Tensor& x, const Tensor& upstream,
                       const vha::TokenLayout& layout = {}) {
  Gradients result{laws::poisoned_like(x), laws::poisoned_like(x),
                   vha::AttentionGradients<double>::zeros_like(layer)};
  result.weights.for_each(
      layer, [](const std::string&, const auto&, Matrix& gradient) { gradient.setOnes(); });
  vha::AttentionTrace<double> trace;
  typename Layer::Workspace workspace;
  layer.forward_into(x, result.out, workspace, layout, &trace);
  vha::AttentionBackwardWorkspace<double> backward_workspace;
  vha::attention_backward(layer, x, trace, upstream, result.dx, result.weights, backward_workspace,
                          layout);
  return result;
}

template <class Layer, class Comm>
void check_backward(const Layer& whole, Comm& communicator, const Tensor& x, const Tensor& upstream,
                    const vha::TokenLayout& layout) {
  const vha::ParallelAttention part(whole, communicator);
  Gradients expected = run_backward(whole, x, upstream, layout);
  Gradients actual = run_backward(part, x, upstream, layout);
  EXPECT_TRUE(close(array_of(actual.out), array_of(expected.out), tolerance));
  EXPECT_TRUE(close(array_of(actual.dx), array_of(expected.dx), tolerance));
  const auto& config = whole.config();
  std::map<std::string, Matrix> by_name;
  expected.weights.for_each(whole, [&](const std::string& name, const auto&, Matrix& gradient) {
    by_name[name] = gradient;
  });
  actual.weights.for_each(part, [&](std::string name, const auto&, Matrix& gradient) {
    if (name.starts_with("premix")) {
      const Index group = part.slice().first_kv_head + std::stol(name.substr(7));
      name = vha::text("premix[", group, "]");
    }
    const Matrix mine = part_of(name, by_name.at(name), config, Layer::Weights::has_premix,
                                communicator.rank(), communicator.size());
    // Relative to the largest of the whole weight's.
    const double largest = by_name.at(name).cwiseAbs().maxCoeff();
    ASSERT_EQ(gradient.rows(), mine.rows()) << name;
    ASSERT_EQ(gradient.cols(), mine.cols()) << name;
    EXPECT_LE((gradient - mine).cwiseAbs().maxCoeff(), tolerance * largest) << name;
  });
}

/// Prefill and decode, each rank with a cache of its K/V heads alone.
template <class Layer, class Comm>
void check_decode(const Layer& whole, Comm& communicator, const Matrix& x) {
  const vha::ParallelAttention part(whole, communicator);
  vha::KvCache<double> whole_cache(whole.config(), 1, x.rows()), cache(part.config(), 1, x.rows());
  std::vector<Index> chunks{4, 0};
  chunks.insert(chunks.end(), static_cast<std::size_t>(x.rows() - 4), 1);
  EXPECT_TRUE(close(laws::run_in_chunks(part, x, cache, chunks),
                    laws::run_in_chunks(whole, x, whole_cache, chunks), tolerance));
  const Index copies = std::max<Index>(communicator.size() / whole.config().kv_heads, 1);
  EXPECT_EQ(cache.bytes_used() * communicator.size(), whole_cache.bytes_used() * copies);
}

/// What is exchanged against the cost header's formulas, to the byte.
template <class Layer, class Comm>
void check_bytes(const Layer& whole, Comm& communicator, vha::LayerForm form, Index postmix_rank,
                 Index physical_head_dim, const Tensor& x, const Tensor& upstream,
                 const vha::TokenLayout& layout, Index real_tokens) {
  auto sizes = vha::LayerSizes::of(whole.config(), postmix_rank);
  sizes.physical_head_dim = physical_head_dim;
  const Index ranks = communicator.size();
  vha::CountedCommunicator counted(communicator);
  const vha::ParallelAttention part(whole, counted);
  part.forward(x, layout);
  EXPECT_EQ(counted.bytes(),
            real_tokens * vha::exchanged_bytes_per_token(sizes, form, ranks, sizeof(double)));
  EXPECT_EQ(counted.sums(), ranks == 1 ? 0 : vha::has_postmix(form) ? 2 : 1);
  if (whole.weights().has_qk_norm() || !whole.weights().key.bias.empty()) return;
  const Index forward = counted.bytes();
  counted.reset();
  run_backward(part, x, upstream, layout);
  EXPECT_EQ(
      counted.bytes() - forward,
      real_tokens * vha::backward_exchanged_bytes_per_token(sizes, form, ranks, sizeof(double)) +
          vha::exchanged_gradient_bytes(sizes, form, ranks, sizeof(double)));
}

template <class Layer, class Comm>
void check_layer(const Layer& whole, Comm& communicator, vha::LayerForm form, Index postmix_rank,
                 Index physical_head_dim) {
  laws::Random random(11);
  const Index hidden = whole.hidden();
  const Tensor x = random_tensor(3, 9, hidden, random);
  const Tensor upstream = random_tensor(3, 9, hidden, random);
  const std::vector<Index> lengths{9, 0, 5};
  const vha::TokenLayout padded{.lengths = lengths, .padding = vha::Padding::left};
  check_backward(whole, communicator, x, upstream, {});
  check_backward(whole, communicator, x, upstream, padded);
  const Tensor tokens = random_tensor(1, 9, hidden, random);
  check_decode(whole, communicator, Eigen::Map<const Matrix>(tokens.data(), 9, hidden));
  check_bytes(whole, communicator, form, postmix_rank, physical_head_dim, x, upstream, padded, 14);
}

/// All checks of a shape that splits over the ranks: as it is trained, with a gate, and folded.
template <class Comm>
void check_shape(const LayerShape& shape, Comm& communicator) {
  using vha::LayerForm;
  laws::Random random(5);
  const auto rank = static_cast<Index>(shape.postmix_rank);
  const auto physical = static_cast<Index>(shape.physical_head_dim);
  const auto naive_layer = laws::random_gated_layer<double>(shape, random);
  const auto trained = laws::library_layer<Vha>(naive_layer);
  check_layer(trained, communicator, LayerForm::unfolded, rank, physical);
  check_layer(vha::fold_vha(trained), communicator, LayerForm::folded, rank, 0);
  check_layer(laws::library_layer<Gated>(naive_layer), communicator, LayerForm::unfolded, rank,
              physical);
}

}  // namespace parallel
