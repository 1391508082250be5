// SPDX-License-Identifier: Apache-2.0
// What each kind of attention that the library has is and can do.
#pragma once

#include <string>
#include <vector>

namespace cost {

/// A header, then a row for each kind.
inline std::vector<std::vector<std::string>> features() {
  return {
      {"attention", "layer", "a token's cache", "queries", "mixing of heads", "served as",
       "backward", "over ranks"},
      {"MHA", "GqaAttention, mha_config", "K, V of each head", "projected", "none", "itself", "yes",
       "yes"},
      {"MQA", "GqaAttention, mqa_config", "K, V of one head", "projected", "none", "itself", "yes",
       "yes"},
      {"GQA", "GqaAttention, gqa_config", "K, V of each group", "projected", "none", "itself",
       "yes", "yes"},
      {"gated GQA", "GqaAttention<S, SigmoidGate<S>>", "K, V of each group", "projected",
       "none; a gate on the outputs", "itself", "yes", "yes"},
      {"VHA", "VhaAttention", "K, V of each group", "physical heads, a map for each group",
       "constant, low rank", "GQA: fold_vha", "yes", "yes"},
      {"gated VHA", "VhaAttention<S, SigmoidGate<S>>", "K, V of each group",
       "physical heads, a map for each group", "constant, low rank; a gate",
       "gated GQA with Postmix: fold_premix", "yes", "yes"},
      {"VHA, SiLU after Premix", "VhaAttention<S, NoGate, Silu>", "K, V of each group",
       "physical heads, a map for each group, SiLU", "constant, low rank",
       "GQA with Premix: fold_postmix", "yes", "yes"},
      {"VHA, SiLU after Postmix", "VhaAttention<S, NoGate, Identity, Silu>", "K, V of each group",
       "physical heads, a map for each group", "constant, low rank, SiLU",
       "GQA with Postmix: fold_premix", "yes", "yes"},
      {"MFA", "MfaAttention", "K, V of one head", "one factor, a map for each head", "none",
       "MQA: fold_vha", "yes", "folded"},
      {"MLA", "MlaAttention", "a latent and a rotated key", "projected", "none",
       "attention to latents: absorb", "no", "no"},
      {"GVA", "GvaAttention", "V of each group and a rotated key", "projected", "none",
       "attention to values: absorb", "no", "no"},
      {"DCFormer", "DynamicHeadsAttention", "K, V of each group and the key's maps", "projected",
       "made of the tokens, around the softmax", "itself: no fold", "no", "no"},
  };
}

}  // namespace cost
