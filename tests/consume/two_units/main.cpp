// SPDX-License-Identifier: Apache-2.0
// With other.cpp: a function in a header that is not inline is defined twice and does not link, and
// a variable that is not inline has two addresses.
#include "all_headers.hpp"

const int* other_version();
double other_fold_error();

int main() {
  const auto layer =
      vha::initialise_vha<float>({.hidden = 8, .head_dim = 4, .query_heads = 4, .kv_heads = 2});
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Identity(3, 8);
  const double error = vha::fold_report(layer, vha::fold_vha(layer), x).largest_difference;
  return other_version() == &vha::version_major && other_fold_error() == error ? 0 : 1;
}
