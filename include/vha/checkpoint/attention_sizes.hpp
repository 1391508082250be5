// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vha/checkpoint/named_tensors.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>

namespace vha::checkpoint {

/// The sizes of a model's attention, from the shapes of its tensors.
struct AttentionSizes {
  Index hidden = 0;
  Index head_dim = 0;
  Index physical_head_dim = 0;
  Index physical_heads = 0;  ///< H' of a VHA model; of a stock one its query heads
  Index query_heads = 0;     ///< virtual ones
  Index kv_heads = 0;
  Index postmix_rank = 0;  ///< 0: no Postmix
  bool has_premix = false;

  bool has_postmix() const { return postmix_rank > 0; }
  bool operator==(const AttentionSizes&) const = default;
};

/// The sizes of a layer's attention: heads and rank by the shapes of its tensors, hidden and K/V heads
/// by the configuration.
/// @throws vha::Error naming the tensor or the key, where they contradict each other.
inline AttentionSizes attention_sizes(const NamedTensors& named, Index layer) {
  AttentionSizes sizes{.hidden = named.config().size("hidden_size"),
                       .kv_heads = named.config().size("num_key_value_heads")};
  const auto tensor = [&](std::string_view part) {
    return named.find(named.layer_name(layer, part));
  };
  const auto outputs = [&](const TensorView& of) {
    return named.in_and_out(of, named.layout()).second;
  };
  const TensorView* const key = tensor("self_attn.k_proj.weight");
  if (const TensorView* const premix = tensor(named.premix_name)) {
    if (premix->shape.size() != 3 || premix->shape[0] != sizes.kv_heads) {
      raise(named.label(premix->name), text("[num_key_value_heads = ", sizes.kv_heads, ", d_q, d]"),
            named.shape_of(*premix));
    }
    if (premix->shape[1] == 0 || premix->shape[2] == 0) {
      raise(named.label(premix->name), "matrices", named.shape_of(*premix));
    }
    sizes.has_premix = true;
    sizes.physical_head_dim = premix->shape[1];
    sizes.head_dim = premix->shape[2];
  } else if (const auto head_dim = named.config().find_size("head_dim")) {
    sizes.head_dim = *head_dim;
  } else if (key != nullptr) {
    sizes.head_dim = outputs(*key) / sizes.kv_heads;
  } else {
    raise(named.config().label("head_dim"), "a head_dim, which no tensor tells", "no such key");
  }
  if (!sizes.has_premix) sizes.physical_head_dim = sizes.head_dim;
  Index query = 0;
  if (const TensorView* const fused = tensor("self_attn.qkv_proj.weight")) {
    query = outputs(*fused) - 2 * sizes.kv_heads * sizes.head_dim;
  } else {
    query = outputs(named.at(named.layer_name(layer, "self_attn.q_proj.weight")));
  }
  if (sizes.physical_head_dim == 0 || query <= 0 || query % sizes.physical_head_dim != 0) {
    raise(named.layer_label(layer) + ": query outputs",
          text("a multiple of the head's width, ", sizes.physical_head_dim), text(query));
  }
  sizes.physical_heads = query / sizes.physical_head_dim;
  sizes.query_heads =
      checked_product(named.layer_label(layer) + ": query heads",
                      {sizes.physical_heads, sizes.has_premix ? sizes.kv_heads : 1});
  checked_product(named.layer_label(layer) + ": query heads * head_dim",
                  {sizes.query_heads, sizes.head_dim});
  const TensorView *const a = tensor(named.postmix_a_name), *const b = tensor(named.postmix_b_name);
  if ((a == nullptr) != (b == nullptr)) {
    raise(named.label(
              named.layer_name(layer, a == nullptr ? named.postmix_a_name : named.postmix_b_name)),
          "both of Postmix's matrices", "one alone");
  }
  for (const TensorView* const matrix : {a, b}) {
    if (matrix == nullptr) continue;
    const bool fits = matrix->shape.size() == 2 && matrix->shape[0] == sizes.query_heads &&
                      matrix->shape[1] > 0 && matrix->shape == a->shape;
    if (!fits) {
      raise(named.label(matrix->name), text("[query heads = ", sizes.query_heads, ", rank]"),
            named.shape_of(*matrix));
    }
    sizes.postmix_rank = matrix->shape[1];
  }
  return sizes;
}

/// For messages.
inline std::string sizes_text(const AttentionSizes& sizes) {
  return text(sizes.physical_heads, " physical and ", sizes.query_heads, " query heads of width ",
              sizes.head_dim, sizes.has_premix ? ", Premix" : ", no Premix", ", Postmix of rank ",
              sizes.postmix_rank);
}

}  // namespace vha::checkpoint
