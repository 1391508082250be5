// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vha/attention/attention.hpp>
#include <vha/attention/batch_tokens.hpp>
#include <vha/attention/kv_cache.hpp>
#include <vha/attention/layer_forward.hpp>
#include <vha/attention/trace.hpp>
#include <vha/attention/workspace.hpp>
#include <vha/core/config.hpp>
#include <vha/core/view.hpp>
#include <vha/parallel/communicator.hpp>
#include <vha/parallel/head_slice.hpp>
#include <vha/parallel/slice_weights.hpp>

namespace vha {

template <class Layer, Communicator Comm>
class ParallelAttention;

/// One rank's part of an attention layer that `communicator.size()` ranks run together (tensor
/// parallelism): its heads, as HeadSlice shares them out, with their weights and their cache. Used as the
/// whole layer is, by all ranks at once, with the same `x`, layout and calls; each gets the whole output.
///
///     vha::MpiCommunicator ranks;  // or any other Communicator
///     const vha::ParallelAttention part(layer, ranks);
///     vha::KvCache<float> kv_cache(part.config(), batch, capacity);  // of this rank's K/V heads
///     const auto y = part.forward(x, kv_cache);                      // as layer.forward(x, …)
///
/// The ranks exchange, as sums over all of them, `hidden` numbers for each token, which are the partial
/// sums of the output projection, and with a Postmix rank · head_dim more. A layer that is folded has no
/// other exchange. Each rank's threads and memory are its own; the exchange is on the calling thread.
///
/// `config()`, `weights()`, the trace and the gradients are of this rank's heads.
template <StorageScalar S, class PremixPart, class PostmixPart, class GatePart, int HeadDim,
          int GroupSize, Communicator Comm>
class ParallelAttention<Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>, Comm>
    : public LayerForward<
          ParallelAttention<Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>,
                            Comm>,
          S, AttentionWorkspace<Compute<S>>, AttentionTrace<Compute<S>>> {
 public:
  using T = Compute<S>;
  using Whole = Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>;
  // A rank may have fewer heads in a group than the layer has.
  using Part = Attention<S, PremixPart, typename detail::ParallelPart<PostmixPart, Comm>::Type,
                         GatePart, HeadDim>;
  using Weights = typename Part::Weights;
  using Workspace = AttentionWorkspace<T>;

  /// The weights are views of `layer`'s, or share what it holds. `communicator` must live as long. Throws
  /// Error where the ranks do not divide the heads.
  ParallelAttention(const Whole& layer, Comm& communicator)
      : slice_(slice_heads(layer.config(), communicator.rank(), communicator.size())),
        part_(slice_.config_of(layer.config()),
              slice_weights(layer.weights(), layer.config(), slice_, communicator)),
        communicator_(&communicator) {}

  const HeadSlice& slice() const { return slice_; }
  const AttentionConfig& config() const { return part_.config(); }
  const Weights& weights() const { return part_.weights(); }
  Index hidden() const { return part_.hidden(); }
  KvCacheShape cache_shape(Index batch, Index capacity) const {
    return part_.cache_shape(batch, capacity);
  }

  /// Adds up `values` over the ranks.
  void sum(std::span<T> values) const { communicator_->sum(values); }

 private:
  using Base = LayerForward<ParallelAttention, S, AttentionWorkspace<T>, AttentionTrace<T>>;
  friend Base;

  template <Operand P, class C>
  void cache_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                   std::span<const Position> positions, KvCache<C>& cache, Workspace& workspace,
                   AttentionTrace<T>* trace) const {
    part_.template cache_block<P>(x, tokens, positions, cache, workspace, trace);
  }

  template <Operand P, class C>
  const T* attend_block(const MatrixView<T>& x, detail::BatchTokens tokens,
                        std::span<const Position> positions, KvCache<C>& cache,
                        Workspace& workspace, AttentionTrace<T>* trace) const {
    T* const y = part_.template attend_block<P>(x, tokens, positions, cache, workspace, trace);
    sum({y, static_cast<std::size_t>(x.rows * hidden())});
    return y;
  }

  HeadSlice slice_;
  Part part_;
  Comm* communicator_;
};

template <StorageScalar S, class PremixPart, class PostmixPart, class GatePart, int HeadDim,
          int GroupSize, Communicator Comm>
ParallelAttention(const Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>&, Comm&)
    -> ParallelAttention<Attention<S, PremixPart, PostmixPart, GatePart, HeadDim, GroupSize>, Comm>;

}  // namespace vha
