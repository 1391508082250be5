// SPDX-License-Identifier: Apache-2.0
// OpenBLAS: float32 only, since Debian builds it without bf16 products.
#include <cblas.h>

#include "peers.hpp"
#include "tiled_attention.hpp"

namespace bench {

namespace {

int blas(Index size) {
  return static_cast<int>(size);
}

/// C = A·B or A·Bᵀ on contiguous row-major matrices.
void sgemm(bool transposed_b, Index rows, Index depth, Index cols, const float* a, const float* b,
           float* c) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, transposed_b ? CblasTrans : CblasNoTrans, blas(rows),
              blas(cols), blas(depth), 1.0F, a, blas(depth), b, blas(transposed_b ? depth : cols),
              0.0F, c, blas(cols));
}

struct BlasProduct {
  static void scores(Index rows, Index depth, Index cols, const float* a, const float* b,
                     float* c) {
    sgemm(true, rows, depth, cols, a, b, c);
  }
  static void values(Index rows, Index depth, Index cols, const float* a, const float* b,
                     float* c) {
    sgemm(false, rows, depth, cols, a, b, c);
  }
};

class OpenBlasPeer : public Peer {
 public:
  std::string name() const override { return "openblas"; }
  std::string version() const override {
    return vha::text(openblas_get_config(), ", kernel ", openblas_get_corename());
  }

  Task product(const ProductOperands<float>& o) override {
    const auto run = [o] {
      openblas_set_num_threads(o.threads);
      if (o.rows == 1) {
        cblas_sgemv(CblasRowMajor, CblasTrans, blas(o.depth), blas(o.cols), 1.0F, o.b, blas(o.cols),
                    o.a, 1, 0.0F, o.c, 1);
      } else {
        sgemm(false, o.rows, o.depth, o.cols, o.a, o.b, o.c);
      }
    };
    return {run, copy_from(o.c, o.rows * o.cols)};
  }

  /// The tiles are shared out to threads that each call a BLAS of one.
  Task core(const CoreOperands<float>& o) override {
    Task task = tiled_attention<BlasProduct>(o);
    task.run = [run = std::move(task.run)] {
      openblas_set_num_threads(1);
      run();
    };
    return task;
  }
};

}  // namespace

std::unique_ptr<Peer> make_openblas_peer() {
  return std::make_unique<OpenBlasPeer>();
}

}  // namespace bench
