// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>
#include <vha/core/config.hpp>

namespace {

using vha::AttentionConfig;

constexpr AttentionConfig paper = {
    .hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2};

static_assert(paper.group_size() == 8);
static_assert(paper.query_width() == 2048);
static_assert(paper.kv_width() == 256);
static_assert(paper.rotated_channels() == 128);

TEST(Config, AcceptsTheUsualLayers) {
  EXPECT_NO_THROW(paper.validate());
  // Heads that are together wider than the model, one head, partial RoPE, no eps, negative values.
  EXPECT_NO_THROW(
      (AttentionConfig{.hidden = 3, .head_dim = 2, .query_heads = 5, .kv_heads = 5}.validate()));
  AttentionConfig config = paper;
  config.rotary_dim = 32;
  config.rms_norm_eps = 0;
  config.window = 1;
  config.value_scale = -0.5;
  EXPECT_NO_THROW(config.validate());
  EXPECT_EQ(config.rotated_channels(), 32);
}

TEST(Config, DerivesWhatIsNotGiven) {
  EXPECT_DOUBLE_EQ(paper.softmax_scale(), 0.08838834764831845);  // 1 / √128
  AttentionConfig multi_query = paper;
  multi_query.kv_heads = 1;
  EXPECT_EQ(multi_query.group_size(), 16);
  EXPECT_EQ(multi_query.kv_width(), 128);
  EXPECT_EQ(multi_query.query_width(), paper.query_width());
}

struct Refusal {
  std::string text;
  std::function<void(AttentionConfig&)> spoil;
};

TEST(Config, EachRefusalNamesTheFieldAndTheValue) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::vector<Refusal> refusals = {
      {"hidden: expected 1 or more, got 0", [](auto& c) { c.hidden = 0; }},
      {"hidden: expected 1 or more, got -1", [](auto& c) { c.hidden = -1; }},
      {"head_dim: expected 1 or more, got 0", [](auto& c) { c.head_dim = 0; }},
      {"head_dim: expected 1 or more, got -2", [](auto& c) { c.head_dim = -2; }},
      {"query_heads: expected 1 or more, got 0", [](auto& c) { c.query_heads = 0; }},
      {"kv_heads: expected 1 or more, got 0", [](auto& c) { c.kv_heads = 0; }},
      {"kv_heads: expected 1 or more, got -2", [](auto& c) { c.kv_heads = -2; }},
      {"head_dim: expected an even number (it must be even for RoPE), got 127",
       [](auto& c) { c.head_dim = 127; }},
      {"query_heads: expected a multiple of kv_heads = 3, got 16", [](auto& c) { c.kv_heads = 3; }},
      {"query_heads: expected a multiple of kv_heads = 32, got 16",
       [](auto& c) { c.kv_heads = 32; }},
      {"rotary_dim: expected an even number from 0 to head_dim = 128, got 130",
       [](auto& c) { c.rotary_dim = 130; }},
      {"rotary_dim: expected an even number from 0 to head_dim = 128, got 63",
       [](auto& c) { c.rotary_dim = 63; }},
      {"rotary_dim: expected an even number from 0 to head_dim = 128, got -2",
       [](auto& c) { c.rotary_dim = -2; }},
      {"window: expected 0 (none) or more, got -1", [](auto& c) { c.window = -1; }},
      {"rope_theta: expected a positive number, got 0", [](auto& c) { c.rope_theta = 0; }},
      {"rope_theta: expected a positive number, got -1", [](auto& c) { c.rope_theta = -1; }},
      {"rope_theta: expected a positive number, got inf", [](auto& c) { c.rope_theta = infinity; }},
      {"rms_norm_eps: expected 0 or more, got -1e-06", [](auto& c) { c.rms_norm_eps = -1e-6; }},
      {"rms_norm_eps: expected 0 or more, got nan",
       [](auto& c) { c.rms_norm_eps = std::numeric_limits<double>::quiet_NaN(); }},
      {"value_scale: expected a finite number, got inf", [](auto& c) { c.value_scale = infinity; }},
      {"hidden * query_heads * head_dim: expected at most 9223372036854775807 elements, got a "
       "product of sizes beyond that",
       [](auto& c) { c.hidden = vha::Index(1) << 53; }},
  };
  for (const auto& refusal : refusals) {
    AttentionConfig config = paper;
    refusal.spoil(config);
    try {
      config.validate();
      ADD_FAILURE() << "not refused: " << refusal.text;
    } catch (const vha::Error& error) {
      EXPECT_EQ(error.what(), refusal.text);
    }
  }
}

TEST(Config, ErrorIsARuntimeError) {
  AttentionConfig config = paper;
  config.window = -3;
  EXPECT_THROW(config.validate(), std::runtime_error);
}

}  // namespace
