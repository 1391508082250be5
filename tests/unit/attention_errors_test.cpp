// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>
#include <vha/attention/attention.hpp>

namespace {

using vha::AttentionConfig;
using vha::GqaAttention;
using vha::Index;
using vha::Linear;
using vha::SigmoidGate;
using vha::VhaAttention;
using vha::Weight;

// H' = 3 physical heads of width 5, in 2 groups.
constexpr AttentionConfig config = {.hidden = 10, .head_dim = 4, .query_heads = 6, .kv_heads = 2};
using Layer = VhaAttention<float, SigmoidGate<float>>;
using Weights = Layer::Weights;

Weight<float> zeros(Index rows, Index cols) {
  return Eigen::MatrixXf::Zero(rows, cols);
}

Weights good_weights() {
  Weights w;
  w.query = {zeros(10, 3 * 5), zeros(1, 15)};
  w.key = {zeros(10, 2 * 4), zeros(1, 8)};
  w.value = {zeros(10, 2 * 4), zeros(1, 8)};
  w.output = {zeros(6 * 4, 10), zeros(1, 10)};
  w.q_norm = zeros(1, 4);
  w.k_norm = zeros(1, 4);
  w.premix.maps = {zeros(5, 4), zeros(5, 4)};
  w.postmix = {zeros(6, 3), zeros(6, 3)};
  w.gate.projection = {zeros(10, 24), zeros(1, 24)};
  return w;
}

template <class AnyLayer = Layer>
std::string error_of(typename AnyLayer::Weights weights, const AttentionConfig& c = config) {
  try {
    AnyLayer layer(c, std::move(weights));
  } catch (const vha::Error& error) {
    return error.what();
  }
  return "no vha::Error";
}

struct Refusal {
  std::string text;
  std::function<void(Weights&)> spoil;
};

TEST(AttentionErrors, GoodWeightsAreTaken) {
  EXPECT_EQ(error_of(good_weights()), "no vha::Error");
  Weights bare = good_weights();
  for (auto* linear : {&bare.query, &bare.key, &bare.value, &bare.output, &bare.gate.projection}) {
    linear->bias = {};
  }
  bare.q_norm = bare.k_norm = {};
  EXPECT_EQ(error_of(bare), "no vha::Error");
}

TEST(AttentionErrors, EachWeightIsNamedWithBothShapes) {
  const std::vector<Refusal> refusals = {
      {"query.weight: expected [10, 15], got [15, 10]",
       [](Weights& w) { w.query.weight = zeros(15, 10); }},
      {"query.weight: expected [10, 15], got [10, 30]",  // as wide as all virtual heads
       [](Weights& w) { w.query.weight = zeros(10, 30); }},
      {"query.weight: expected [10, 15], got [0, 0]", [](Weights& w) { w.query.weight = {}; }},
      {"query.bias: expected [1, 15], got [1, 24]",
       [](Weights& w) { w.query.bias = zeros(1, 24); }},
      {"query.bias: expected [1, 15], got [3, 5]", [](Weights& w) { w.query.bias = zeros(3, 5); }},
      {"key.weight: expected [10, 8], got [8, 10]",
       [](Weights& w) { w.key.weight = zeros(8, 10); }},
      {"key.bias: expected [1, 8], got [1, 4]", [](Weights& w) { w.key.bias = zeros(1, 4); }},
      {"value.weight: expected [10, 8], got [10, 4]",
       [](Weights& w) { w.value.weight = zeros(10, 4); }},
      {"value.bias: expected [1, 8], got [1, 10]", [](Weights& w) { w.value.bias = zeros(1, 10); }},
      {"output.weight: expected [24, 10], got [10, 24]",
       [](Weights& w) { w.output.weight = zeros(10, 24); }},
      {"output.bias: expected [1, 10], got [1, 24]",
       [](Weights& w) { w.output.bias = zeros(1, 24); }},
      {"q_norm: expected [1, 4], got [1, 24]",  // a norm over all heads together
       [](Weights& w) { w.q_norm = zeros(1, 24); }},
      {"k_norm: expected [1, 4], got [2, 4]", [](Weights& w) { w.k_norm = zeros(2, 4); }},
      {"q_norm and k_norm: expected both or neither, got k_norm alone",
       [](Weights& w) { w.q_norm = {}; }},
      {"q_norm and k_norm: expected both or neither, got q_norm alone",
       [](Weights& w) { w.k_norm = {}; }},
      {"premix.maps.size() (one map for each of kv_heads): expected 2, got 1",
       [](Weights& w) { w.premix.maps.pop_back(); }},
      {"premix.maps.size() (one map for each of kv_heads): expected 2, got 0",
       [](Weights& w) { w.premix.maps.clear(); }},
      {"premix.maps[1]: expected [5, 4], got [4, 4]",
       [](Weights& w) { w.premix.maps[1] = zeros(4, 4); }},
      {"premix.maps[0]: expected [5, 4], got [5, 5]",
       [](Weights& w) { w.premix.maps[0] = zeros(5, 5); }},
      {"postmix.a: expected [6, 3], got [3, 3]", [](Weights& w) { w.postmix.a = zeros(3, 3); }},
      {"postmix.a: expected [6, rank], rank 1 or more, got [0, 0]",
       [](Weights& w) { w.postmix.a = {}; }},
      {"postmix.b: expected [6, 3], got [6, 2]", [](Weights& w) { w.postmix.b = zeros(6, 2); }},
      {"gate.projection.weight: expected [10, 24], got [10, 6]",
       [](Weights& w) { w.gate.projection.weight = zeros(10, 6); }},
      {"gate.projection.bias: expected [1, 24], got [1, 6]",
       [](Weights& w) { w.gate.projection.bias = zeros(1, 6); }},
  };
  for (const auto& refusal : refusals) {
    Weights weights = good_weights();
    refusal.spoil(weights);
    EXPECT_EQ(error_of(weights), refusal.text);
  }
}

TEST(AttentionErrors, APlainLayerHasAWideQuery) {
  const auto weights = [](Index query_channels) {
    GqaAttention<float>::Weights w;
    w.query.weight = zeros(10, query_channels);
    w.key.weight = w.value.weight = zeros(10, 8);
    w.output.weight = zeros(24, 10);
    return w;
  };
  EXPECT_EQ(error_of<GqaAttention<float>>(weights(24)), "no vha::Error");
  EXPECT_EQ(error_of<GqaAttention<float>>(weights(12)),
            "query.weight: expected [10, 24], got [10, 12]");
}

TEST(AttentionErrors, TheConfigurationIsCheckedFirst) {
  AttentionConfig bad = config;
  bad.window = -1;
  EXPECT_EQ(error_of({}, bad), "window: expected 0 (none) or more, got -1");
}

TEST(AttentionErrors, SizesOfTheTypeMustBeThoseOfTheConfiguration) {
  using Fitting = VhaAttention<float, SigmoidGate<float>, vha::Identity, vha::Identity, 4, 3>;
  using Wider = VhaAttention<float, SigmoidGate<float>, vha::Identity, vha::Identity, 8>;
  using MoreHeads =
      VhaAttention<float, SigmoidGate<float>, vha::Identity, vha::Identity, Eigen::Dynamic, 6>;
  EXPECT_EQ(error_of<Fitting>(good_weights()), "no vha::Error");
  EXPECT_EQ(error_of<Wider>(good_weights()), "head_dim (of the type): expected 8, got 4");
  EXPECT_EQ(error_of<MoreHeads>(good_weights()),
            "query_heads / kv_heads (of the type): expected 6, got 3");
}

}  // namespace
