// SPDX-License-Identifier: Apache-2.0
#include "all_headers.hpp"

const int* other_version();
double other_fold_error();

const int* other_version() { return &vha::version_major; }

double other_fold_error() {
  const auto layer =
      vha::initialise_vha<float>({.hidden = 8, .head_dim = 4, .query_heads = 4, .kv_heads = 2});
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Identity(3, 8);
  return vha::fold_report(layer, vha::fold_vha(layer), x).largest_difference;
}
