// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/json_file.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>

// Trainers' tensor names, brought to one form: Hugging Face's without its leading "model.", as
// "layers.3.self_attn.q_proj.weight".

namespace vha::checkpoint {

/// A layer's part of such a name: "layers.3." before it is left out.
struct LayerTensor {
  Index layer;
  std::string_view part;  ///< "self_attn.q_proj.weight"
};

/// "layers.3.self_attn.q_proj.weight" -> 3 and "self_attn.q_proj.weight"; nothing for a tensor
/// that is in no layer. With "mlp.experts." for prefix, the same of a layer's part and its experts.
/// Precondition: the name outlives the result.
inline std::optional<LayerTensor> layer_tensor(std::string_view name,
                                               std::string_view prefix = "layers.") {
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  Index layer = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const auto digits = static_cast<std::size_t>(end - name.data());
  if (error != std::errc() || digits >= name.size() || name[digits] != '.') return std::nullopt;
  // One spelling for each number, or two names would be one tensor.
  if (name.starts_with('-') || (digits > 1 && name.starts_with('0'))) return std::nullopt;
  return LayerTensor{layer, name.substr(digits + 1)};
}

/// Rewrites the names of a checkpoint's tensors to the one form.
class TensorNames {
 public:
  /// Hugging Face's and Paddle's.
  TensorNames() = default;

  /// The names that a file describes: a JSON object of patterns, in which {anything in braces}
  /// stands for one or more digits.
  ///
  ///     { "decoder.block.{layer}.attention.wq": "layers.{layer}.self_attn.q_proj.weight" }
  ///
  /// A name that no pattern fits is read as Hugging Face's or Paddle's. Throws Error naming the file
  /// and the pattern, where it is none.
  static TensorNames from_file(const std::filesystem::path& file) {
    TensorNames names;
    const Json patterns = read_json(file);
    if (!patterns.is_object()) raise(file.string(), "an object of patterns", patterns.type_name());
    for (const auto& [pattern, name] : patterns.items()) {
      const std::string label = file.string() + ": \"" + detail::printable(pattern) + '"';
      if (!name.is_string()) raise(label, "a string", name.type_name());
      const auto from = split(label, pattern);
      const auto to = split(label, name.get<std::string>());
      for (const Piece& piece : to) {
        if (piece.is_number && std::ranges::find(from, piece) == from.end()) {
          raise(label, "numbers that the pattern has", '{' + piece.text + '}');
        }
      }
      names.rules_.emplace_back(from, to);
    }
    return names;
  }

  std::string operator()(std::string_view name) const {
    for (const auto& [from, to] : rules_) {
      if (const auto numbers = match(from, name)) return substitute(from, *numbers, to);
    }
    std::string result(name);
    const auto replace_prefix = [&](std::string_view prefix, std::string_view by) {
      if (result.starts_with(prefix)) result.replace(0, prefix.size(), by);
    };
    const auto replace_suffix = [&](std::string_view suffix, std::string_view by) {
      if (result.ends_with(suffix)) {
        result.replace(result.size() - suffix.size(), suffix.size(), by);
      }
    };
    replace_prefix("model.", "");
    replace_prefix("embedding.", "");
    replace_suffix(".w_0", ".weight");
    replace_suffix(".b_0", ".bias");
    return result;
  }

  /// The stock model's name for a name of the one form.
  static std::string hugging_face(std::string_view name) {
    return (name.starts_with("lm_head.") ? "" : "model.") + std::string(name);
  }

 private:
  struct Piece {
    bool is_number;
    std::string text;  ///< of a number its name

    bool operator==(const Piece&) const = default;
  };
  using Pieces = std::vector<Piece>;

  static Pieces split(const std::string& label, std::string_view pattern) {
    Pieces pieces;
    while (!pattern.empty()) {
      const std::size_t brace = pattern.find_first_of("{}");
      if (brace > 0) pieces.push_back({false, std::string(pattern.substr(0, brace))});
      if (brace == std::string_view::npos) break;
      const std::size_t end = pattern.find('}', brace);
      if (pattern[brace] != '{' || end == std::string_view::npos || end == brace + 1) {
        raise(label, "names in braces", '"' + detail::printable(pattern) + '"');
      }
      pieces.push_back({true, std::string(pattern.substr(brace + 1, end - brace - 1))});
      pattern.remove_prefix(end + 1);
    }
    return pieces;
  }

  static std::optional<std::vector<std::string>> match(const Pieces& pattern,
                                                       std::string_view name) {
    std::vector<std::string> numbers;
    for (const Piece& piece : pattern) {
      if (piece.is_number) {
        const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
        if (digits == 0) return std::nullopt;
        numbers.emplace_back(name.substr(0, digits));
        name.remove_prefix(digits);
      } else {
        if (!name.starts_with(piece.text)) return std::nullopt;
        name.remove_prefix(piece.text.size());
      }
    }
    if (!name.empty()) return std::nullopt;
    return numbers;
  }

  static std::string substitute(const Pieces& from, const std::vector<std::string>& numbers,
                                const Pieces& to) {
    std::string name;
    for (const Piece& piece : to) {
      if (!piece.is_number) {
        name += piece.text;
        continue;
      }
      std::size_t number = 0;
      for (const Piece& candidate : from) {
        if (candidate == piece) break;
        if (candidate.is_number) ++number;
      }
      name += numbers[number];
    }
    return name;
  }

  std::vector<std::pair<Pieces, Pieces>> rules_;
};

}  // namespace vha::checkpoint
