// SPDX-License-Identifier: Apache-2.0
#pragma once

// Fault: Eigen members that want an aligned address, maps at addresses that are not, expressions
// that refer to what is gone, and state that threads share. Compiled as usual and with -O0, where
// nothing is optimised away.

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "fault_support.hpp"

namespace faults {
namespace {

using FixedLayer =
    vha::VhaAttention<float, vha::NoGate, vha::Identity, vha::Identity, 8, 3>;  // sizes in the type
template <class Layer>
class Fault18Eigen : public testing::Test {
 protected:
  using S = typename Layer::Scalar;
  using T = typename Layer::T;
  using Matrix = RowMajorMatrix<T>;

  Layer make_layer() { return random_layer<Layer>(config_, random_); }
  Matrix make_x(Index tokens = 7) { return random_matrix<T>(tokens, config_.hidden, random_); }

  Random random_{1};
  vha::AttentionConfig config_{.hidden = 9, .head_dim = 8, .query_heads = 6, .kv_heads = 2};
};
using Layers = testing::Types<vha::VhaAttention<double>, FixedLayer, vha::GqaAttention<float>,
                              vha::VhaAttention<vha::bfloat16>>;
TYPED_TEST_SUITE(Fault18Eigen, Layers);

/// Takes a layer by value, as users do.
template <class Layer, class X>
auto forward_by_value(Layer layer, X x) {
  return layer.forward(x);
}

TYPED_TEST(Fault18Eigen, LayersWhereverTheyStand) {
  const auto x = this->make_x();
  std::vector<TypeParam> layers;
  std::vector<typename TestFixture::Matrix> expected;
  for (int k = 0; k < 20; ++k) {  // the vector moves them again and again
    layers.push_back(this->make_layer());
    expected.push_back(layers.back().forward(x));
  }
  for (std::size_t k = 0; k < layers.size(); ++k) {
    EXPECT_TRUE(same_bits(layers[k].forward(x), expected[k]));
    EXPECT_TRUE(same_bits(forward_by_value(layers[k], x), expected[k]));
    EXPECT_TRUE(same_bits(std::make_unique<TypeParam>(layers[k])->forward(x), expected[k]));
    EXPECT_TRUE(same_bits(std::make_shared<const TypeParam>(layers[k])->forward(x), expected[k]));
  }
  layers.erase(layers.begin());
  EXPECT_TRUE(same_bits(layers.front().forward(x), expected[1]));
  layers.front() = layers.back();
  layers.pop_back();
  EXPECT_TRUE(same_bits(layers.front().forward(x), expected.back()));
  auto moved = std::move(layers.front());
  layers.clear();
  EXPECT_TRUE(same_bits(moved.forward(x), expected.back()));
  std::map<int, std::optional<TypeParam>> named;
  named.emplace(3, std::move(moved));
  EXPECT_TRUE(same_bits(named.at(3)->forward(x), expected.back()));
}

TYPED_TEST(Fault18Eigen, CachesAndWorkspacesMoveToo) {
  const auto layer = this->make_layer();
  const auto x = this->make_x();
  std::vector<vha::KvCache<typename TestFixture::S>> caches;
  std::vector<typename TypeParam::Workspace> workspaces;
  typename TestFixture::Matrix first(4, 9), second(3, 9);
  for (int k = 0; k < 9; ++k) {
    caches.emplace_back(layer.config(), 1, 7);
    workspaces.emplace_back();
    layer.forward_into(x.topRows(4), caches.back(), first, workspaces.back());
  }
  const auto expected = layer.forward(x.bottomRows(3), caches.front());
  for (std::size_t k = 1; k < 9; ++k) {
    auto cache = std::make_unique<vha::KvCache<typename TestFixture::S>>(std::move(caches[k]));
    layer.forward_into(x.bottomRows(3), *cache, second, workspaces[k]);
    EXPECT_TRUE(same_bits(second, expected));
  }
}

// The same numbers in every form that a user holds them in, at addresses 4 bytes off too.
TYPED_TEST(Fault18Eigen, InputsInEveryForm) {
  using Number = typename TestFixture::T;
  using Rows = typename TestFixture::Matrix;
  using Cols = Eigen::Matrix<Number, Eigen::Dynamic, Eigen::Dynamic>;
  const auto layer = this->make_layer();
  const Rows x = this->make_x();
  const Cols turned = x;
  const auto expected = layer.forward(x);
  EXPECT_TRUE(same_bits(layer.forward(turned), expected));
  EXPECT_TRUE(same_bits(layer.forward(Eigen::Ref<const Rows>(x)), expected));
  EXPECT_TRUE(same_bits(layer.forward(Eigen::Ref<const Cols>(turned)), expected));

  Rows large = Rows::Constant(20, 30, nan_of<Number>);
  large.block(3, 5, 7, 9) = x;
  EXPECT_TRUE(same_bits(layer.forward(large.block(3, 5, 7, 9)), expected));

  // One element, 4 or 8 bytes, behind an aligned address.
  std::vector<Number> memory(2 * 63 + 2, nan_of<Number>);
  std::copy_n(x.data(), 63, memory.data() + 1);
  EXPECT_TRUE(same_bits(layer.forward(Eigen::Map<const Rows>(memory.data() + 1, 7, 9)), expected));
  vha::Tensor3<Number> tensor(1, 7, 9);
  std::copy_n(x.data(), 63, tensor.data());
  EXPECT_TRUE(same_bits(layer.forward(tensor), expected));
  const Eigen::TensorMap<const vha::Tensor3<Number>> map(memory.data() + 1, 1, 7, 9);
  EXPECT_TRUE(same_bits(layer.forward(map), expected));
  const Eigen::Tensor<Number, 3> turned_tensor =
      tensor.swap_layout().shuffle(Eigen::array<int, 3>{2, 1, 0});
  EXPECT_TRUE(same_bits(layer.forward(turned_tensor), expected));
  for (Index k = 0; k < 63; ++k) {
    memory[static_cast<std::size_t>(2 * k + 1)] = x.data()[k];
  }
  const Eigen::Map<const Rows, 0, Eigen::Stride<Eigen::Dynamic, 2>> spread(
      memory.data() + 1, 7, 9, Eigen::Stride<Eigen::Dynamic, 2>(18, 2));
  EXPECT_TRUE(same_bits(layer.forward(spread), expected));
}

TYPED_TEST(Fault18Eigen, OutputsInEveryForm) {
  using Number = typename TestFixture::T;
  using Rows = typename TestFixture::Matrix;
  const auto layer = this->make_layer();
  const Rows x = this->make_x();
  const Rows expected = layer.forward(x);
  typename TypeParam::Workspace workspace;
  Eigen::Matrix<Number, Eigen::Dynamic, Eigen::Dynamic> cols(7, 9);
  layer.forward_into(x, cols, workspace);
  EXPECT_TRUE(same_bits(Rows(cols), expected));
  std::vector<Number> memory(65, Number(42));
  layer.forward_into(x, Eigen::Map<Rows>(memory.data() + 1, 7, 9), workspace);
  EXPECT_TRUE(same_bits(Eigen::Map<Rows>(memory.data() + 1, 7, 9), expected));
  EXPECT_EQ(memory.front(), Number(42));
  EXPECT_EQ(memory.back(), Number(42));
  Rows large = Rows::Constant(20, 30, Number(42));
  layer.forward_into(x, large.block(3, 5, 7, 9), workspace);
  EXPECT_TRUE(same_bits(Rows(large.block(3, 5, 7, 9)), expected));
  large.block(3, 5, 7, 9).setConstant(Number(42));
  EXPECT_TRUE((large.array() == Number(42)).all());
}

// Weights stand in files at any byte.
TYPED_TEST(Fault18Eigen, WeightsAtAnyAddress) {
  using Scalar = typename TestFixture::S;
  const auto layer = this->make_layer();
  const auto x = this->make_x();
  const auto expected = layer.forward(x);
  for (const std::size_t offset : {4U, 1U, 2U}) {
    for (const bool transposed : {false, true}) {
      std::vector<std::vector<std::byte>> files;
      auto w = layer.weights();
      const auto move = [&](Weight<Scalar>& weight) {
        const Index in = weight.rows(), out = weight.cols();
        const auto source = transposed
                                ? RowMajorMatrix<Scalar>(weight.template to<Scalar>().transpose())
                                : weight.template to<Scalar>();
        auto& file = files.emplace_back(offset + sizeof(Scalar) * std::size_t(source.size()));
        std::memcpy(file.data() + offset, source.data(), file.size() - offset);
        weight = transposed ? Weight<Scalar>::view_out_in(file.data() + offset, in, out)
                            : Weight<Scalar>::view_in_out(file.data() + offset, in, out);
      };
      for (auto* linear : {&w.query, &w.key, &w.value, &w.output}) {
        move(linear->weight);
        move(linear->bias);
      }
      move(w.q_norm);
      move(w.k_norm);
      if constexpr (TypeParam::Weights::has_premix) {
        for (auto& map : w.premix.maps) move(map);
        move(w.postmix.a);
        move(w.postmix.b);
      }
      const TypeParam there(layer.config(), w);
      EXPECT_TRUE(same_bits(there.forward(x), expected));
      if constexpr (TypeParam::Weights::has_premix) {
        EXPECT_TRUE(same_bits(vha::fold_vha(there).forward(x), vha::fold_vha(layer).forward(x)));
      }
    }
  }
}

// What `auto` holds is a result, not an expression of arguments that are gone by then.
TYPED_TEST(Fault18Eigen, ResultsOutliveTheirArguments) {
  auto layer = std::make_optional(this->make_layer());
  auto x = std::make_optional(this->make_x());
  const auto kept = *layer;
  const auto kept_x = *x;
  const auto out = layer->forward(*x);
  const auto of_temporaries = TypeParam(*layer).forward(typename TestFixture::Matrix(*x));
  const auto projected = vha::Linear<typename TestFixture::S>(kept.weights().key)(*x);
  const auto narrow = TypeParam(*layer).template cast<float>();
  x->setConstant(nan_of<typename TestFixture::T>);
  x.reset();
  layer.reset();
  EXPECT_TRUE(same_bits(out, kept.forward(kept_x)));
  EXPECT_TRUE(same_bits(of_temporaries, out));
  EXPECT_TRUE(same_bits(projected, kept.weights().key(kept_x)));
  const RowMajorMatrix<float> float_x = kept_x.template cast<float>();
  EXPECT_TRUE(same_bits(narrow.forward(float_x), kept.template cast<float>().forward(float_x)));

  if constexpr (TypeParam::Weights::has_premix) {
    const auto folded = vha::fold_vha(TypeParam(kept));
    const auto m = TypeParam(kept).weights().postmix.dense();
    EXPECT_TRUE(same_bits(folded.forward(kept_x), vha::fold_vha(kept).forward(kept_x)));
    EXPECT_TRUE(same_bits(m, kept.weights().postmix.dense()));
    using Heads = vha::Tensor4<typename TestFixture::T>;
    Heads heads(1, 2, 6, 8);
    for (Index k = 0; k < heads.size(); ++k) {
      heads.data()[k] = static_cast<typename TestFixture::T>(k % 7) / 4;
    }
    const std::vector<Position> positions = {3, 4};
    const vha::RmsNorm<typename TestFixture::S> norm{kept.weights().q_norm};
    const vha::Rope<typename TestFixture::T> rope(100, 8);
    const auto mixed = kept.weights().postmix(rope(norm(Heads(heads)), positions));
    const auto wider = kept.weights().premix(Heads(heads));
    const Heads normed = norm(heads), rotated = rope(normed, positions);
    EXPECT_TRUE(same_bits(mixed, kept.weights().postmix(rotated)));
    EXPECT_TRUE(same_bits(wider, kept.weights().premix(heads)));
  }
}

/// Threads of this process, where the system tells.
std::ptrdiff_t running_threads() {
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return error ? 0 : std::distance(begin(tasks), end(tasks));
}

TYPED_TEST(Fault18Eigen, ThreadsAgreeWithOneAndStayAsManyAsTheyAre) {
  constexpr std::size_t threads = 6;
  const auto layer = this->make_layer();
  std::vector<typename TestFixture::Matrix> inputs, expected, results(threads);
  for (std::size_t k = 0; k < threads; ++k) {
    inputs.push_back(this->make_x(40 + static_cast<Index>(k)));
    expected.push_back(layer.forward(inputs.back()));
    results[k].resize(inputs[k].rows(), 9);
  }
  const auto before = running_threads();
  std::vector<std::ptrdiff_t> seen(threads);
  std::vector<int> differences(threads);
  std::vector<std::thread> running;
  for (std::size_t k = 0; k < threads; ++k) {
    running.emplace_back([&, k] {
      typename TypeParam::Workspace workspace;
      for (int again = 0; again < 20; ++again) {
        vha::KvCache<typename TestFixture::S> cache(layer.config(), 1, inputs[k].rows());
        results[k].setZero();
        layer.forward_into(inputs[k], results[k], workspace);
        differences[k] += !same_bits(results[k], expected[k]);
        layer.forward_into(inputs[k], cache, results[k], workspace);
        seen[k] = std::max(seen[k], running_threads());
      }
    });
  }
  for (auto& thread : running) thread.join();
  for (std::size_t k = 0; k < threads; ++k) {
    EXPECT_EQ(differences[k], 0);
    EXPECT_LE(seen[k], before + static_cast<std::ptrdiff_t>(threads));
  }
}

}  // namespace
}  // namespace faults
