// SPDX-License-Identifier: Apache-2.0
// All that the weights of a trained model depend on, as it is given, and kept in the checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vha/checkpoint/json_file.hpp>
#include <vha/checkpoint/mapped_file.hpp>

#include "adamw.hpp"
#include "model.hpp"
#include "tasks.hpp"

namespace train {

using vha::checkpoint::Json;

struct Recipe {
  std::string text;       ///< a file; none: recall
  std::string text_hash;  ///< of its bytes
  Index pairs = 8;        ///< of recall
  Index vocabulary = 64;  ///< of recall
  Index tokens = 32;
  std::string attention = "vha";
  Index hidden = 64, layers = 2, query_heads = 8, kv_heads = 2, head_dim = 32, rank = 4;
  Index intermediate = 128;
  Index batch = 32;
  AdamWOptions optimiser;
  bool freeze_maps = false;
  std::uint64_t seed = 0;

  /// Throws vha::Error where the text cannot be read, or the task cannot be.
  std::unique_ptr<Task> task() {
    vha::require_positive("tokens", tokens);
    if (text.empty()) return std::make_unique<Recall>(pairs, vocabulary, tokens);
    const vha::checkpoint::detail::MappedFile file(text, 1);
    std::string bytes(reinterpret_cast<const char*>(file.data()), file.size());
    std::uint64_t hash = 0xCBF29CE484222325U;  // FNV-1a
    for (const char byte : bytes) {
      hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3U;
    }
    text_hash = std::to_string(hash);
    return std::make_unique<Text>(text, std::move(bytes), tokens);
  }

  Maps maps() const {
    const bool both = attention == "vha";
    return {both || attention == "premix", both || attention == "postmix", rank};
  }

  ModelConfig model(Index task_vocabulary) const {
    return {.attention = {.hidden = hidden,
                          .head_dim = head_dim,
                          .query_heads = query_heads,
                          .kv_heads = kv_heads},
            .maps = maps(),
            .layers = layers,
            .intermediate = intermediate,
            .vocabulary = task_vocabulary};
  }

  /// As it stands in config.json. The name of a text is not part of it: a copy will do.
  Json json() const {
    Json json;
    if (text.empty()) {
      json = {{"task", "recall"}, {"pairs", pairs}, {"vocabulary", vocabulary}};
    } else {
      json = {{"task", "text"}, {"text_hash", text_hash}};
    }
    json.update(Json{{"tokens", tokens},
                     {"attention", attention},
                     {"hidden", hidden},
                     {"layers", layers},
                     {"query_heads", query_heads},
                     {"kv_heads", kv_heads},
                     {"head_dim", head_dim},
                     {"rank", rank},
                     {"intermediate", intermediate},
                     {"batch", batch},
                     {"steps", optimiser.steps},
                     {"learning_rate", optimiser.learning_rate},
                     {"map_learning_rate", optimiser.map_learning_rate},
                     {"freeze_maps", freeze_maps},
                     {"weight_decay", optimiser.weight_decay},
                     {"warm_up", optimiser.warm_up},
                     {"clip", optimiser.clip},
                     {"seed", seed}});
    return json;
  }
};

}  // namespace train
