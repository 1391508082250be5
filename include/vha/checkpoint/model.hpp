// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/attention_sizes.hpp>
#include <vha/checkpoint/linear_source.hpp>
#include <vha/checkpoint/named_tensors.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>
#include <vha/vha.hpp>

namespace vha::checkpoint {

/// A folder with a Qwen3 or Qwen3-MoE model, VHA or stock, whose attention layers it loads. Weights are
/// viewed where they are mapped; layers must not outlive the model.
///
///     const Model model("checkpoint");
///     model.with_layer<bfloat16>(0, [](const auto& layer) { ... });  // a VhaAttention or GqaAttention
class Model : public NamedTensors {
 public:
  /// Opens the folder and checks all names, shapes and types.
  /// @throws vha::Error naming the file and the tensor or key: what is missing, contradicts itself, or
  /// is no part of a Qwen3 model (gates, norms over all heads, shared keys and values, quantised
  /// weights).
  explicit Model(const std::filesystem::path& folder, ModelOptions options = {})
      : NamedTensors(folder, std::move(options)) {
    sizes_ = attention_sizes(*this, 0);
    for (Index layer = 1; layer < layers(); ++layer) {
      const AttentionSizes others = attention_sizes(*this, layer);
      if (others != sizes_) {
        raise(layer_label(layer), "the sizes and the maps of layer 0, " + sizes_text(sizes_),
              sizes_text(others));
      }
    }
    for (Index layer = 0; layer < layers(); ++layer) {
      check_attention(layer);
      check_mlp(layer);
    }
    check_vector("norm.weight", sizes_.hidden);
    check_vocabulary();
    check_config();
  }

  const AttentionSizes& sizes() const { return sizes_; }
  bool is_vha() const { return sizes_.has_premix || sizes_.has_postmix(); }

  /// A projection or its bias ("weight", "bias") of a layer, where it has one, also out of a fused
  /// one. `name` is such as "self_attn.q_proj" or "mlp.up_proj".
  LinearSource linear(Index layer, std::string_view name, std::string_view part) const {
    return linear(layer_name(layer, name), part);
  }
  /// The same of one that is in no layer, or by its full name.
  LinearSource linear(const std::string& name, std::string_view part) const {
    const auto full = [&](std::string_view module) { return find(text(module, ".", part)); };
    if (const TensorView* const tensor = full(name)) {
      const auto [in, out] = in_and_out(*tensor, layout_of(*tensor, name));
      return {layout_of(*tensor, name), in, {{tensor, 0, out}}};
    }
    const auto dot = name.rfind('.');
    if (dot == std::string::npos) return {};
    const std::string base = name.substr(0, dot + 1), projection = name.substr(dot + 1);
    if (const TensorView* const fused = full(base + "qkv_proj")) return of_qkv(*fused, projection);
    if (const TensorView* const fused = full(base + "up_gate_proj")) {
      const auto [in, out] = in_and_out(*fused, layout());
      if (out % 2 != 0) raise(label(fused->name), "an even number of outputs", text(out));
      if (projection == "gate_proj") return {layout(), in, {{fused, 0, out / 2}}};
      if (projection == "up_proj") return {layout(), in, {{fused, out / 2, out / 2}}};
    }
    return {};
  }

  /// The configuration of a layer, for a forward pass with plain RoPE.
  AttentionConfig attention_config(Index layer) const {
    return {.hidden = sizes_.hidden,
            .head_dim = sizes_.head_dim,
            .query_heads = sizes_.query_heads,
            .kv_heads = sizes_.kv_heads,
            .rope_theta = config().rope_theta(),
            .rms_norm_eps = config().number("rms_norm_eps", 1e-6),
            .window = config().window(layer)};
  }

  /// A vector such as a norm's weight, in place where it is stored as `S`.
  template <StorageScalar S>
  Weight<S> vector(const std::string& name) const {
    const TensorView& tensor = at(name);
    if (tensor.shape.size() != 1) raise(label(name), "one axis", shape_of(tensor));
    return LinearSource(LinearLayout::in_out, 1, {{&tensor, 0, tensor.shape[0]}})
        .template weight<S>();
  }

  /// Calls `body` with the attention layer, stored as `S`: a VhaAttention, a GqaAttention, or one
  /// with Premix or Postmix alone, as the model is.
  template <StorageScalar S, class Body>
  void with_layer(Index layer, Body&& body) const {
    const auto with = [&](auto premix, auto postmix) {
      using Layer = Attention<S, decltype(premix), decltype(postmix), NoGate>;
      const auto projection = [&](std::string_view name) {
        return Linear<S>{linear(layer, name, "weight").template weight<S>(),
                         linear(layer, name, "bias").template weight<S>()};
      };
      body(Layer(attention_config(layer),
                 {.query = projection("self_attn.q_proj"),
                  .key = projection("self_attn.k_proj"),
                  .value = projection("self_attn.v_proj"),
                  .output = projection("self_attn.o_proj"),
                  .q_norm = vector<S>(layer_name(layer, "self_attn.q_norm.weight")),
                  .k_norm = vector<S>(layer_name(layer, "self_attn.k_norm.weight")),
                  .premix = std::move(premix),
                  .postmix = std::move(postmix)}));
    };
    if (sizes_.has_premix && sizes_.has_postmix()) {
      with(Premix<S>{premix_maps<S>(layer)}, postmix<S>(layer));
    } else if (sizes_.has_premix) {
      with(Premix<S>{premix_maps<S>(layer)}, NoPostmix{});
    } else if (sizes_.has_postmix()) {
      with(NoPremix{}, postmix<S>(layer));
    } else {
      with(NoPremix{}, NoPostmix{});
    }
  }

  /// P_g, one for each K/V head. Precondition: the model has them.
  template <StorageScalar S>
  std::vector<Weight<S>> premix_maps(Index layer) const {
    const TensorView& tensor = at(layer_name(layer, premix_name));
    TensorView map = tensor;
    map.shape = {tensor.shape[1], tensor.shape[2]};
    map.bytes = tensor.bytes / static_cast<std::size_t>(tensor.shape[0]);
    std::vector<Weight<S>> maps;
    for (Index group = 0; group < tensor.shape[0]; ++group) {
      maps.push_back(matrix<S>(map));
      map.data += map.bytes;
    }
    return maps;
  }

  /// A and B of Postmix. Precondition: the model has them.
  template <StorageScalar S>
  Postmix<S> postmix(Index layer) const {
    return {matrix<S>(at(layer_name(layer, postmix_a_name))),
            matrix<S>(at(layer_name(layer, postmix_b_name)))};
  }

 private:
  /// Row-major as it stands.
  template <StorageScalar S>
  static Weight<S> matrix(const TensorView& tensor) {
    return LinearSource(LinearLayout::in_out, tensor.shape[0], {{&tensor, 0, tensor.shape[1]}})
        .template weight<S>();
  }

  LinearSource of_qkv(const TensorView& fused, const std::string& projection) const {
    const auto [in, out] = in_and_out(fused, layout_of(fused, "qkv_proj"));
    const Index query = sizes_.physical_heads * sizes_.physical_head_dim;
    const Index width = sizes_.kv_heads * sizes_.head_dim;
    require_size(label(fused.name) + ": outputs", query + 2 * width, out);
    const bool by_group = options().fused_order == FusedOrder::by_group;
    const Index groups = by_group ? sizes_.kv_heads : 1;
    if (sizes_.physical_heads % groups != 0) {
      raise(label(fused.name),
            text("physical heads in ", groups, " equal groups, or another order"),
            text(sizes_.physical_heads, " heads"));
    }
    const Index sizes[3] = {query / groups, width / groups, width / groups};
    const Index which = projection == "q_proj" ? 0 : projection == "k_proj" ? 1 : 2;
    if (which == 2 && projection != "v_proj") return {};
    std::vector<OutputChannels> parts;
    for (Index group = 0; group < groups; ++group) {
      Index first = group * (out / groups);
      for (Index k = 0; k < which; ++k) first += sizes[k];
      parts.push_back({&fused, first, sizes[which]});
    }
    return {layout_of(fused, "qkv_proj"), in, std::move(parts)};
  }

  void check_attention(Index layer) const {
    const Index width = sizes_.kv_heads * sizes_.head_dim;
    const bool has_bias = config().flag("attention_bias");
    const auto check = [&](std::string_view name, Index in, Index out) {
      const auto where = [&](std::string_view part) {
        return label(text(layer_name(layer, name), ".", part));
      };
      const auto weight = linear(layer, name, "weight"), bias = linear(layer, name, "bias");
      if (weight.empty()) raise(where("weight"), shape_text(in, out), "no such tensor");
      if (weight.in() != in || weight.out() != out) {
        raise(where("weight") + ", read as [in, out]", shape_text(in, out),
              shape_text(weight.in(), weight.out()));
      }
      if (bias.empty() == has_bias) {
        raise(where("bias"), text("attention_bias = ", has_bias ? "true" : "false"),
              has_bias ? "no such tensor" : "one");
      }
      if (bias.empty()) return;
      for (const auto& fused : bias.parts()) {
        if (fused.tensor->shape.size() != 1)
          raise(where("bias"), "one axis", shape_of(*fused.tensor));
      }
      require_size(where("bias"), out, bias.out());
    };
    check("self_attn.q_proj", sizes_.hidden, sizes_.physical_heads * sizes_.physical_head_dim);
    check("self_attn.k_proj", sizes_.hidden, width);
    check("self_attn.v_proj", sizes_.hidden, width);
    check("self_attn.o_proj", sizes_.query_heads * sizes_.head_dim, sizes_.hidden);
    check_vector(layer_name(layer, "self_attn.q_norm.weight"), sizes_.head_dim);
    check_vector(layer_name(layer, "self_attn.k_norm.weight"), sizes_.head_dim);
    check_vector(layer_name(layer, "input_layernorm.weight"), sizes_.hidden);
    check_vector(layer_name(layer, "post_attention_layernorm.weight"), sizes_.hidden);
    attention_config(layer).validate();
  }

  void check_vector(const std::string& name, Index size) const {
    const TensorView& tensor = at(name);
    if (tensor.shape != std::vector<std::int64_t>{size}) {
      raise(label(tensor.name), text("[", size, "]"), shape_of(tensor));
    }
  }

  /// The projections of a SwiGLU MLP, or of each expert's and their router.
  void check_mlp(Index layer) const {
    const auto check = [&](const std::string& name, std::optional<Index> in,
                           std::optional<Index> out) {
      const LinearSource weight = linear(layer, name, "weight");
      const std::string where = label(layer_name(layer, name) + ".weight");
      if (weight.empty()) raise(where, "a weight", "no such tensor");
      if (weight.in() != in.value_or(weight.in()) || weight.out() != out.value_or(weight.out()) ||
          weight.in() == 0 || weight.out() == 0) {
        const auto extent = [](std::optional<Index> size) { return size ? text(*size) : "any"; };
        raise(where + ", read as [in, out]", '[' + extent(in) + ", " + extent(out) + ']',
              shape_text(weight.in(), weight.out()));
      }
      return weight.out();
    };
    const auto check_swiglu = [&](const std::string& mlp) {
      const Index width = check(mlp + ".gate_proj", sizes_.hidden, {});
      check(mlp + ".up_proj", sizes_.hidden, width);
      check(mlp + ".down_proj", width, sizes_.hidden);
    };
    const Index experts = config().experts(layer);
    if (experts == 0) return check_swiglu("mlp");
    check("mlp.gate", sizes_.hidden, experts);
    for (Index expert = 0; expert < experts; ++expert) check_swiglu(text("mlp.experts.", expert));
  }

  void check_vocabulary() const {
    const TensorView& embedding = at("embed_tokens.weight");
    const auto& shape = embedding.shape;
    const auto vocabulary = config().find_size("vocab_size");
    if (shape.size() != 2 || shape[1] != sizes_.hidden || shape[0] == 0 ||
        vocabulary.value_or(shape[0]) != shape[0]) {
      raise(label(embedding.name),
            text("[", vocabulary ? text(*vocabulary) : "vocabulary", ", ", sizes_.hidden, "]"),
            shape_of(embedding));
    }
    const LinearSource head = linear("lm_head", "weight");
    if (head.empty() && config().flag("tie_word_embeddings")) return;
    if (head.empty()) {
      raise(label("lm_head.weight"), "a head, since tie_word_embeddings is not true",
            "no such tensor");
    }
    if (head.in() != sizes_.hidden || head.out() != shape[0]) {
      raise(label("lm_head.weight") + ", read as [in, out]", shape_text(sizes_.hidden, shape[0]),
            shape_text(head.in(), head.out()));
    }
  }

  /// What the configuration says besides must agree with the tensors.
  void check_config() const {
    const auto agree = [&](std::string_view key, Index actual) {
      const auto said = config().find_size(key);
      if (said && *said != actual) {
        raise(config().label(key), text(actual, ", from the tensors' shapes"), text(*said));
      }
    };
    const Index heads = config().size("num_attention_heads");
    if (heads != sizes_.physical_heads && heads != sizes_.query_heads) {
      raise(config().label("num_attention_heads"),
            text(sizes_.physical_heads, " (physical) or ", sizes_.query_heads,
                 " (virtual), from the tensors' shapes"),
            text(heads));
    }
    agree("head_dim", sizes_.head_dim);
    const auto enabled = [&](std::string_view key, bool has) {
      if (config().has(key) && config().flag(key) != has) {
        raise(config().label(key),
              has ? "true, as there are such maps" : "false, as there are no such maps",
              has ? "false" : "true");
      }
    };
    enabled("use_vha_attention", is_vha());
    if (is_vha() && config().string("attn_type", "vha") != "vha") {
      raise(config().label("attn_type"), "\"vha\", as there are maps", "another");
    }
    enabled("vha_enable_premix", sizes_.has_premix);
    enabled("vha_enable_postmix", sizes_.has_postmix());
    if (sizes_.has_postmix()) agree("vha_postmix_rank", sizes_.postmix_rank);
  }

  AttentionSizes sizes_;
};

}  // namespace vha::checkpoint
