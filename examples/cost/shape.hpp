// SPDX-License-Identifier: Apache-2.0
// The shape of a model whose attention is exchanged for another kind.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <vha/checkpoint/model_config.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/cost/model_cost.hpp>

namespace cost {

using vha::Index;

/// A field of 0 is not told: `complete` gives it its usual value.
struct Shape {
  Index layers = 0;
  Index hidden = 0;
  Index head_dim = 0;
  Index query_heads = 0;  ///< of a VHA model the virtual ones
  Index kv_heads = 0;     ///< of VHA and GVA
  Index postmix_rank = 0;
  Index mla_latent_dim = 0;
  Index mla_rope_dim = 0;
  Index gva_rope_dim = 0;
  Index mlp_width = 0;  ///< of one expert
  Index experts = 0;
  Index active_experts = 0;

  vha::MlpSizes mlp() const {
    return {
        .hidden = hidden, .width = mlp_width, .experts = experts, .active_experts = active_experts};
  }
};

struct NamedShape {
  std::string_view name;
  Shape shape;
};

/// The paper's models: Qwen3's sizes, but for the MLP of 1.7B, which is the paper's.
inline constexpr NamedShape known_shapes[] = {
    {"0.6B",
     {.layers = 28, .hidden = 1024, .query_heads = 16, .postmix_rank = 4, .mlp_width = 3072}},
    {"1.7B",
     {.layers = 28, .hidden = 2048, .query_heads = 16, .postmix_rank = 4, .mlp_width = 5504}},
    {"4B", {.layers = 36, .hidden = 2560, .query_heads = 32, .postmix_rank = 8, .mlp_width = 9728}},
    {"30B-A3B",
     {.layers = 48,
      .hidden = 2048,
      .query_heads = 32,
      .postmix_rank = 12,
      .mlp_width = 768,
      .experts = 128,
      .active_experts = 8}},
};

/// Throws vha::Error naming the file and the key where it cannot be read or has a sliding window.
inline Shape read_shape(const std::filesystem::path& file) {
  const vha::checkpoint::ModelConfig config(file);
  Shape shape{.layers = config.size("num_hidden_layers"),
              .hidden = config.size("hidden_size"),
              .query_heads = config.size("num_attention_heads")};
  shape.head_dim = config.find_size("head_dim").value_or(shape.hidden / shape.query_heads);
  if (shape.head_dim == 0) vha::raise(config.label("head_dim"), "1 or more", "no such key");
  if (config.flag("use_sliding_window") && config.has("sliding_window")) {
    vha::raise(config.label("use_sliding_window"), "no window, without which costs are counted",
               "true");
  }
  // One trainer counts physical heads, the other virtual ones.
  const bool counts_physical = config.string("attn_type") == "vha";
  if (counts_physical || config.flag("use_vha_attention")) {
    shape.kv_heads = config.size("num_key_value_heads");
    shape.postmix_rank = config.find_size("vha_postmix_rank").value_or(0);
    if (counts_physical) shape.query_heads *= shape.kv_heads;
  }
  if (config.is_moe()) {
    shape.experts = config.size("num_experts");
    shape.active_experts = config.size("num_experts_per_tok");
    shape.mlp_width = config.size("moe_intermediate_size");
    for (Index layer = 0; layer < shape.layers; ++layer) {
      if (config.experts(layer) != shape.experts) {
        vha::raise(config.label("num_experts"), "experts in all layers, as costs are counted",
                   vha::text("a dense layer ", layer));
      }
    }
  } else {
    shape.mlp_width = config.size("intermediate_size");
  }
  return shape;
}

/// Gives what is not told its usual value: of MLA DeepSeek-V2's for such heads, of GVA its paper's.
/// Throws vha::Error naming the flag of a size that cannot be.
inline Shape complete(Shape shape) {
  const auto otherwise = [](Index& size, Index usual) { size = size == 0 ? usual : size; };
  otherwise(shape.head_dim, 128);
  otherwise(shape.kv_heads, 2);
  otherwise(shape.postmix_rank, std::max<Index>(shape.query_heads / 4, 1));
  otherwise(shape.experts, 1);
  otherwise(shape.active_experts, 1);
  const auto require = [](const char* flag, Index size) {
    if (size == 0) vha::raise(flag, "a size, or a --shape or --config that has it", "none");
  };
  require("--layers", shape.layers);
  require("--hidden", shape.hidden);
  require("--query-heads", shape.query_heads);
  require("--mlp", shape.mlp_width);
  otherwise(shape.mla_latent_dim, 4 * shape.head_dim);
  const Index half_even = shape.head_dim / 4 * 2;
  otherwise(shape.mla_rope_dim, std::max<Index>(half_even, 2));
  otherwise(shape.gva_rope_dim, std::clamp<Index>(half_even, 2, 16));
  const auto require_even = [](const char* flag, Index size) {
    if (size % 2 != 0) vha::raise(flag, "an even number (for RoPE)", vha::text(size));
  };
  require_even("--head-dim", shape.head_dim);
  require_even("--mla-rope", shape.mla_rope_dim);
  require_even("--gva-rope", shape.gva_rope_dim);
  if (shape.gva_rope_dim >= shape.head_dim) {
    vha::raise("--gva-rope", vha::text("less than --head-dim = ", shape.head_dim),
               vha::text(shape.gva_rope_dim));
  }
  if (shape.query_heads % shape.kv_heads != 0) {
    vha::raise("--query-heads", vha::text("a multiple of --kv-heads = ", shape.kv_heads),
               vha::text(shape.query_heads));
  }
  if (shape.active_experts > shape.experts) {
    vha::raise("--active-experts", vha::text("at most --experts = ", shape.experts),
               vha::text(shape.active_experts));
  }
  return shape;
}

/// Throws vha::Error where a cost of `tokens` at most for each of `batch` sequences does not fit an
/// Index: none that is printed has more than 128 terms, and each is at most the rest of the product.
inline void require_countable(const Shape& shape, Index tokens, Index batch) {
  const Index mlp = vha::checked_product("MLP", {shape.mlp_width, shape.experts});
  const Index width = std::max({shape.head_dim, shape.mla_latent_dim, shape.mla_rope_dim});
  const Index heads = vha::checked_product("heads", {shape.query_heads, 2 * width});
  const Index longest = std::max(
      {tokens, shape.hidden, mlp, 2 * shape.head_dim, shape.mla_latent_dim, shape.postmix_rank});
  vha::checked_product("sizes of the model and the work",
                       {128, shape.layers, batch, longest, std::max(shape.hidden, heads)});
}

}  // namespace cost
