// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vha/cost/bytes.hpp>
#include <vha/cost/flops.hpp>
#include <vha/cost/model_cost.hpp>

// How long work must at least take, by what it computes and what it reads.

namespace vha {

/// What a machine does at most.
struct Machine {
  double bandwidth = 0;  ///< bytes/s read from memory
  double flops = 0;      ///< FLOP/s of matrix products
};

/// A decode step: one new token in each sequence of a batch.
struct DecodeStep {
  Index flops = 0;
  DecodeBytes bytes;

  /// Arithmetic intensity, in FLOPs per byte.
  constexpr double intensity() const {
    return static_cast<double>(flops) / static_cast<double>(bytes.total());
  }
};

/// The time in seconds by the roofline: the longer of computing and reading, which overlap. Bytes of 0
/// take none. Precondition: the machine's figures are positive, bandwidth where there are bytes.
constexpr double roofline_seconds(const Machine& machine, double flops, double bytes) {
  return std::max(flops / machine.flops, bytes > 0 ? bytes / machine.bandwidth : 0);
}

constexpr double roofline_seconds(const Machine& machine, const DecodeStep& step) {
  return roofline_seconds(machine, static_cast<double>(step.flops),
                          static_cast<double>(step.bytes.total()));
}

/// Of a step of one layer's attention, with `cached` tokens in each of `batch` sequences.
template <class Attention>
constexpr DecodeStep decode_step(const Attention& sizes, LayerForm form, Index cached, Index batch,
                                 Index weight_element_bytes, Index cache_element_bytes) {
  const Index visible = visible_tokens(sizes, cached);
  const Index flops = layer_flops(sizes, form, {.tokens = 1, .pairs = visible + 1}).total();
  return {
      .flops = batch * flops,
      .bytes = decode_bytes(sizes, form, cached, weight_element_bytes, cache_element_bytes, batch)};
}

/// Of a step of a whole model, as `decode_step` of a layer and `weights_read` count.
template <class Attention>
constexpr DecodeStep decode_step(const ModelSizes<Attention>& model, Index cached, Index batch,
                                 Index weight_element_bytes, Index cache_element_bytes) {
  DecodeStep step = decode_step(model.attention, model.forms.decode, cached, batch,
                                weight_element_bytes, cache_element_bytes);
  step.flops = batch * decode_flops_per_token(model, cached);
  step.bytes.weights += weights_read(model.mlp, batch) * weight_element_bytes;
  step.bytes.weights *= model.layers;
  step.bytes.cache *= model.layers;
  return step;
}

/// The fewest cached tokens per sequence at which a decode step reads more of the cache than of the
/// weights. Precondition: the layers have no window, with which there may be none.
template <class Attention>
constexpr Index context_where_cache_dominates(const ModelSizes<Attention>& model, Index batch,
                                              Index weight_element_bytes,
                                              Index cache_element_bytes) {
  const DecodeStep step = decode_step(model, 1, batch, weight_element_bytes, cache_element_bytes);
  return step.bytes.weights / step.bytes.cache + 1;
}

}  // namespace vha
