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
            vha::RowMajorMatrix<double> difference = map.template to<double>();
            difference.diagonal().array() -= 1;
            report.premix_distance = std::max(report.premix_distance, difference.norm());
          }
        }
        if constexpr (Layer::Weights::has_postmix) {
          vha::RowMajorMatrix<double> mixing = attention.weights().postmix.dense();
          mixing.diagonal().array() -= 1;
          const double all = mixing.squaredNorm();
          const Index size = config.group_size();
          double within = 0;
          for (Index first = 0; first < config.query_heads; first += size) {
            within += mixing.block(first, first, size, size).squaredNorm();
          }
          report.cross_group_share = all == 0 ? 0 : 1 - within / all;
        }
      },
      model.blocks()[static_cast<std::size_t>(layer)].attention);
  return report;
}

}  // namespace train
