// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "peer.hpp"

namespace bench {

// Each is defined in the file of its name, which is compiled where the library was found.
std::unique_ptr<Peer> make_eigen_peer();
std::unique_ptr<Peer> make_openblas_peer();
std::unique_ptr<Peer> make_onednn_peer();
std::unique_ptr<Peer> make_libtorch_peer();
std::unique_ptr<Peer> make_ggml_peer();

}  // namespace bench
