// SPDX-License-Identifier: Apache-2.0
// A conformance case: one VHA layer, an input, and what every step must give.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>
#include <vha/checkpoint/safetensors.hpp>
#include <vha/vha.hpp>

/// A tensor in double, whatever it was stored in.
struct CaseTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;  ///< row-major
};

/// The file's parts by name. Every getter throws vha::Error naming the file and the part.
class CaseFile {
 public:
  explicit CaseFile(const std::filesystem::path& path) : file_(path) {
    require(text("kind", ""), "kind", {"vha", "vha-grad"});
    require(text("format", "vha-case-1"), "format", {"vha-case-1"});
  }

  std::string text(const std::string& key, const std::optional<std::string>& fallback = {}) const {
    const auto found = file_.metadata().find(key);
    if (found != file_.metadata().end()) return found->second;
    if (!fallback) vha::raise(label(key), "a value in __metadata__", "none");
    return *fallback;
  }

  template <class Number>
  Number number(const std::string& key, const std::optional<Number>& fallback = {}) const {
    if (fallback && !file_.metadata().contains(key)) return *fallback;
    const std::string value = text(key);
    Number result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size()) {
      vha::raise(label(key), "a number", quoted(value));
    }
    return result;
  }

  bool flag(const std::string& key) const {
    const std::string value = text(key);
    require(value, key, {"true", "false"});
    return value == "true";
  }

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }

  CaseTensor tensor(const std::string& name) const {
    using vha::checkpoint::Dtype;
    const auto& view = file_.at(name);
    CaseTensor result{view.shape, {}};
    const auto read = [&]<class Element>(Element) {
      const std::size_t count = view.bytes / sizeof(Element);
      result.values.resize(count);
      for (std::size_t i = 0; i < count; ++i) {
        Element element;
        std::memcpy(&element, view.data + i * sizeof(Element), sizeof(Element));
        result.values[i] = static_cast<double>(element);
      }
    };
    switch (view.dtype) {
      case Dtype::f64:
        read(double());
        break;
      case Dtype::f32:
        read(float());
        break;
      case Dtype::f16:
        read(vha::half());
        break;
      case Dtype::bf16:
        read(vha::bfloat16());
        break;
      case Dtype::i64:
        read(std::int64_t());
        break;
      case Dtype::i32:
        read(std::int32_t());
        break;
      default:
        vha::raise(label(name), "dtype F64, F32, F16, BF16, I64 or I32",
                   std::string(vha::checkpoint::dtype_name(view.dtype)));
    }
    return result;
  }

  /// A tensor of `axes` axes.
  CaseTensor tensor(const std::string& name, std::size_t axes) const {
    CaseTensor result = tensor(name);
    if (result.shape.size() != axes) {
      vha::raise(label(name), std::to_string(axes) + " axes", std::to_string(result.shape.size()));
    }
    return result;
  }

  /// A matrix, or a vector as `[1, size]`, rounded to the scalar that it is stored in.
  template <class S>
  vha::Weight<S> weight(const std::string& name) const {
    const CaseTensor from = tensor(name);
    if (from.shape.size() != 1 && from.shape.size() != 2) {
      vha::raise(label(name), "1 or 2 axes", std::to_string(from.shape.size()));
    }
    const vha::Index rows = from.shape.size() == 1 ? 1 : from.shape.front();
    return stored<S>(from.values.data(), rows, from.shape.back());
  }

  template <class S>
  vha::Weight<S> weight_if_present(const std::string& name) const {
    return has(name) ? weight<S>(name) : vha::Weight<S>();
  }

  /// The matrices of a tensor `[count, rows, cols]`.
  template <class S>
  std::vector<vha::Weight<S>> matrices(const std::string& name) const {
    const CaseTensor from = tensor(name, 3);
    std::vector<vha::Weight<S>> result;
    if (from.values.empty()) vha::raise(label(name), "one matrix or more", "none");
    for (std::int64_t i = 0; i < from.shape[0]; ++i) {
      result.push_back(stored<S>(from.values.data() + i * from.shape[1] * from.shape[2],
                                 from.shape[1], from.shape[2]));
    }
    return result;
  }

  vha::AttentionConfig config() const {
    const auto physical_heads = number<vha::Index>("physical_heads");
    const vha::AttentionConfig config{
        .hidden = number<vha::Index>("hidden"),
        .head_dim = number<vha::Index>("head_dim"),
        .query_heads = number<vha::Index>("query_heads"),
        .kv_heads = number<vha::Index>("kv_heads"),
        .rope_theta = number<double>("theta"),
        .rotary_dim = number<vha::Index>("rotary", 0),
        .rms_norm_eps = number<double>("eps"),
        .window = number<vha::Index>("window"),
        .value_scale = number<double>("value_scale", 1.0),
    };
    config.validate();
    if (config.group_size() != physical_heads) {
      vha::raise(label("physical_heads"),
                 "query_heads / kv_heads = " + std::to_string(config.group_size()),
                 std::to_string(physical_heads));
    }
    return config;
  }

  /// The layer, its weights rounded to the scalar `S`.
  template <class S, class Gate>
  vha::VhaAttention<S, Gate> layer() const {
    const auto linear = [&](const std::string& name) {
      return vha::Linear<S>{weight<S>("weights.w" + name),
                            weight_if_present<S>("weights.b" + name)};
    };
    typename vha::VhaAttention<S, Gate>::Weights weights{
        .query = linear("q"), .key = linear("k"), .value = linear("v"), .output = linear("o")};
    if (flag("qk_norm")) {
      weights.q_norm = weight<S>("weights.q_norm");
      weights.k_norm = weight<S>("weights.k_norm");
    }
    weights.premix.maps = matrices<S>("weights.premix");
    weights.postmix.a = weight<S>("weights.postmix_a");
    weights.postmix.b = weight<S>("weights.postmix_b");
    vha::require_size(label("postmix_rank"), number<vha::Index>("postmix_rank"),
                      weights.postmix.rank());
    if constexpr (!std::same_as<Gate, vha::NoGate>) weights.gate.projection = linear("gate");
    return vha::VhaAttention<S, Gate>(config(), std::move(weights));
  }

  /// The positions `[batch, tokens]`, whole numbers.
  std::vector<vha::Position> positions(vha::Index batch, vha::Index tokens) const {
    const CaseTensor from = tensor("positions", 2);
    if (from.shape != std::vector<std::int64_t>{batch, tokens}) {
      vha::raise(label("positions"), vha::shape_text(batch, tokens),
                 vha::shape_text(from.shape[0], from.shape[1]));
    }
    std::vector<vha::Position> result;
    for (const double value : from.values) {
      if (!(value >= 0 && value <= 2147483647.0) || value != std::floor(value)) {
        vha::raise(label("positions"), "whole numbers from 0 to 2^31 - 1", vha::text(value));
      }
      result.push_back(static_cast<vha::Position>(value));
    }
    return result;
  }

 private:
  static std::string quoted(const std::string& value) {
    return '"' + std::string(vha::checkpoint::detail::printable(value)) + '"';
  }

  void require(const std::string& value, const std::string& key,
               std::initializer_list<std::string> allowed) const {
    std::string expected;
    for (const auto& one : allowed) {
      if (value == one) return;
      expected += (expected.empty() ? "" : " or ") + quoted(one);
    }
    vha::raise(label(key), expected, quoted(value));
  }

  std::string label(const std::string& part) const { return file_.path().string() + ": " + part; }

  template <class S>
  static vha::Weight<S> stored(const double* values, vha::Index rows, vha::Index cols) {
    vha::RowMajorMatrix<S> matrix(rows, cols);
    for (vha::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = vha::convert<S>(values[i]);
    return vha::Weight<S>::own(std::move(matrix));
  }

  vha::checkpoint::SafetensorsFile file_;
};
