// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/linear_source.hpp>
#include <vha/checkpoint/model_config.hpp>
#include <vha/checkpoint/sharded_tensors.hpp>
#include <vha/checkpoint/tensor_names.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>

namespace vha::checkpoint {

/// How the outputs of a fused query, key and value projection are put together.
enum class FusedOrder {
  by_group,       ///< `[Q of group 0 | K0 | V0 | Q of group 1 | K1 | V1 ...]`
  by_projection,  ///< `[all Q | all K | all V]`; files cannot tell the two apart
};

/// What a user may know better than the files tell.
struct ModelOptions {
  std::optional<LinearLayout> layout = {};
  FusedOrder fused_order = FusedOrder::by_group;
  TensorNames names = {};
};

/// A checkpoint's configuration and its tensors, by their names in the one form of TensorNames, none
/// among them that a Qwen3 or Qwen3-MoE model, with or without VHA, has no place for.
class NamedTensors {
 public:
  /// @throws vha::Error naming the file and the tensor or key that cannot be.
  explicit NamedTensors(const std::filesystem::path& folder, ModelOptions options = {})
      : config_(folder / "config.json"), tensors_(folder), options_(std::move(options)) {
    refuse_other_models();
    name_tensors();
    layers_ = config_.size("num_hidden_layers");
    refuse_strangers();
    find_layout();
  }
  NamedTensors(const NamedTensors&) = delete;  // tensors are known by their addresses
  NamedTensors& operator=(const NamedTensors&) = delete;

  const ModelConfig& config() const { return config_; }
  const ShardedTensors& tensors() const { return tensors_; }
  const ModelOptions& options() const { return options_; }
  Index layers() const { return layers_; }
  /// The order of the linear layers' weights.
  LinearLayout layout() const { return layout_; }
  /// Whether all of them are square, so that the order is a guess by the tensors' names.
  bool layout_is_guess() const { return layout_is_guess_; }
  /// Whether the head is square, so that its order is a guess: that of the others, or if it is tied
  /// the embedding's.
  bool head_layout_is_guess() const {
    const TensorView* const head = find("lm_head.weight");
    return !options_.layout && head != nullptr && head->shape.size() == 2 &&
           head->shape[0] == head->shape[1];
  }

  /// The names of all tensors, in the one form of TensorNames, in the order of the files.
  const std::vector<std::string>& names() const { return in_order_; }
  const TensorView* find(std::string_view name) const {
    const auto found = named_.find(name);
    return found == named_.end() ? nullptr : found->second;
  }
  const TensorView& at(std::string_view name) const {
    const TensorView* const tensor = find(name);
    if (tensor == nullptr) raise(label(name), "a tensor of this name", "none");
    return *tensor;
  }
  std::string label(std::string_view name) const {
    return detail::tensor_label(tensors_.folder(), name);
  }

  std::string layer_label(Index layer) const {
    return text(tensors_.folder().string(), ": layer ", layer);
  }

  /// Lets the system take back the memory of a layer's pages, as ShardedTensors::forget.
  void forget_layer(Index layer) const {
    const std::string prefix = layer_name(layer, "");
    for (auto at = named_.lower_bound(prefix); at != named_.end() && at->first.starts_with(prefix);
         ++at) {
      tensors_.forget(*at->second);
    }
  }

  static std::string layer_name(Index layer, std::string_view part) {
    return text("layers.", layer, ".", part);
  }

  /// Whether a tensor of that name is a linear layer's weight, whose order is the checkpoint's.
  static bool is_linear(std::string_view name) {
    return name.ends_with("_proj.weight") || name.ends_with(".mlp.gate.weight") ||
           name == "lm_head.weight";
  }

  /// That of all linear layers; but trainers keep a head that is tied to the embedding as that is,
  /// [vocabulary, hidden].
  LinearLayout layout_of(const TensorView& tensor, std::string_view name) const {
    if (tensor.shape.size() != 2) return LinearLayout::in_out;
    if (name != "lm_head") return layout_;
    const Index hidden = config_.size("hidden_size");
    const bool first = tensor.shape[0] == hidden, last = tensor.shape.back() == hidden;
    if (first != last) return first ? LinearLayout::in_out : LinearLayout::out_in;
    const bool tied = !options_.layout && config_.flag("tie_word_embeddings");
    return tied ? LinearLayout::out_in : layout_;
  }

  std::pair<Index, Index> in_and_out(const TensorView& tensor, LinearLayout layout) const {
    const auto& shape = tensor.shape;
    if (shape.size() == 1) return {1, shape[0]};
    if (shape.size() != 2) raise(label(tensor.name), "one or two axes", shape_of(tensor));
    return layout == LinearLayout::out_in ? std::pair(shape[1], shape[0])
                                          : std::pair(shape[0], shape[1]);
  }

  static std::string shape_of(const TensorView& tensor) {
    return detail::type_text(tensor.dtype, tensor.shape);
  }
  /// Whether a layer's part is one of the maps.
  static bool is_map(std::string_view part) {
    return part == premix_name || part == postmix_a_name || part == postmix_b_name;
  }
  static constexpr std::string_view premix_name = "self_attn.vha_premix_weight";
  static constexpr std::string_view postmix_a_name = "self_attn.vha_postmix_U";
  static constexpr std::string_view postmix_b_name = "self_attn.vha_postmix_V";

 private:
  void refuse_other_models() const {
    config_.refuse_unknown_vha_keys();
    if (config_.has("quantization_config")) {
      raise(config_.label("quantization_config"), "weights that are not quantised", "such a key");
    }
    if (config_.flag("vha_shared_kv")) {
      raise(config_.label("vha_shared_kv"), "keys and values apart (a stock layer has both)",
            "true");
    }
    if (config_.string("qk_norm_type", "per_head") == "per_layer") {
      raise(config_.label("qk_norm_type"), "a norm of each head, as a stock Qwen3 layer has",
            "per_layer");
    }
    const std::string type = config_.string("model_type", "qwen3");
    if (type != "qwen3" && type != "qwen3_moe" && type.find("vha") == std::string::npos) {
      raise(config_.label("model_type"), "qwen3 or qwen3_moe", '"' + detail::printable(type) + '"');
    }
    if (!config_.flag("use_qk_norm", true)) {
      raise(config_.label("use_qk_norm"), "true, as in a stock Qwen3 layer", "false");
    }
  }

  void name_tensors() {
    for (const TensorView* const tensor : tensors_.tensors()) {
      std::string name = options_.names(tensor->name);
      if (name.ends_with("rotary_emb.inv_freq")) continue;  // follows from the configuration
      const auto [at, is_new] = named_.emplace(std::move(name), tensor);
      in_order_.push_back(at->first);
      if (!is_new) {
        raise(label(tensor->name), "one tensor for " + detail::printable(at->first),
              "\"" + detail::printable(at->second->name) + "\" too");
      }
    }
  }

  static bool is_stock_alone(std::string_view name) {
    return name == "embed_tokens.weight" || name == "norm.weight" || name == "lm_head.weight";
  }

  /// Of a layer with so many experts, or none, in any of the trainers' forms.
  static bool is_stock_part(std::string_view part, Index experts) {
    static constexpr std::array parts{
        "self_attn.q_proj.weight",   "self_attn.k_proj.weight",        "self_attn.v_proj.weight",
        "self_attn.qkv_proj.weight", "self_attn.o_proj.weight",        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",     "self_attn.v_proj.bias",          "self_attn.qkv_proj.bias",
        "self_attn.o_proj.bias",     "self_attn.q_norm.weight",        "self_attn.k_norm.weight",
        "input_layernorm.weight",    "post_attention_layernorm.weight"};
    static constexpr std::array mlp{"gate_proj.weight", "up_proj.weight", "down_proj.weight",
                                    "up_gate_proj.weight"};
    if (std::ranges::find(parts, part) != parts.end()) return true;
    if (experts > 0) {
      const auto in_expert = layer_tensor(part, "mlp.experts.");
      return part == "mlp.gate.weight" || (in_expert && in_expert->layer < experts &&
                                           std::ranges::find(mlp, in_expert->part) != mlp.end());
    }
    constexpr std::string_view of_mlp = "mlp.";
    return part.starts_with(of_mlp) &&
           std::ranges::find(mlp, part.substr(of_mlp.size())) != mlp.end();
  }

  /// Whatever a stock model has no place for.
  void refuse_strangers() const {
    for (const auto& [name, tensor] : named_) {
      const auto in_layer = layer_tensor(name);
      const std::string where = label(tensor->name);
      if (in_layer && in_layer->layer >= layers_) {
        raise(where, text("a layer below num_hidden_layers = ", layers_), "one beyond");
      }
      const auto part = in_layer ? in_layer->part : std::string_view(name);
      const bool is_layers_map = in_layer && is_map(part);
      if (name.find("premix_alpha") != std::string::npos) {
        raise(where, "Premix as a matrix for each K/V head", "an early form with another meaning");
      }
      for (const std::string_view word : {"vha", "premix", "postmix"}) {
        if (!is_layers_map && name.find(word) != std::string::npos) {
          raise(where, "a map with a place in a layer", "a tensor that has none");
        }
      }
      const Index experts = in_layer ? config_.experts(in_layer->layer) : 0;
      const bool is_stock = in_layer ? is_stock_part(part, experts) : is_stock_alone(name);
      if (!is_stock && in_layer && part.starts_with("mlp.")) {
        raise(
            where,
            text("a part of an MLP with ", experts, " experts, by ", config_.label("num_experts")),
            "another");
      }
      if (!is_layers_map && !is_stock) {
        raise(where, "a part of a stock Qwen3 model",
              "another (with a gate, say, a layer does not fold)");
      }
      floating_dtype(where, tensor->dtype);
      refuse_fused_twin(name, *tensor);
    }
  }

  /// A projection that is there alone and in a fused one too.
  void refuse_fused_twin(std::string_view name, const TensorView& tensor) const {
    static constexpr std::pair<std::string_view, std::string_view> fused[] = {
        {".q_proj.", ".qkv_proj."},
        {".k_proj.", ".qkv_proj."},
        {".v_proj.", ".qkv_proj."},
        {".gate_proj.", ".up_gate_proj."},
        {".up_proj.", ".up_gate_proj."}};
    for (const auto& [alone, together] : fused) {
      const auto at = name.find(alone);
      if (at == std::string_view::npos) continue;
      std::string twin(name);
      twin.replace(at, alone.size(), together);
      if (const TensorView* const other = find(twin)) {
        raise(label(tensor.name), "no such tensor beside the fused one",
              '"' + detail::printable(other->name) + "\" too");
      }
    }
  }

  /// By the shapes that leave no choice, else by the names.
  void find_layout() {
    if (options_.layout) {
      layout_ = *options_.layout;
      return;
    }
    const Index hidden = config_.size("hidden_size");
    const TensorView* voters[2] = {};
    for (const auto& [name, tensor] : named_) {
      if (!is_linear(name) || name == "lm_head.weight" || tensor->shape.size() != 2) continue;
      const bool reads_hidden =
          !name.ends_with("o_proj.weight") && !name.ends_with("down_proj.weight");
      const bool first = tensor->shape[0] == hidden, last = tensor->shape[1] == hidden;
      if (first == last) continue;
      voters[first == reads_hidden ? 1 : 0] = tensor;
    }
    if (voters[0] != nullptr && voters[1] != nullptr) {
      raise(label(voters[0]->name),
            "the order of \"" + detail::printable(voters[1]->name) + "\", [in, out]",
            shape_of(*voters[0]));
    }
    layout_is_guess_ = voters[0] == nullptr && voters[1] == nullptr;
    const bool hugging_face = std::ranges::any_of(
        tensors_.tensors(), [](const auto* tensor) { return tensor->name.starts_with("model."); });
    const bool out_in = layout_is_guess_ ? hugging_face : voters[0] != nullptr;
    layout_ = out_in ? LinearLayout::out_in : LinearLayout::in_out;
  }

  ModelConfig config_;
  ShardedTensors tensors_;
  ModelOptions options_;
  std::map<std::string, const TensorView*, std::less<>> named_;
  std::vector<std::string> in_order_;
  Index layers_ = 0;
  LinearLayout layout_ = LinearLayout::out_in;
  bool layout_is_guess_ = false;
};

}  // namespace vha::checkpoint
