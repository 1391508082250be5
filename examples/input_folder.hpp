// SPDX-License-Identifier: Apache-2.0
// What a checkpoint's folder holds beside the weights and the configuration.
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

/// Names, sorted.
struct InputFolder {
  std::vector<std::string> files;          ///< to be copied: a tokenizer's and the like
  std::vector<std::string> other_weights;  ///< the model in other formats, which stay unfolded
  std::vector<std::string> sub_folders;
};

/// Whether a file is, by its name, a model's weights in another format than safetensors, or an index
/// of them. Some loaders would take it before a model.safetensors beside it.
inline bool is_other_weights(std::string_view name) {
  const auto index = name.find(".index.");
  if (index != std::string_view::npos && name.ends_with(".json")) name = name.substr(0, index);
  static constexpr std::array formats{".gguf",   ".ggml",      ".h5",        ".msgpack",
                                      ".onnx",   ".onnx_data", ".onnx.data", ".pdparams",
                                      ".tflite", ".ot",        ".pdiparams"};
  // Pickles of other things, such as training_args.bin, are no weights.
  static constexpr std::array pickles{".bin", ".pt", ".pth", ".ckpt"};
  const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
  const auto has = [&](std::string_view word) { return name.find(word) != name.npos; };
  return std::ranges::any_of(formats, ends) ||
         (std::ranges::any_of(pickles, ends) && (has("model") || has("consolidated")));
}

inline InputFolder read_input_folder(const std::filesystem::path& folder) {
  InputFolder input;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    std::error_code none;  // of a link that leads nowhere, which is neither
    if (entry.is_directory(none)) input.sub_folders.push_back(name);
    const bool is_made = name == "config.json" || name.ends_with(".safetensors") ||
                         name.ends_with(".safetensors.index.json");
    if (is_made || !entry.is_regular_file(none)) continue;
    (is_other_weights(name) ? input.other_weights : input.files).push_back(name);
  }
  for (auto* const names : {&input.files, &input.other_weights, &input.sub_folders}) {
    std::ranges::sort(*names);
  }
  return input;
}
