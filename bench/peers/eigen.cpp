// SPDX-License-Identifier: Apache-2.0
// What a user would write with Eigen by hand. Its bf16 products are not vectorised: float32 only.
#include <Eigen/Core>

#include "peers.hpp"
#include "tiled_attention.hpp"

namespace bench {

namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Map = Eigen::Map<Matrix>;
using ConstMap = Eigen::Map<const Matrix>;

struct EigenProduct {
  static void scores(Index rows, Index depth, Index cols, const float* a, const float* b,
                     float* c) {
    Map(c, rows, cols).noalias() = ConstMap(a, rows, depth) * ConstMap(b, cols, depth).transpose();
  }
  static void values(Index rows, Index depth, Index cols, const float* a, const float* b,
                     float* c) {
    Map(c, rows, cols).noalias() = ConstMap(a, rows, depth) * ConstMap(b, depth, cols);
  }
};

class EigenPeer : public Peer {
 public:
  std::string name() const override { return "eigen"; }
  std::string version() const override {
    return vha::text(EIGEN_WORLD_VERSION, '.', EIGEN_MAJOR_VERSION, '.', EIGEN_MINOR_VERSION);
  }

  /// Each thread makes a part of the columns, so that with one row there is work for all too.
  Task product(const ProductOperands<float>& o) override {
    const auto threads = std::make_shared<Threads>(o.threads);
    const auto run = [o, threads] {
      threads->executor().for_each(o.threads, [&](Index task, Index) {
        const Index first = o.cols * task / o.threads, end = o.cols * (task + 1) / o.threads;
        Map(o.c, o.rows, o.cols).middleCols(first, end - first).noalias() =
            ConstMap(o.a, o.rows, o.depth) *
            ConstMap(o.b, o.depth, o.cols).middleCols(first, end - first);
      });
    };
    return {run, copy_from(o.c, o.rows * o.cols)};
  }

  Task core(const CoreOperands<float>& o) override { return tiled_attention<EigenProduct>(o); }
};

}  // namespace

std::unique_ptr<Peer> make_eigen_peer() {
  return std::make_unique<EigenPeer>();
}

}  // namespace bench
