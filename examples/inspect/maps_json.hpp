// SPDX-License-Identifier: Apache-2.0
// What vha_inspect says of a model's maps, as JSON.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>
#include <vha/checkpoint/model.hpp>
#include <vha/vha.hpp>

namespace inspect {

using vha::Index;
using vha::checkpoint::Json;
using vha::checkpoint::Model;

inline Json json_of(const Eigen::VectorXd& values) {
  return std::vector<double>(values.begin(), values.end());
}

inline Json json_of(const vha::RowMajorMatrix<double>& matrix) {
  Json rows = Json::array();
  for (Index row = 0; row < matrix.rows(); ++row) {
    rows.push_back(json_of(Eigen::VectorXd(matrix.row(row))));
  }
  return rows;
}

inline Json json_of(const vha::PremixAnalysis& analysis) {
  Json groups = Json::array();
  for (const auto& map : analysis.maps) {
    const auto& condition = map.condition_number;
    groups.push_back({{"distance_from_identity", map.distance_from_identity},
                      {"distance_from_rotation", map.distance_from_rotation},
                      {"nearest_rotation_is_reflection", map.is_reflection},
                      {"condition_number", condition ? Json(*condition) : Json()},
                      {"singular_values", json_of(map.singular_values)}});
  }
  return {{"groups", groups},
          {"distances_between_groups", json_of(analysis.distances)},
          {"relative_distances_between_groups", json_of(analysis.relative_distances)}};
}

inline Json json_of(const vha::PostmixAnalysis& analysis) {
  return {{"cross_group_share", analysis.cross_group_share},
          {"effective_rank", analysis.effective_rank},
          {"numerical_rank", analysis.numerical_rank},
          {"is_full_rank", analysis.is_full_rank},
          {"singular_values", json_of(analysis.singular_values)}};
}

/// The folder's own name, also of "." and of "folder/".
inline std::string folder_name(const std::filesystem::path& folder) {
  const auto whole = std::filesystem::canonical(folder);
  return whole.has_filename() ? whole.filename().string() : whole.string();
}

/// The model's name and sizes, and the numbers of the maps of each of `layers`.
/// Throws vha::Error where the model has no maps, or an element is not finite.
inline Json analyse(const Model& model, const std::vector<Index>& layers) {
  const auto& sizes = model.sizes();
  const auto& folder = model.tensors().folder();
  if (!model.is_vha()) {
    vha::raise(folder.string(), "Premix or Postmix maps in its layers",
               "none: it is a stock model, or folded already");
  }
  Json result{{"model", folder_name(folder)},
              {"layers", model.layers()},
              {"inspected_layers", layers},
              {"hidden", sizes.hidden},
              {"physical_heads", sizes.physical_heads},
              {"physical_head_dim", sizes.physical_head_dim},
              {"query_heads", sizes.query_heads},
              {"kv_heads", sizes.kv_heads},
              {"head_dim", sizes.head_dim},
              {"premix", sizes.has_premix ? Json::array() : Json()},
              {"postmix_rank", sizes.postmix_rank},
              {"postmix", sizes.has_postmix() ? Json::array() : Json()}};
  const auto add = [&](const char* kind, Index layer, const Json& numbers) {
    Json of_layer{{"layer", layer}};
    of_layer.update(numbers);
    result[kind].push_back(of_layer);
  };
  for (const Index layer : layers) {
    const auto label = [&](std::string_view name) {
      return model.label(Model::layer_name(layer, name));
    };
    if (sizes.has_premix) {
      const vha::Premix<float> premix{model.premix_maps<float>(layer)};
      add("premix", layer, json_of(vha::analyse_premix(premix, label(Model::premix_name))));
    }
    if (sizes.has_postmix()) {
      const auto postmix = model.postmix<float>(layer);
      // By their own names, which the analysis does not know.
      vha::detail::require_finite(label(Model::postmix_a_name), postmix.a.to<double>());
      vha::detail::require_finite(label(Model::postmix_b_name), postmix.b.to<double>());
      add("postmix", layer, json_of(vha::analyse_postmix(postmix, sizes.kv_heads)));
    }
  }
  return result;
}

/// Base64 with padding, as in RFC 4648, section 4.
inline std::string base64(const std::vector<unsigned char>& bytes) {
  constexpr std::string_view digits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string result;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - at);
    unsigned bits = 0;
    for (std::size_t k = 0; k < 3; ++k) bits = bits << 8U | (k < count ? bytes[at + k] : 0U);
    for (std::size_t k = 0; k < 4; ++k) {
      result += k <= count ? digits[bits >> (18U - 6U * static_cast<unsigned>(k)) & 63U] : '=';
    }
  }
  return result;
}

/// Matrices of one shape for a heat map, row-major, each element as a byte `b` for `(b - 128) / 127`
/// of `scale`, the largest magnitude of all.
inline Json heat_maps(const std::vector<vha::RowMajorMatrix<double>>& matrices) {
  double scale = 0;
  for (const auto& matrix : matrices) scale = std::max(scale, matrix.cwiseAbs().maxCoeff());
  Json images = Json::array();
  for (const auto& matrix : matrices) {
    std::vector<unsigned char> bytes;
    for (Index k = 0; k < matrix.size(); ++k) {
      const double part = scale == 0 ? 0 : matrix.data()[k] / scale;
      bytes.push_back(static_cast<unsigned char>(std::lround(128 + 127 * part)));
    }
    images.push_back(base64(bytes));
  }
  return {{"rows", matrices.front().rows()},
          {"cols", matrices.front().cols()},
          {"scale", scale},
          {"images", images}};
}

/// For each of `layers` P_g - I of its groups and M - I. Precondition: analyse accepts them.
inline Json images(const Model& model, const std::vector<Index>& layers) {
  Json result = Json::array();
  for (const Index layer : layers) {
    Json images = Json::object();
    if (model.sizes().has_premix) {
      std::vector<vha::RowMajorMatrix<double>> maps;
      for (const auto& map : model.premix_maps<float>(layer)) {
        maps.push_back(vha::less_identity(map.to<double>()));
      }
      images["premix"] = heat_maps(maps);
    }
    if (model.sizes().has_postmix()) {
      images["postmix"] = heat_maps({vha::postmix_change(model.postmix<float>(layer))});
    }
    result.push_back(images);
  }
  return result;
}

}  // namespace inspect
