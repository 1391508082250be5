// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vha/checkpoint/json_file.hpp>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>

namespace vha::checkpoint {

/// `config.json` of a Qwen3 or Qwen3-MoE model, with or without VHA, as trainers and
/// transformers write it. Keys that nobody here knows are kept, in their order.
class ModelConfig {
 public:
  /// @throws vha::Error naming the file and the key, where it cannot be read or contradicts itself.
  explicit ModelConfig(std::filesystem::path file)
      : file_(std::move(file)), json_(read_json(file_)) {
    if (!json_.is_object()) raise(file_.string(), "a JSON object", json_.type_name());
  }

  const std::filesystem::path& file() const { return file_; }
  const Json& json() const { return json_; }

  /// Where a key stands, for messages.
  std::string label(std::string_view key) const {
    return file_.string() + ": \"" + std::string(key) + '"';
  }

  bool has(std::string_view key) const {
    const auto found = json_.find(key);
    return found != json_.end() && !found->is_null();
  }

  /// A whole number from 1 to 2^31 - 1.
  std::optional<Index> find_size(std::string_view key) const {
    if (!has(key)) return std::nullopt;
    const Json& value = *json_.find(key);
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1 ||
        value.get<std::int64_t>() > most) {
      raise(label(key), "a whole number from 1 to 2147483647", shown(value));
    }
    return value.get<Index>();
  }
  Index size(std::string_view key) const {
    const auto found = find_size(key);
    if (!found) raise(label(key), "a whole number", "no such key");
    return *found;
  }

  std::optional<double> find_number(const Json& in, std::string_view key) const {
    const auto found = in.find(key);
    if (found == in.end() || found->is_null()) return std::nullopt;
    if (!found->is_number() || !is_finite(found->get<double>())) {
      raise(label(key), "a number", shown(*found));
    }
    return found->get<double>();
  }
  double number(std::string_view key, double otherwise) const {
    return find_number(json_, key).value_or(otherwise);
  }

  bool flag(std::string_view key, bool otherwise = false) const {
    if (!has(key)) return otherwise;
    const Json& value = *json_.find(key);
    if (!value.is_boolean()) raise(label(key), "true or false", shown(value));
    return value.get<bool>();
  }

  std::string string(std::string_view key, std::string otherwise = {}) const {
    if (!has(key)) return otherwise;
    const Json& value = *json_.find(key);
    if (!value.is_string()) raise(label(key), "a string", shown(value));
    return value.get<std::string>();
  }

  bool is_moe() const {
    return string("model_type") == "qwen3_moe" ||
           (has("num_experts") && says_something("num_experts"));
  }

  /// The experts of a layer's MLP, or 0 where it is dense: all layers of a dense model, and of a
  /// Qwen3-MoE one those in `mlp_only_layers` and all but every `decoder_sparse_step`th.
  Index experts(Index layer) const {
    if (!is_moe() || (has("num_experts") && !says_something("num_experts"))) return 0;
    const Index count = size("num_experts");
    if (has("mlp_only_layers")) {
      const Json& dense = json_.at("mlp_only_layers");
      const auto is_number = [](const Json& value) { return value.is_number_integer(); };
      if (!dense.is_array() || !std::ranges::all_of(dense, is_number)) {
        raise(label("mlp_only_layers"), "a list of layers", shown(dense));
      }
      if (std::ranges::find(dense, Json(layer)) != dense.end()) return 0;
    }
    return (layer + 1) % find_size("decoder_sparse_step").value_or(1) == 0 ? count : 0;
  }

  /// Throws Error where a key of VHA's that nobody here knows says anything: the fold drops such keys,
  /// and with them perhaps something that the layers compute.
  void refuse_unknown_vha_keys() const {
    static constexpr std::string_view known[] = {
        "vha_enable_premix",     "vha_enable_postmix",   "vha_postmix_rank", "vha_shared_kv",
        "vha_premix_init_alpha", "vha_premix_alpha_init"};  // the last two: of random first maps
    for (const auto& [key, value] : json_.items()) {
      if (!is_vha_key(key) || std::ranges::find(known, key) != std::end(known)) continue;
      if (says_something(key)) {
        raise(label(detail::printable(key)),
              "no key of VHA's that vha does not know (remove it if it changes nothing that the "
              "layers compute; else the model does not fold)",
              shown(value));
      }
    }
  }

  /// The base of the RoPE frequencies, from either of its places. Throws Error where both are given
  /// and differ.
  double rope_theta() const {
    const auto plain = find_number(json_, "rope_theta");
    std::optional<double> theta = plain;
    for (const std::string_view key : rope_keys) {
      if (!has(key)) continue;
      const auto within = find_number(rope_object(key), "rope_theta");
      if (theta && within && *theta != *within) {
        raise(label("rope_theta"), text("the number in \"", key, "\" too, ", *within),
              text(*theta));
      }
      if (within) theta = within;
    }
    return theta.value_or(10000);
  }

  /// Throws Error unless RoPE is the plain one over all channels, the only one that a forward pass
  /// here computes. The fold does not depend on it.
  void require_plain_rope() const {
    const auto require_whole = [&](const Json& in) {
      if (find_number(in, "partial_rotary_factor").value_or(1) != 1) {
        raise(label("partial_rotary_factor"), "1 for a forward pass", "another factor");
      }
    };
    require_whole(json_);
    for (const std::string_view key : rope_keys) {
      if (!has(key)) continue;
      const Json& parameters = rope_object(key);
      require_whole(parameters);
      for (const auto& [name, value] : parameters.items()) {
        const bool is_type = name == "rope_type" || name == "type";
        if (value.is_object() || (is_type && value != "default")) {
          raise(label(key), "rope_type \"default\" alone for a forward pass", shown(parameters));
        }
      }
    }
  }

  /// The sliding window of a layer, or 0: by `layer_types`, or from `max_window_layers` on.
  Index window(Index layer) const {
    if (!flag("use_sliding_window") || !has("sliding_window")) return 0;
    const Index window = size("sliding_window");
    if (!has("layer_types")) {
      constexpr Index usual = 28;  // transformers' default
      const double first = number("max_window_layers", usual);
      return static_cast<double>(layer) >= first ? window : 0;
    }
    const Json& types = json_.at("layer_types");
    const auto at = static_cast<std::size_t>(layer);
    if (!types.is_array() || types.size() <= at) {
      raise(label("layer_types"), "a type for each layer", shown(types));
    }
    if (types[at] != "sliding_attention" && types[at] != "full_attention") {
      raise(label("layer_types"), "full_attention and sliding_attention alone", shown(types[at]));
    }
    return types[at] == "sliding_attention" ? window : 0;
  }

  /// The configuration of the stock model that the fold makes.
  Json folded(Index query_heads, Index kv_heads, Index head_dim, std::string_view dtype) const {
    Json result = Json::object();
    for (const auto& [key, value] : json_.items()) {
      const bool is_vha =
          is_vha_key(key) || key == "use_vha_attention" || key == "attn_type" || key == "auto_map";
      if (!is_vha) result[key] = value;
    }
    result["architectures"] = {is_moe() ? "Qwen3MoeForCausalLM" : "Qwen3ForCausalLM"};
    result["model_type"] = is_moe() ? "qwen3_moe" : "qwen3";
    result["num_attention_heads"] = query_heads;
    result["num_key_value_heads"] = kv_heads;
    result["head_dim"] = head_dim;
    if (result.contains("dtype")) result["dtype"] = dtype;
    if (result.contains("torch_dtype") || !result.contains("dtype")) result["torch_dtype"] = dtype;
    return result;
  }

 private:
  /// transformers 5 calls it rope_parameters, its forerunners rope_scaling.
  static constexpr std::string_view rope_keys[] = {"rope_parameters", "rope_scaling"};

  const Json& rope_object(std::string_view key) const {
    const Json& parameters = *json_.find(key);
    if (!parameters.is_object()) raise(label(key), "an object", shown(parameters));
    return parameters;
  }

  static bool is_vha_key(std::string_view key) { return key.starts_with("vha_"); }

  /// Whether the value of a key that is there is none of false, 0, null and "".
  bool says_something(std::string_view key) const {
    const Json& value = *json_.find(key);
    if (value.is_number()) return value != 0;
    return !value.is_null() && value != false && value != "";
  }

  static std::string shown(const Json& value) { return detail::printable(value.dump()); }

  std::filesystem::path file_;
  Json json_;
};

}  // namespace vha::checkpoint
