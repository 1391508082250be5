// SPDX-License-Identifier: Apache-2.0
#include "peers.hpp"

namespace bench {

const std::vector<std::unique_ptr<Peer>>& peers() {
  static const auto all = [] {
    std::vector<std::unique_ptr<Peer>> list;
#ifdef VHA_BENCH_EIGEN
    list.push_back(make_eigen_peer());
#endif
#ifdef VHA_BENCH_OPENBLAS
    list.push_back(make_openblas_peer());
#endif
#ifdef VHA_BENCH_ONEDNN
    list.push_back(make_onednn_peer());
#endif
#ifdef VHA_BENCH_LIBTORCH
    list.push_back(make_libtorch_peer());
#endif
#ifdef VHA_BENCH_GGML
    list.push_back(make_ggml_peer());
#endif
    return list;
  }();
  return all;
}

}  // namespace bench
