// SPDX-License-Identifier: Apache-2.0
// failing_rank killed|throws|without: one rank goes while the others wait for it in the middle of a decode,
// or a layer is split where MPI was never started.

#include <csignal>
#include <cstdio>
#include <exception>
#include <string_view>
#include <vha/parallel/mpi_communicator.hpp>
#include <vha/vha.hpp>

namespace {

void decode(vha::MpiCommunicator& ranks, std::string_view how) {
  const vha::AttentionConfig config{.hidden = 8, .head_dim = 4, .query_heads = 8, .kv_heads = 2};
  const auto layer = vha::initialise_vha<float>(config);
  const vha::ParallelAttention part(layer, ranks);
  vha::KvCache<float> kv_cache(part.config(), 1, 100);
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Ones(1, 8);
  for (int step = 0; step < 100; ++step) {
    if (step == 7 && ranks.rank() == ranks.size() - 1) {
      if (how == "killed") {
        std::fprintf(stderr, "rank %td: killed\n", ranks.rank());
        std::raise(SIGKILL);
      }
      vha::raise("step", "other weather", "rain");
    }
    part.forward(x, kv_cache);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view how = argc == 2 ? argv[1] : "";
  try {
    if (how == "without") vha::MpiCommunicator();
    const vha::MpiSession session;
    vha::MpiCommunicator ranks;
    try {
      decode(ranks, how);
    } catch (const vha::Error& error) {
      std::fprintf(stderr, "rank %td: %s\n", ranks.rank(), error.what());
      throw;  // out of the session, which ends the other ranks
    }
  } catch (const vha::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
  return 0;
}
