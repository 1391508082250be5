// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <vha/fold/fold_vha.hpp>

namespace vha {

/// How exact a fold is. Where `largest_output` is 0 the differences are absolute.
struct FoldReport {
  double largest_output = 0;      ///< largest |output| of the unfolded layer
  double largest_difference = 0;  ///< of the two outputs, relative to `largest_output`
  double rms_difference = 0;      ///< root mean square of it, relative to `largest_output`
  /// Largest difference of a stored folded weight from the product in double, relative to the
  /// largest element of its matrix: what rounding to the stored type cost.
  double query_rounding = 0;
  double output_rounding = 0;
};

namespace detail {

template <StorageScalar S>
double rounding_error(const Weight<S>& stored, const RowMajorMatrix<double>& exact) {
  require_shape("folded weight", stored, exact.rows(), exact.cols());
  double largest = 0;
  double largest_error = 0;
  for (Index i = 0; i < exact.rows(); ++i) {
    for (Index j = 0; j < exact.cols(); ++j) {
      largest = std::max(largest, std::abs(exact(i, j)));
      largest_error =
          std::max(largest_error, std::abs(convert<double>(stored(i, j)) - exact(i, j)));
    }
  }
  return largest == 0 ? 0 : largest_error / largest;
}

}  // namespace detail

/// Compares outputs `[batch, tokens, hidden]` of two layers, or of two ways through one; says nothing
/// of weights. Throws Error where the shapes differ or a value is not finite.
template <Activations X, Activations Y>
FoldReport compare_outputs(const X& expected, const Y& actual) {
  const auto a = activations_view(expected);
  const auto b = activations_view(actual);
  if (a.batch != b.batch || a.tokens != b.tokens || a.channels != b.channels) {
    raise("actual", shape_text(a.batch, a.tokens, a.channels),
          shape_text(b.batch, b.tokens, b.channels));
  }
  FoldReport report;
  double squares = 0;
  bool all_finite = true;
  for (Index row = 0; row < a.batch; ++row) {
    for (Index token = 0; token < a.tokens; ++token) {
      for (Index channel = 0; channel < a.channels; ++channel) {
        const auto from = static_cast<double>(a(row, token, channel));
        const double difference = static_cast<double>(b(row, token, channel)) - from;
        all_finite = all_finite && is_finite(difference);
        report.largest_output = std::max(report.largest_output, std::abs(from));
        report.largest_difference = std::max(report.largest_difference, std::abs(difference));
        squares += difference * difference;
      }
    }
  }
  if (!all_finite) raise("outputs", "finite values", "an infinity or NaN");
  const auto count =
      static_cast<double>(checked_product("outputs", {a.batch, a.tokens, a.channels}));
  report.rms_difference = count == 0 ? 0 : std::sqrt(squares / count);
  if (report.largest_output > 0) {
    report.largest_difference /= report.largest_output;
    report.rms_difference /= report.largest_output;
  }
  return report;
}

/// Runs `layer` and its fold (of fold_vha, fold_premix or fold_postmix) on `x` and compares them,
/// and the folded weights with the products in double. Throws Error where the two layers differ in
/// shape, or an output is not finite.
template <class Layer, class Folded, Activations X>
FoldReport fold_report(const Layer& layer, const Folded& folded, const X& x) {
  require_size("folded.config().query_heads", layer.config().query_heads,
               folded.config().query_heads);
  require_size("folded.config().head_dim", layer.config().head_dim, folded.config().head_dim);
  FoldReport report = compare_outputs(layer.forward(x), folded.forward(x));
  using From = typename Layer::Weights;
  using To = typename Folded::Weights;
  const auto& w = layer.weights();
  if constexpr (From::has_premix && !To::has_premix) {
    report.query_rounding =
        detail::rounding_error(folded.weights().query.weight,
                               folded_query<double>("query.weight", w.query.weight, w.premix.maps));
  }
  if constexpr (From::has_postmix && !To::has_postmix) {
    report.output_rounding = detail::rounding_error(
        folded.weights().output.weight,
        folded_output<double>("output.weight", w.output.weight, w.postmix.dense()));
  }
  return report;
}

}  // namespace vha
