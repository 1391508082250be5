// SPDX-License-Identifier: Apache-2.0
// Whole checkpoints, folded and run: four samples in trainers' forms, held against the right answers.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <list>
#include <optional>
#include <string>
#include <vector>
#include <vha/checkpoint/fold_model.hpp>
#include <vha/checkpoint/output_folder.hpp>

#include "../../examples/input_folder.hpp"
#include "../../examples/qwen3.hpp"
#include "error_of.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"
#include "tensor_bytes.hpp"

namespace {

using namespace vha::checkpoint;
using support::data_of;
using support::error_of;
using support::TemporaryFolder;
using vha::Index;
namespace fs = std::filesystem;

const fs::path samples = fs::path(VHA_CASES_DIR) / ".." / "checkpoints";

struct Sample {
  const char* folder;
  const char* expected;
};
std::ostream& operator<<(std::ostream& stream, const Sample& sample) {
  return stream << sample.folder;
}

void fold(const Model& model, const fs::path& target, std::optional<Dtype> dtype = {},
          std::uint64_t max_shard_bytes = 5'000'000'000, const vha::Executor& executor = {}) {
  const FoldedModel folded(model, dtype);
  OutputFolder out(target, false);
  out.write_file("config.json", folded.config().dump(2));
  out.write_tensors(folded.tensors(), folded.metadata(), max_shard_bytes, executor);
  out.commit();
}

/// The elements in double, of any floating-point type.
std::vector<double> values(const TensorView& tensor) {
  std::vector<double> result;
  const auto read = [&]<class S>(S) {
    for (std::size_t at = 0; at < tensor.bytes; at += sizeof(S)) {
      result.push_back(static_cast<double>(vha::load<S>(tensor.data + at)));
    }
  };
  if (tensor.dtype == Dtype::f64) {
    read(double());
  } else {
    with_scalar(floating_dtype(tensor.name, tensor.dtype), read);
  }
  return result;
}

double largest(const std::vector<double>& numbers) {
  double most = 0;
  for (const double number : numbers) most = std::max(most, std::abs(number));
  return most;
}

class FoldModel : public testing::TestWithParam<Sample> {
 protected:
  fs::path folder() const { return samples / GetParam().folder; }
  SafetensorsFile expected() const { return SafetensorsFile(samples / GetParam().expected); }
  bool is_bf16() const {
    return std::string_view(GetParam().expected).find("bf16") != std::string::npos;
  }
};

TEST_P(FoldModel, GivesTheExpectedProjections) {
  const TemporaryFolder temporary;
  fold(Model(folder()), temporary / "out");
  const ShardedTensors out(temporary / "out");
  const SafetensorsFile right = expected();
  for (int layer = 0; layer < 3; ++layer) {
    for (const std::string name : {"q_proj", "o_proj"}) {
      const auto prefix = "layers." + std::to_string(layer) + ".";
      const auto& tensor = out.at("model." + prefix + "self_attn." + name + ".weight");
      const auto& wanted = right.at(prefix + name);
      EXPECT_EQ(tensor.shape, wanted.shape);
      EXPECT_EQ(tensor.dtype, is_bf16() ? Dtype::bf16 : Dtype::f32);
      const auto actual = values(tensor), exact = values(wanted);
      ASSERT_EQ(actual.size(), exact.size());
      for (std::size_t k = 0; k < exact.size(); ++k) {
        if (is_bf16()) {
          // The nearest, or but for 1e-7 of it a tie.
          const auto nearest = static_cast<double>(vha::convert<vha::bfloat16>(exact[k]));
          const double slack = 1e-7 * std::abs(exact[k]);
          EXPECT_LE(std::abs(actual[k] - exact[k]), std::abs(nearest - exact[k]) + slack)
              << tensor.name << " at " << k;
        } else {
          EXPECT_NEAR(actual[k], exact[k], 1e-6 * largest(exact)) << tensor.name << " at " << k;
        }
      }
    }
  }
}

TEST_P(FoldModel, IsAStockModel) {
  const TemporaryFolder temporary;
  fold(Model(folder()), temporary / "out");
  const Model out(temporary / "out");
  EXPECT_FALSE(out.is_vha());
  EXPECT_EQ(out.layout(), LinearLayout::out_in);
  EXPECT_EQ(out.sizes().query_heads, 8);
  EXPECT_EQ(out.sizes().kv_heads, 2);
  EXPECT_EQ(out.sizes().head_dim, 16);
  const Json& config = out.config().json();
  EXPECT_EQ(config.at("architectures"), Json({"Qwen3ForCausalLM"}));
  EXPECT_EQ(config.at("model_type"), "qwen3");
  EXPECT_EQ(config.at("num_attention_heads"), 8);
  EXPECT_EQ(config.at("num_key_value_heads"), 2);
  EXPECT_EQ(config.at("head_dim"), 16);
  EXPECT_EQ(config.at("torch_dtype"), is_bf16() ? "bfloat16" : "float32");
  EXPECT_EQ(config.at("tie_word_embeddings"), true);
  EXPECT_EQ(config.at("use_qk_norm"), true) << "unknown keys are kept";
  EXPECT_EQ(config.begin().key(), "architectures") << "and their order";
  for (const auto& [key, value] : config.items()) {
    EXPECT_EQ(key.find("vha"), std::string::npos) << key;
  }
  EXPECT_EQ(out.tensors().metadata().at("format"), "pt");
}

TEST_P(FoldModel, MovesEverythingElseByteForByte) {
  const TemporaryFolder temporary;
  fold(Model(folder()), temporary / "out");
  const ShardedTensors out(temporary / "out");
  // The samples hold the same numbers in different forms; this one has the stock form already.
  const ShardedTensors stock(samples / (is_bf16() ? "hf-bf16" : "hf-f32"));
  std::size_t moved = 0;
  for (const TensorView* const tensor : stock.tensors()) {
    const std::string& name = tensor->name;
    const bool is_map = name.find("vha_") != std::string::npos;
    EXPECT_EQ(out.find(name) == nullptr, is_map) << name;
    if (is_map || name.find("q_proj") != std::string::npos ||
        name.find("o_proj") != std::string::npos) {
      continue;
    }
    const auto& copy = out.at(name);
    EXPECT_EQ(copy.shape, tensor->shape) << name;
    EXPECT_EQ(copy.dtype, tensor->dtype) << name;
    ASSERT_EQ(copy.bytes, tensor->bytes) << name;
    EXPECT_EQ(std::memcmp(copy.data, tensor->data, copy.bytes), 0) << name;
    ++moved;
  }
  EXPECT_EQ(moved, 2 + 3 * 9U);
}

TEST_P(FoldModel, GivesTheExpectedLogitsBeforeAndAfter) {
  const TemporaryFolder temporary;
  const Model model(folder());
  fold(model, temporary / "out");
  const Model folded(temporary / "out");
  const SafetensorsFile right = expected();
  const auto exact = values(right.at("logits"));
  std::vector<Index> tokens;
  const auto& stored = right.at("tokens");
  for (std::size_t at = 0; at < stored.bytes; at += sizeof(std::int64_t)) {
    std::int64_t token;
    std::memcpy(&token, stored.data + at, sizeof token);
    tokens.push_back(token);
  }
  const auto error = [&]<class S>(const Model& of, S, bool token_by_token) {
    const Qwen3<S> qwen3(of);
    auto caches = qwen3.caches(static_cast<Index>(tokens.size()));
    Matrix logits(static_cast<Index>(tokens.size()), qwen3.vocabulary());
    if (token_by_token) {
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        logits.row(static_cast<Index>(t)) = qwen3.logits({tokens[t]}, caches);
      }
    } else {
      logits = qwen3.logits(tokens, caches);
    }
    double most = 0;
    for (std::size_t k = 0; k < exact.size(); ++k) {
      most = std::max(most, std::abs(static_cast<double>(logits.data()[k]) - exact[k]));
    }
    return most / largest(exact);
  };
  for (const bool token_by_token : {false, true}) {
    if (is_bf16()) {
      EXPECT_LE(error(model, vha::bfloat16(), token_by_token), 1e-4);
      EXPECT_LE(error(folded, vha::bfloat16(), token_by_token), 2e-2) << "rounded weights";
    } else {
      EXPECT_LE(error(model, float(), token_by_token), 1e-4);
      EXPECT_LE(error(folded, float(), token_by_token), 1e-4);
    }
  }
}

TEST_P(FoldModel, ComparesEqualLayerByLayer) {
  const TemporaryFolder temporary;
  const Model model(folder());
  fold(model, temporary / "out");
  const Model folded(temporary / "out");
  for (Index layer = 0; layer < model.layers(); ++layer) {
    const double difference = compare_layers(model, folded, layer).largest_difference;
    EXPECT_LE(difference, is_bf16() ? 2e-2 : 1e-5);
    EXPECT_GT(maps_report(model, layer).premix_distance, 0);
    EXPECT_GT(maps_report(model, layer).cross_group_share, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Samples, FoldModel,
                         testing::Values(Sample{"hf-f32", "expected-f32.safetensors"},
                                         Sample{"hf-bf16", "expected-bf16.safetensors"},
                                         Sample{"paddle-fused-u16", "expected-bf16.safetensors"},
                                         Sample{"paddle-separate-f32", "expected-f32.safetensors"}),
                         [](const auto& sample) {
                           std::string name = sample.param.folder;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST(FoldModelOptions, StoresInAnotherTypeAndInShards) {
  const TemporaryFolder temporary;
  const Model model(samples / "hf-f32");
  fold(model, temporary / "out", Dtype::bf16, 100'000);
  const Model out(temporary / "out");
  EXPECT_TRUE(fs::exists(temporary / "out" / "model.safetensors.index.json"));
  EXPECT_EQ(out.config().string("torch_dtype"), "bfloat16");
  for (const TensorView* const tensor : out.tensors().tensors()) {
    EXPECT_EQ(tensor->dtype, Dtype::bf16) << tensor->name;
  }
  const auto from = values(model.at("embed_tokens.weight"));
  const auto to = values(out.at("embed_tokens.weight"));
  for (std::size_t k = 0; k < from.size(); ++k) {
    EXPECT_EQ(to[k], static_cast<double>(vha::convert<vha::bfloat16>(from[k])));
  }
}

/// A copy of a sample whose configuration, or whose tensors, `change` changes.
class Changed {
 public:
  explicit Changed(const std::function<void(Json&, std::vector<TensorView>&)>& change,
                   const char* sample = "hf-bf16") {
    const ShardedTensors original(samples / sample);
    Json config = read_json(samples / sample / "config.json");
    std::vector<TensorView> tensors;
    for (const TensorView* const tensor : original.tensors()) tensors.push_back(*tensor);
    change(config, tensors);
    folder_.add("config.json", config.dump());
    write_safetensors(folder_ / "model.safetensors", tensors);
  }
  const fs::path& folder() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
};

std::string refusal(const std::function<void(Json&, std::vector<TensorView>&)>& change,
                    const char* sample = "hf-bf16") {
  const Changed changed(change, sample);
  return error_of([&] {
    const Model model(changed.folder());
    const FoldedModel folded(model);
  });
}

TensorView& named(std::vector<TensorView>& tensors, std::string_view name) {
  return *std::ranges::find_if(tensors, [&](const auto& t) { return t.name.ends_with(name); });
}

void drop(std::vector<TensorView>& tensors, std::string_view part) {
  std::erase_if(tensors, [&](const auto& t) { return t.name.find(part) != std::string::npos; });
}

/// Adds a tensor of zeros, in place of one of that name.
void add(std::vector<TensorView>& tensors, const std::string& name,
         std::vector<std::int64_t> shape) {
  static const std::vector<std::byte> zeros(1 << 20);
  drop(tensors, name);
  std::size_t bytes = 2;
  for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
  tensors.push_back({name, Dtype::bf16, std::move(shape), zeros.data(), bytes});
}

TEST(FoldModelRefuses, WhatIsNoFoldableModel) {
  using Tensors = std::vector<TensorView>;
  EXPECT_EQ(refusal([](Json&, Tensors&) {}), "no vha::Error") << "the sample itself is fine";
  const std::pair<const char*, std::function<void(Json&, Tensors&)>> cases[] = {
      {"Premix or Postmix",
       [](Json& c, Tensors& t) {
         drop(t, "vha_");
         c["num_attention_heads"] = 4;
         // A stock model of four heads has another output projection.
         for (auto& tensor : t) {
           if (tensor.name.find("o_proj") == std::string::npos) continue;
           tensor.shape[1] /= 2;
           tensor.bytes /= 2;
         }
         for (const char* key : {"use_vha_attention", "vha_enable_premix", "vha_enable_postmix", "vha_postmix_rank"})
           c.erase(key);
       }},
      {"layer 1", [](Json&, Tensors& t) { drop(t, "layers.1.self_attn.vha_"); }},
      {"layers.1.self_attn.vha_postmix_V",
       [](Json&, Tensors& t) { drop(t, "layers.1.self_attn.vha_postmix_V"); }},
      {"has none",
       [](Json&, Tensors& t) {
         named(t, "layers.2.self_attn.vha_premix_weight").name = "model.vha_premix_weight";
       }},
      {"vha_premix_alpha",
       [](Json&, Tensors& t) {
         named(t, "vha_premix_weight").name = "model.layers.0.self_attn.vha_premix_alpha";
       }},
      {"quantization_config", [](Json& c, Tensors&) { c["quantization_config"] = Json::object(); }},
      {"vha_shared_kv", [](Json& c, Tensors&) { c["vha_shared_kv"] = true; }},
      {"vha_use_output_gate", [](Json& c, Tensors&) { c["vha_use_output_gate"] = true; }},
      {"vha_postmix_grouped", [](Json& c, Tensors&) { c["vha_postmix_grouped"] = 1; }},
      {"vha_form", [](Json& c, Tensors&) { c["vha_form"] = "gated"; }},
      {"vha_gate", [](Json& c, Tensors&) { c["vha_gate"] = {{"rank", 4}}; }},
      {"per_layer", [](Json& c, Tensors&) { c["qk_norm_type"] = "per_layer"; }},
      {"num_attention_heads", [](Json& c, Tensors&) { c["num_attention_heads"] = 5; }},
      {"head_dim", [](Json& c, Tensors&) { c["head_dim"] = 32; }},
      {"vha_postmix_rank", [](Json& c, Tensors&) { c["vha_postmix_rank"] = 3; }},
      {"vha_enable_premix", [](Json& c, Tensors&) { c["vha_enable_premix"] = false; }},
      {"num_key_value_heads", [](Json& c, Tensors&) { c["num_key_value_heads"] = 4; }},
      {"num_hidden_layers", [](Json& c, Tensors&) { c["num_hidden_layers"] = 2; }},
      {"layers.3", [](Json& c, Tensors&) { c["num_hidden_layers"] = 4; }},
      {"q_proj.bias", [](Json& c, Tensors&) { c["attention_bias"] = true; }},
      {"gate",
       [](Json&, Tensors& t) {
         named(t, "layers.0.mlp.gate_proj.weight").name =
             "model.layers.0.self_attn.gate_proj.weight";
       }},
      {"q_norm", [](Json&, Tensors& t) { drop(t, "layers.0.self_attn.q_norm"); }},
      {"quantised",
       [](Json&, Tensors& t) {
         auto& v = named(t, "layers.0.self_attn.v_proj.weight");
         v.dtype = Dtype::i8;
         v.bytes /= 2;
       }},
      {"v_proj.weight",
       [](Json&, Tensors& t) {
         std::swap(named(t, "layers.0.self_attn.v_proj.weight").shape[0],
                   named(t, "layers.0.self_attn.v_proj.weight").shape[1]);
       }},
      {"model_type", [](Json& c, Tensors&) { c["model_type"] = "llama"; }},
      {"num_hidden_layers", [](Json& c, Tensors&) { c["num_hidden_layers"] = "3"; }},
      {"num_key_value_heads", [](Json& c, Tensors&) { c.erase("num_key_value_heads"); }},
      {"lm_head.weight", [](Json& c, Tensors&) { c["tie_word_embeddings"] = false; }},
      {"lm_head.weight", [](Json&, Tensors& t) { add(t, "lm_head.weight", {}); }},
      {"model.norm.weight", [](Json&, Tensors& t) { add(t, "model.norm.weight", {8}); }},
      {"embed_tokens", [](Json&, Tensors& t) { add(t, "model.embed_tokens.weight", {96, 1}); }},
      {"embed_tokens", [](Json& c, Tensors&) { c["vocab_size"] = 7; }},
      {"norm.weight", [](Json&, Tensors& t) { drop(t, "model.norm.weight"); }},
      {"layers.1.mlp.gate_proj.weight", [](Json&, Tensors& t) { drop(t, "layers.1.mlp.gate_proj"); }},
      {"layers.2.mlp.up_proj.weight",
       [](Json&, Tensors& t) { add(t, "model.layers.2.mlp.up_proj.weight", {0, 64}); }},
      {"layers.2.mlp.up_proj.weight",
       [](Json&, Tensors& t) { add(t, "model.layers.2.mlp.up_proj.weight", {100, 64}); }},
      {"layers.1.input_layernorm.weight",
       [](Json&, Tensors& t) { add(t, "model.layers.1.input_layernorm.weight", {65}); }},
      {"layers.00.self_attn.vha_premix_weight",
       [](Json&, Tensors& t) { add(t, "model.layers.00.self_attn.vha_premix_weight", {2, 16, 16}); }},
      {"gate_proj.bias", [](Json&, Tensors& t) { add(t, "model.layers.0.mlp.gate_proj.bias", {112}); }},
      {"beside the fused one",
       [](Json&, Tensors& t) { add(t, "model.layers.1.self_attn.qkv_proj.weight", {128, 64}); }},
      {"beside the fused one",
       [](Json&, Tensors& t) { add(t, "model.layers.1.mlp.up_gate_proj.weight", {224, 64}); }},
      {"visual.x", [](Json&, Tensors& t) { add(t, "visual.x", {1}); }},
      {"qwen3_next", [](Json& c, Tensors&) { c["model_type"] = "qwen3_next"; }},
      {"attn_type", [](Json& c, Tensors&) { c["attn_type"] = "gqa"; }},
      {"use_vha_attention", [](Json& c, Tensors&) { c["use_vha_attention"] = false; }},
      {"use_qk_norm", [](Json& c, Tensors&) { c["use_qk_norm"] = false; }},
      {"vha_premix_weight", [](Json&, Tensors& t) {
         for (int layer = 0; layer < 3; ++layer) {
           add(t, "model.layers." + std::to_string(layer) + ".self_attn.vha_premix_weight", {2, 16, 0});
         }
       }},
      {"rope_theta",
       [](Json& c, Tensors&) {
         c["rope_parameters"] = {{"rope_theta", 5}};
       }},
  };
  for (const auto& [expected, change] : cases) {
    const std::string message = refusal(change);
    EXPECT_NE(message.find(expected), std::string::npos) << expected << " in: " << message;
  }
}

TEST(FoldModelForms, DropsKeysThatSayNothing) {
  const Changed changed([](Json& config, std::vector<TensorView>&) {
    config["vha_use_output_gate"] = false;
    config["vha_gate_rank"] = 0;
    config["vha_gate_scale"] = 0.0;
    config["vha_form"] = "";
    config["vha_group"] = nullptr;
    config["vha_premix_init_alpha"] = 0.1;  // of the maps before training
  });
  const Model model(changed.folder());
  const Json config = FoldedModel(model).config();
  for (const auto& [key, value] : config.items()) {
    EXPECT_EQ(key.find("vha"), std::string::npos) << key;
  }
}

/// Makes the dense MLP of a layer one of four experts, each with numbers of its own, and their router.
void make_sparse(std::vector<TensorView>& tensors, int layer) {
  static std::list<std::string> bytes;
  const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp.";
  const auto add_copy = [&](TensorView tensor, const std::string& name, std::size_t shift) {
    std::string& copy = bytes.emplace_back(data_of(tensor));
    std::rotate(copy.begin(), copy.begin() + static_cast<std::ptrdiff_t>(4 * shift), copy.end());
    tensor.name = mlp + name;
    tensor.data = reinterpret_cast<const std::byte*>(copy.data());
    tensors.push_back(tensor);
  };
  for (const std::string name : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) {
    const TensorView dense = named(tensors, mlp + name);
    drop(tensors, mlp + name);
    for (std::size_t expert = 0; expert < 4; ++expert) {
      add_copy(dense, "experts." + std::to_string(expert) + "." + name, expert);
    }
  }
  TensorView router = named(tensors, mlp + "experts.0.gate_proj.weight");
  router.shape = {4, 64};
  router.bytes = 4 * 64 * 4;
  add_copy(router, "gate.weight", 5);
}

TEST(FoldModelExperts, MoveByteForByte) {
  const TemporaryFolder temporary;
  fold(Model(samples / "hf-f32"), temporary / "dense");
  const ShardedTensors dense(temporary / "dense");
  struct Case {
    const char* name;
    Json config;
    std::vector<int> sparse_layers;
  };
  const Case cases[] = {
      {"all", {{"num_experts", 4}}, {0, 1, 2}},
      {"named", {{"num_experts", 4}, {"model_type", "qwen3_moe"}}, {0, 1, 2}},
      {"but-for-two", {{"num_experts", 4}, {"mlp_only_layers", {0, 2}}}, {1}},
      {"every-second", {{"num_experts", 4}, {"decoder_sparse_step", 2}}, {1}},
      {"both", {{"num_experts", 4}, {"decoder_sparse_step", 1}, {"mlp_only_layers", {1}}}, {0, 2}},
      {"none", {{"num_experts", 0}, {"model_type", "qwen3_moe"}}, {}}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const Changed changed(
        [&](Json& config, std::vector<TensorView>& tensors) {
          for (const int layer : each.sparse_layers) make_sparse(tensors, layer);
          config.update(each.config);
        },
        "hf-f32");
    const Model model(changed.folder());
    fold(model, temporary / each.name);
    const Model out(temporary / each.name);
    std::size_t experts = 0;
    for (const TensorView* const tensor : out.tensors().tensors()) {
      const bool is_mlp = tensor->name.find(".mlp.") != std::string::npos;
      if (tensor->name.find(".experts.") != std::string::npos) ++experts;
      const TensorView& original =
          is_mlp ? model.tensors().at(tensor->name) : dense.at(tensor->name);
      EXPECT_EQ(tensor->shape, original.shape) << tensor->name;
      EXPECT_EQ(tensor->dtype, original.dtype) << tensor->name;
      EXPECT_EQ(data_of(*tensor), data_of(original)) << tensor->name;
    }
    EXPECT_EQ(experts, 12 * each.sparse_layers.size());
    const std::size_t more = (12 + 1 - 3) * each.sparse_layers.size();
    EXPECT_EQ(out.tensors().tensors().size(), dense.tensors().size() + more);
    const Json& config = out.config().json();
    EXPECT_EQ(config.at("architectures"), Json({"Qwen3MoeForCausalLM"}));
    EXPECT_EQ(config.at("model_type"), "qwen3_moe");
    for (const auto& [key, value] : each.config.items()) {
      EXPECT_EQ(config.at(key), value) << "which says what layers are";
    }
    for (Index layer = 0; layer < 3; ++layer) {
      EXPECT_LE(compare_layers(model, out, layer).largest_difference, 1e-5);
    }
  }
}

TEST(FoldModelExperts, AreRefusedByName) {
  using Tensors = std::vector<TensorView>;
  const auto sparse_refusal = [](const std::function<void(Json&, Tensors&)>& change) {
    return refusal(
        [&](Json& config, Tensors& tensors) {
          for (const int layer : {1, 2}) make_sparse(tensors, layer);
          config["num_experts"] = 4;
          config["mlp_only_layers"] = {0};
          change(config, tensors);
        },
        "hf-f32");
  };
  EXPECT_EQ(sparse_refusal([](Json&, Tensors&) {}), "no vha::Error");
  const std::pair<const char*, std::function<void(Json&, Tensors&)>> cases[] = {
      {"layers.1.mlp.experts.2.up_proj.weight",
       [](Json&, Tensors& t) { drop(t, "layers.1.mlp.experts.2.up_proj"); }},
      {"layers.2.mlp.experts.3.down_proj.weight",
       [](Json&, Tensors& t) {
         add(t, "model.layers.2.mlp.experts.3.down_proj.weight", {64, 100});
       }},
      {"layers.1.mlp.gate.weight", [](Json&, Tensors& t) { drop(t, "layers.1.mlp.gate.weight"); }},
      {"layers.1.mlp.gate.weight",
       [](Json&, Tensors& t) {
         add(t, "model.layers.1.mlp.gate.weight", {3, 64});
       }},
      {"layers.1.mlp.gate.weight", [](Json& c, Tensors&) { c["num_experts"] = 5; }},
      {"layers.1.mlp.experts.3.", [](Json& c, Tensors&) { c["num_experts"] = 3; }},
      {"layers.1.mlp.experts.00.up_proj.weight",
       [](Json&, Tensors& t) {
         add(t, "model.layers.1.mlp.experts.00.up_proj.weight", {112, 64});
       }},
      {"layers.1.mlp.experts..up_proj.weight",
       [](Json&, Tensors& t) {
         add(t, "model.layers.1.mlp.experts..up_proj.weight", {112, 64});
       }},
      {"layers.1.mlp.up_proj.weight",
       [](Json&, Tensors& t) {
         add(t, "model.layers.1.mlp.up_proj.weight", {112, 64});
       }},
      {"layers.0.mlp.gate.weight",
       [](Json&, Tensors& t) {
         add(t, "model.layers.0.mlp.gate.weight", {4, 64});
       }},
      {"layers.0.mlp.", [](Json& c, Tensors&) { c.erase("mlp_only_layers"); }},
      {"layers.1.mlp.",
       [](Json& c, Tensors&) {
         c["mlp_only_layers"] = {0, 1};
       }},
      {"layers.2.mlp.", [](Json& c, Tensors&) { c["decoder_sparse_step"] = 2; }},
      {"mlp_only_layers", [](Json& c, Tensors&) { c["mlp_only_layers"] = "0"; }},
      {"decoder_sparse_step", [](Json& c, Tensors&) { c["decoder_sparse_step"] = 0; }},
      {"num_experts", [](Json& c, Tensors&) { c["num_experts"] = "4"; }},
      {"num_experts",
       [](Json& c, Tensors&) {
         c.erase("num_experts");
         c["model_type"] = "qwen3_moe";
       }},
      {"layers.1.mlp.", [](Json& c, Tensors&) { c.erase("num_experts"); }},
  };
  for (const auto& [expected, change] : cases) {
    const std::string message = sparse_refusal(change);
    EXPECT_NE(message.find(expected), std::string::npos) << expected << " in: " << message;
  }
}

TEST(FoldModelForms, FusesByProjectionIfTold) {
  const Model plain(samples / "hf-bf16");
  std::vector<std::string> bytes;  // of the fused tensors
  const Changed changed([&](Json&, std::vector<TensorView>& tensors) {
    for (int layer = 0; layer < 3; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
      std::string& fused = bytes.emplace_back();
      for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
        fused += data_of(named(tensors, prefix + name + ".weight"));
        drop(tensors, prefix + name);
      }
    }
    for (int layer = 0; layer < 3; ++layer) {
      const std::string& fused = bytes[static_cast<std::size_t>(layer)];
      tensors.push_back({"model.layers." + std::to_string(layer) + ".self_attn.qkv_proj.weight",
                         Dtype::bf16,
                         {128, 64},
                         reinterpret_cast<const std::byte*>(fused.data()),
                         fused.size()});
    }
  });
  const TemporaryFolder temporary;
  fold(plain, temporary / "plain");
  const ShardedTensors expected(temporary / "plain");
  for (const auto order : {FusedOrder::by_projection, FusedOrder::by_group}) {
    const std::string target = order == FusedOrder::by_group ? "by-group" : "by-projection";
    const Model model(changed.folder(), {.fused_order = order});
    fold(model, temporary / target);
    const ShardedTensors actual(temporary / target);
    bool same = true;
    for (const TensorView* const tensor : expected.tensors()) {
      same = same && data_of(actual.at(tensor->name)) == data_of(*tensor);
    }
    EXPECT_EQ(same, order == FusedOrder::by_projection);
  }
}

TEST(FoldModelForms, FoldsTheBiasOfTheQuery) {
  std::vector<std::vector<vha::bfloat16>> biases;
  const Changed changed([&](Json& config, std::vector<TensorView>& tensors) {
    config["attention_bias"] = true;
    const std::pair<const char*, Index> widths[] = {
        {"q_proj", 64}, {"k_proj", 32}, {"v_proj", 32}, {"o_proj", 64}};
    biases.reserve(12);
    for (int layer = 0; layer < 3; ++layer) {
      for (const auto& [name, width] : widths) {
        auto& bias = biases.emplace_back();
        for (Index k = 0; k < width; ++k) {
          bias.push_back(vha::convert<vha::bfloat16>(0.125 * static_cast<double>(k % 7 - layer)));
        }
        tensors.push_back({"model.layers." + std::to_string(layer) + ".self_attn." + name + ".bias",
                           Dtype::bf16,
                           {width},
                           reinterpret_cast<const std::byte*>(bias.data()),
                           bias.size() * 2});
      }
    }
  });
  const TemporaryFolder temporary;
  const Model model(changed.folder());
  fold(model, temporary / "out", Dtype::f32);
  const Model out(temporary / "out");
  for (Index layer = 0; layer < 3; ++layer) {
    const auto bias = values(model.at(Model::layer_name(layer, "self_attn.q_proj.bias")));
    const auto maps = values(model.at(Model::layer_name(layer, Model::premix_name)));
    const auto folded = values(out.at(Model::layer_name(layer, "self_attn.q_proj.bias")));
    ASSERT_EQ(folded.size(), 128U);
    for (std::size_t group = 0; group < 2; ++group) {
      for (std::size_t head = 0; head < 4; ++head) {
        for (std::size_t c = 0; c < 16; ++c) {
          double sum = 0;
          for (std::size_t k = 0; k < 16; ++k) {
            sum += bias[head * 16 + k] * maps[(group * 16 + k) * 16 + c];
          }
          EXPECT_NEAR(folded[(group * 4 + head) * 16 + c], sum, 1e-6);
        }
      }
    }
    EXPECT_EQ(values(out.at(Model::layer_name(layer, "self_attn.o_proj.bias"))),
              values(model.at(Model::layer_name(layer, "self_attn.o_proj.bias"))));
    EXPECT_LE(compare_layers(model, out, layer).largest_difference, 1e-5);
  }
}

TEST(FoldModelForms, SaysWhereTheOrderIsAGuess) {
  EXPECT_FALSE(Model(samples / "hf-f32").layout_is_guess());
  EXPECT_FALSE(Model(samples / "paddle-separate-f32").layout_is_guess());
  // All that is left of the linear weights is square.
  const TemporaryFolder folder;
  const std::vector<std::byte> zeros(64 * 64 * 2);
  for (const std::string prefix : {"model.", ""}) {
    folder.add("config.json", R"({"hidden_size": 64, "num_hidden_layers": 1})");
    const std::vector<TensorView> tensors{{prefix + "layers.0.self_attn.q_proj.weight",
                                           Dtype::bf16,
                                           {64, 64},
                                           zeros.data(),
                                           zeros.size()}};
    write_safetensors(folder / "model.safetensors", tensors);
    const NamedTensors named(folder.path());
    EXPECT_TRUE(named.layout_is_guess());
    EXPECT_EQ(named.layout(), prefix.empty() ? LinearLayout::in_out : LinearLayout::out_in);
  }
}

TEST(FoldModelForms, SaysWhereTheHeadsOrderIsAGuess) {
  // As many tokens as channels, where k_proj tells the order of all others.
  const TemporaryFolder folder;
  const std::vector<std::byte> zeros(96 * 64 * 2);
  const auto check = [&](std::int64_t vocabulary, bool in_out, bool tied, ModelOptions options,
                         LinearLayout layout, bool is_guess) {
    folder.add(
        "config.json",
        std::string(R"({"hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": )") +
            (tied ? "true}" : "false}"));
    using Shape = std::vector<std::int64_t>;
    const Shape head{vocabulary, 64}, key = in_out ? Shape{64, 32} : Shape{32, 64};
    const std::vector<TensorView> tensors{
        {"lm_head.weight", Dtype::bf16, head, zeros.data(),
         static_cast<std::size_t>(vocabulary) * 64 * 2},
        {"layers.0.self_attn.k_proj.weight", Dtype::bf16, key, zeros.data(), 64 * 32 * 2}};
    write_safetensors(folder / "model.safetensors", tensors);
    const NamedTensors named(folder.path(), std::move(options));
    EXPECT_EQ(named.head_layout_is_guess(), is_guess);
    EXPECT_FALSE(named.layout_is_guess());
    EXPECT_EQ(named.layout_of(named.at("lm_head.weight"), "lm_head"), layout);
  };
  constexpr auto in_out = LinearLayout::in_out, out_in = LinearLayout::out_in;
  for (const bool tied : {false, true}) check(96, true, tied, {}, out_in, false);
  for (const bool tied : {false, true}) check(64, false, tied, {}, out_in, true);
  check(64, true, false, {}, in_out, true);
  check(64, true, true, {}, out_in, true);  // as the embedding, with which it is one
  check(64, true, true, {.layout = in_out}, in_out, false);
}

TEST(CompareLayers, SeesHeadsInAnotherOrder) {
  const TemporaryFolder temporary;
  const Model model(samples / "hf-f32");
  fold(model, temporary / "out");
  const ShardedTensors right(temporary / "out");
  // Two heads of layer 1's q_proj, 16 rows each, change places.
  std::vector<TensorView> tensors;
  for (const TensorView* const tensor : right.tensors()) tensors.push_back(*tensor);
  TensorView& query = named(tensors, "layers.1.self_attn.q_proj.weight");
  std::string bytes = data_of(query);
  const std::size_t head = query.bytes / 8;
  std::swap_ranges(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(head),
                   bytes.begin() + static_cast<std::ptrdiff_t>(head));
  query.data = reinterpret_cast<const std::byte*>(bytes.data());
  fs::create_directory(temporary / "wrong");
  fs::copy_file(temporary / "out" / "config.json", temporary / "wrong" / "config.json");
  write_safetensors(temporary / "wrong" / "model.safetensors", tensors);
  const Model wrong(temporary / "wrong");
  EXPECT_LE(compare_layers(model, wrong, 0).largest_difference, 1e-5);
  EXPECT_GT(compare_layers(model, wrong, 1).largest_difference, 0.2)
      << "the widest bound of vha_fold";
}

TEST(FoldModelMemory, IsThatOfAFewTensors) {
  if (support::sanitized) GTEST_SKIP() << "a sanitizer keeps freed memory";
  constexpr Index width = 1 << 16;
  const std::vector<std::byte> zeros(width * 64 * 2);  // 8 MiB
  const Changed changed([&](Json& config, std::vector<TensorView>& tensors) {
    config["intermediate_size"] = width;
    for (TensorView& tensor : tensors) {
      if (tensor.name.find(".mlp.") == std::string::npos) continue;
      const bool down = tensor.name.find("down") != std::string::npos;
      tensor.shape =
          down ? std::vector<std::int64_t>{64, width} : std::vector<std::int64_t>{width, 64};
      tensor.data = zeros.data();
      tensor.bytes = zeros.size();
    }
  });
  const auto peak = [] {
    ::rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
  };
  const std::size_t before = peak();
  const TemporaryFolder temporary;
  const Model model(changed.folder());
  fold(model, temporary / "out");
  const Model out(temporary / "out");
  for (Index layer = 0; layer < 3; ++layer) compare_layers(model, out, layer);
  EXPECT_LE(peak(), before + 4 * zeros.size()) << "of 9 such tensors";
}

TEST(LinearSources, GiveNoBytesWhereThereAreNone) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{0, std::int64_t(1) << 40}, {std::int64_t(1) << 40, 0}}) {
    const TensorView empty{"empty", Dtype::f32, shape, nullptr, 0};
    for (const auto layout : {LinearLayout::in_out, LinearLayout::out_in}) {
      const bool in_out = layout == LinearLayout::in_out;
      std::size_t bytes = 0;
      LinearSource(layout, shape[in_out ? 0 : 1], {{&empty, 0, shape[in_out ? 1 : 0]}})
          .write_out_in([&](const std::byte*, std::size_t size) { bytes += size; });
      EXPECT_EQ(bytes, 0U);
    }
  }
}

TEST(InputFolders, KeepApartWeightsOfOtherFormats) {
  for (const char* const name :
       {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
        "pytorch_model.bin.index.fp16.json", "model-Q4_K_M.gguf", "tf_model.h5",
        "tf_model.h5.index.json", "flax_model.msgpack", "flax_model.msgpack.index.json",
        "model_state.pdparams", "model_state-00001-of-00002.pdparams",
        "model_state.pdparams.index.json", "consolidated.00.pth", "model.onnx",
        "model.onnx_data"}) {
    EXPECT_TRUE(is_other_weights(name)) << name;
  }
  for (const char* const name :
       {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
        "generation_config.json", "special_tokens_map.json", "training_args.bin", "README.md",
        "modeling_qwen3.py", "chat_template.jinja", "bin", "model.index.json"}) {
    EXPECT_FALSE(is_other_weights(name)) << name;
  }
}

TEST(CommonDtypes, AreFloatWhereTensorsDiffer) {
  EXPECT_EQ(common_dtype(Model(samples / "hf-f32")), Dtype::f32);
  EXPECT_EQ(common_dtype(Model(samples / "hf-bf16")), Dtype::bf16);
  EXPECT_EQ(common_dtype(Model(samples / "paddle-fused-u16")), Dtype::bf16);
  const auto mixed = [](const char* sample, Dtype dtype) {
    const Changed changed(
        [&](Json&, std::vector<TensorView>& tensors) {
          add(tensors, "model.layers.1.input_layernorm.weight", {64});
          tensors.back().dtype = dtype;
        },
        sample);
    return common_dtype(Model(changed.folder()));
  };
  EXPECT_EQ(mixed("hf-bf16", Dtype::bf16), Dtype::bf16);
  EXPECT_EQ(mixed("hf-bf16", Dtype::u16), Dtype::bf16) << "another name of it";
  EXPECT_EQ(mixed("hf-bf16", Dtype::f16), Dtype::f32);
  EXPECT_EQ(mixed("hf-f32", Dtype::bf16), Dtype::f32);
}

TEST(FoldModelNames, FollowPatterns) {
  const TemporaryFolder temporary;
  std::ofstream(temporary / "names.json")
      << R"({"block.{layer}.attn.wq": "layers.{layer}.self_attn.q_proj.weight"})";
  const auto names = TensorNames::from_file(temporary / "names.json");
  EXPECT_EQ(names("block.12.attn.wq"), "layers.12.self_attn.q_proj.weight");
  EXPECT_EQ(names("block.x.attn.wq"), "block.x.attn.wq");
  EXPECT_EQ(names("model.layers.1.mlp.up_proj.w_0"), "layers.1.mlp.up_proj.weight");
  EXPECT_EQ(names("embedding.embed_tokens.weight"), "embed_tokens.weight");
  std::ofstream(temporary / "names.json") << R"({"a.{x": "b"})";
  const std::string message = error_of([&] { TensorNames::from_file(temporary / "names.json"); });
  EXPECT_NE(message.find("a.{x"), std::string::npos) << message;
}

TEST(ConfigJson, IsStrict) {
  const auto refusal = [](std::string_view text) {
    return error_of([&] { parse_json("config.json", text); });
  };
  EXPECT_EQ(refusal(R"({"a": {"b": 1}, "c": {"b": 1}})"), "no vha::Error");
  EXPECT_NE(refusal(R"({"a": 1, "a": 2})").find("\"a\""), std::string::npos);
  EXPECT_NE(refusal(R"({"x": {"a": 1, "a": 1}})").find("two"), std::string::npos);
  EXPECT_NE(refusal(std::string("{}\0{}", 5)).find("NUL"), std::string::npos);
  EXPECT_NE(refusal("{").find("valid JSON"), std::string::npos);
  EXPECT_NE(refusal("{} {}").find("valid JSON"), std::string::npos);
  EXPECT_NE(refusal(std::string(100'000, '[')).find("64 levels"), std::string::npos);
}

TEST(ConfigJson, SpellsRopeInTwoWays) {
  const TemporaryFolder temporary;
  const auto config = [&](std::string_view text) {
    std::ofstream(temporary / "config.json") << text;
    return ModelConfig(temporary / "config.json");
  };
  EXPECT_EQ(config(R"({"rope_theta": 1000000})").rope_theta(), 1e6);
  EXPECT_EQ(config(R"({"rope_theta": 1e6})").rope_theta(), 1e6);
  EXPECT_EQ(config(R"({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})")
                .rope_theta(),
            1e6);
  EXPECT_EQ(
      config(R"({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000}})").rope_theta(),
      5e5);
  const std::string both = error_of([&] {
    config(R"({"rope_theta": 10000, "rope_parameters": {"rope_theta": 500000}})").rope_theta();
  });
  EXPECT_NE(both.find("rope_theta"), std::string::npos) << both;
  EXPECT_NE(both.find("rope_parameters"), std::string::npos) << both;
  for (const char* const text :
       {R"({"rope_scaling": {"rope_type": "yarn", "factor": 4}})",
        R"({"rope_scaling": {"type": "linear"}})", R"({"partial_rotary_factor": 0.5})"}) {
    EXPECT_NE(error_of([&] { config(text).require_plain_rope(); }), "no vha::Error") << text;
  }
  EXPECT_NE(
      error_of([&] {
        config(R"({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}})")
            .require_plain_rope();
      }),
      "no vha::Error");
  config(R"({"rope_scaling": null})").require_plain_rope();
}

TEST(ConfigJson, SaysWhichLayersHaveAWindow) {
  const TemporaryFolder temporary;
  const auto window = [&](std::string_view text, Index layer) {
    std::ofstream(temporary / "config.json") << text;
    return ModelConfig(temporary / "config.json").window(layer);
  };
  EXPECT_EQ(window(R"({"use_sliding_window": false, "sliding_window": 4})", 30), 0);
  EXPECT_EQ(window(R"({"sliding_window": 4})", 30), 0);
  const char* const from_2 =
      R"({"use_sliding_window": true, "sliding_window": 4, "max_window_layers": 2})";
  EXPECT_EQ(window(from_2, 1), 0);
  EXPECT_EQ(window(from_2, 2), 4);
  EXPECT_EQ(
      window(
          R"({"use_sliding_window": true, "sliding_window": 4, "layer_types": ["sliding_attention"]})",
          0),
      4);
  EXPECT_EQ(
      window(
          R"({"use_sliding_window": true, "sliding_window": 4, "layer_types": ["full_attention"]})",
          0),
      0);
}

}  // namespace
