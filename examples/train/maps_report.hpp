// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <variant>
#include <vha/checkpoint/fold_model.hpp>

#include "model.hpp"

namespace train {

/// What vha_fold says of a layer's maps, of a model in memory.
inline vha::checkpoint::MapsReport maps_report(const LanguageModel<float>& model, Index layer) {
  vha::checkpoint::MapsReport report;
  const auto& config = model.config().attention;
  std::visit(
      [&]<class Layer>(const Layer& attention) {
        if constexpr (Layer::Weights::has_premix) {
          for (const auto& map : attention.weights().premix.maps) {
            report.premix_distance =
                std::max(report.premix_distance, vha::distance_from_identity(map));
          }
        }
        if constexpr (Layer::Weights::has_postmix) {
          report.cross_group_share = vha::cross_group_share(
              vha::postmix_change(attention.weights().postmix), config.kv_heads);
        }
      },
      model.blocks()[static_cast<std::size_t>(layer)].attention);
  return report;
}

}  // namespace train
