// SPDX-License-Identifier: Apache-2.0
// A training's checkpoint: a Hugging Face model of Qwen3's architecture with VHA's maps, and in a
// folder of its own, which vha_fold leaves behind, what the optimiser remembers.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>
#include <vha/checkpoint/json_file.hpp>
#include <vha/checkpoint/output_folder.hpp>
#include <vha/checkpoint/safetensors.hpp>

#include "adamw.hpp"
#include "model.hpp"

namespace train {

namespace fs = std::filesystem;
using vha::checkpoint::Json;

inline constexpr const char* state_folder = "training";
inline constexpr const char* state_file = "optimizer.safetensors";

/// The key of config.json under which a training keeps its recipe.
inline constexpr const char* recipe_key = "training";

inline Json config_json(const ModelConfig& config, Index tokens, const Json& recipe) {
  const auto& attention = config.attention;
  const Maps& maps = config.maps;
  Json json = {
      {"architectures", {"Qwen3ForCausalLM"}},
      {"model_type", "qwen3"},
      {"hidden_size", attention.hidden},
      {"head_dim", attention.head_dim},
      {"num_attention_heads", maps.premix ? attention.group_size() : attention.query_heads},
      {"num_key_value_heads", attention.kv_heads},
      {"num_hidden_layers", config.layers},
      {"intermediate_size", config.intermediate},
      {"vocab_size", config.vocabulary},
      {"max_position_embeddings", tokens},
      {"hidden_act", "silu"},
      {"rms_norm_eps", attention.rms_norm_eps},
      {"rope_theta", attention.rope_theta},
      {"tie_word_embeddings", true},
      {"attention_bias", false},
      {"torch_dtype", "float32"}};
  if (maps.premix || maps.postmix) {
    json["attn_type"] = "vha";
    json["vha_enable_premix"] = maps.premix;
    json["vha_enable_postmix"] = maps.postmix;
  }
  if (maps.postmix) json["vha_postmix_rank"] = maps.rank;
  json[recipe_key] = recipe;
  return json;
}

/// The parameters that are one tensor: a Premix's maps, or one alone.
inline std::map<std::string, std::vector<const Parameter<float>*>> by_tensor(
    const std::deque<Parameter<float>>& parameters) {
  std::map<std::string, std::vector<const Parameter<float>*>> tensors;
  for (const auto& parameter : parameters) tensors[parameter.name].push_back(&parameter);
  return tensors;
}

/// A tensor's extents.
inline std::vector<std::int64_t> stored_shape(const std::vector<const Parameter<float>*>& parts) {
  const auto& first = *parts.front();
  const Index rows = first.value.rows(), cols = first.value.cols();
  switch (first.role) {
    case Role::projection:
      return {cols, rows};
    case Role::norm:
      return {cols};
    case Role::premix:
      return {static_cast<Index>(parts.size()), rows, cols};
    case Role::embedding:
    case Role::postmix:
      break;
  }
  return {rows, cols};
}

/// A parameter's elements in the order in which they are stored.
inline vha::RowMajorMatrix<float> stored_order(const Parameter<float>& parameter) {
  if (parameter.role == Role::projection) return parameter.value.transpose();
  return parameter.value;
}

inline vha::checkpoint::TensorView float_view(std::string name,
                                              const vha::RowMajorMatrix<float>& matrix) {
  return {std::move(name),
          vha::checkpoint::Dtype::f32,
          {matrix.rows(), matrix.cols()},
          reinterpret_cast<const std::byte*>(matrix.data()),
          static_cast<std::size_t>(matrix.size()) * sizeof(float)};
}

inline std::string moment_name(const Parameter<float>& parameter, const char* moment) {
  return vha::text(parameter.name, '.', parameter.map, '.', moment);
}

/// Writes the folder as a whole: until its name changes over, the one that was there is untouched.
/// `steps` is how many were done.
inline void save(const fs::path& folder, const LanguageModel<float>& model,
                 const AdamW<float>& optimiser, Index tokens, const Json& recipe, Index steps) {
  using namespace vha::checkpoint;
  OutputFolder out(folder, true);
  out.write_file("config.json", config_json(model.config(), tokens, recipe).dump(2) + '\n');
  std::vector<StreamedTensor> tensors;
  for (const auto& [name, parts] : by_tensor(model.parameters())) {
    const auto write = [parts = parts](const ByteSink& sink) {
      for (const auto* const parameter : parts) {
        const auto elements = stored_order(*parameter);
        sink(reinterpret_cast<const std::byte*>(elements.data()),
             static_cast<std::size_t>(elements.size()) * sizeof(float));
      }
    };
    tensors.push_back({name, Dtype::f32, stored_shape(parts), write});
  }
  out.write_tensors(tensors, {{"format", "pt"}}, std::numeric_limits<std::uint64_t>::max());

  std::vector<TensorView> moments;
  for (std::size_t k = 0; k < model.parameters().size(); ++k) {
    const auto& parameter = model.parameters()[k];
    const auto& kept = optimiser.moments()[k];
    moments.push_back(float_view(moment_name(parameter, "first"), kept.first));
    moments.push_back(float_view(moment_name(parameter, "second"), kept.second));
  }
  fs::create_directory(out.path() / state_folder);
  write_safetensors(out.path() / state_folder / state_file, moments, {{"steps", vha::text(steps)}});
  out.commit();
}

/// Copies `size` elements of a tensor from `first` on. Throws vha::Error unless it is float32 of
/// `shape`.
inline void read_floats(const vha::checkpoint::SafetensorsFile& file, const std::string& name,
                        const std::vector<std::int64_t>& shape, Index first,
                        vha::RowMajorMatrix<float>& to) {
  const auto& tensor = file.at(name);
  const auto f32 = vha::checkpoint::Dtype::f32;
  if (tensor.dtype != f32 || tensor.shape != shape) {
    using vha::checkpoint::detail::type_text;
    vha::raise(vha::text(file.path().string(), ": ", name), type_text(f32, shape),
               type_text(tensor.dtype, tensor.shape));
  }
  std::memcpy(to.data(), tensor.data + static_cast<std::size_t>(first) * sizeof(float),
              static_cast<std::size_t>(to.size()) * sizeof(float));
}

/// Reads what `save` wrote; returns the number of steps that were done. Throws vha::Error where there
/// is no such folder, or its recipe is another, naming the first difference.
inline Index load(const fs::path& folder, LanguageModel<float>& model, AdamW<float>& optimiser,
                  const Json& recipe) {
  using namespace vha::checkpoint;
  const Json config = read_json(folder / "config.json");
  const Json kept = config.value(recipe_key, Json::object());
  for (const auto& [key, value] : recipe.items()) {
    if (!kept.contains(key) || kept[key] != value) {
      vha::raise(vha::text((folder / "config.json").string(), ": ", recipe_key, ": ", key),
                 value.dump(), kept.contains(key) ? kept[key].dump() : "none");
    }
  }
  const SafetensorsFile weights(folder / "model.safetensors");
  const SafetensorsFile state(folder / state_folder / state_file);
  const auto tensors = by_tensor(model.parameters());
  for (std::size_t k = 0; k < model.parameters().size(); ++k) {
    auto& parameter = model.parameters()[k];
    vha::RowMajorMatrix<float> stored = stored_order(parameter);
    read_floats(weights, parameter.name, stored_shape(tensors.at(parameter.name)),
                parameter.map * stored.size(), stored);
    // In place: the model's layers view it.
    if (parameter.role == Role::projection) {
      parameter.value = stored.transpose();
    } else {
      parameter.value = stored;
    }
    auto& moments = optimiser.moments()[k];
    const std::vector<std::int64_t> shape{parameter.value.rows(), parameter.value.cols()};
    read_floats(state, moment_name(parameter, "first"), shape, 0, moments.first);
    read_floats(state, moment_name(parameter, "second"), shape, 0, moments.second);
  }
  const auto steps = state.metadata().find("steps");
  const std::string text = steps == state.metadata().end() ? "" : steps->second;
  Index number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < 0) {
    vha::raise(vha::text(state.path().string(), ": steps"), "a number", '"' + text + '"');
  }
  return number;
}

}  // namespace train
