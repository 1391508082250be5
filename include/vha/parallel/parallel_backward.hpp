// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#include <vha/attention/attention_backward.hpp>
#include <vha/attention/attention_gradients.hpp>
#include <vha/core/sizes.hpp>
#include <vha/parallel/parallel_attention.hpp>

namespace vha {

namespace detail {

/// Ranks that have the same of a weight: those of the same `place`, of `places` altogether.
struct WeightSharing {
  Index place = 0;
  Index places = 1;

  /// Of the weight that AttentionGradients calls `name`, for the rank that `slice` is of. W_Q behind
  /// Premix is shared by ranks that have the same physical heads, K and V and the maps by those that have
  /// the same K/V heads, the norms by all.
  static WeightSharing of(std::string_view name, bool has_premix, const HeadSlice& slice) {
    const Index copies = slice.kv_copies;
    if (name == "q_norm" || name == "k_norm") return {};
    if (name.starts_with("key.") || name.starts_with("value.") || name.starts_with("premix")) {
      return {slice.rank / copies, slice.ranks / copies};
    }
    if (name.starts_with("query.") && has_premix) return {slice.rank % copies, copies};
    return {slice.rank, slice.ranks};
  }
  bool is_shared(Index ranks) const { return places < ranks; }
};

/// Sums of gradients over the ranks that share their weights, by the one operation that there is, a sum
/// over all ranks: each adds to its weight's place and leaves the others' at zero. It takes `places` times
/// the memory and the exchange of a sum over the sharing ranks alone, once for a backward pass.
template <class Layer>
class SharedGradients {
 public:
  using T = typename Layer::T;

  /// Sets aside what was in the gradients, of those that are asked for and that ranks share.
  SharedGradients(const Layer& layer, AttentionGradients<T>& gradients) : layer_(layer) {
    const HeadSlice& slice = layer.slice();
    gradients.for_each(
        layer, [&](const std::string& name, const auto&, RowMajorMatrix<T>& gradient) {
          const auto sharing = WeightSharing::of(name, Layer::Weights::has_premix, slice);
          if (gradient.size() == 0 || !sharing.is_shared(slice.ranks)) return;
          shared_.push_back({&gradient, gradient, sharing});
        });
    for (const Shared& shared : shared_) shared.gradient->setZero();
  }
  SharedGradients(const SharedGradients&) = delete;
  SharedGradients& operator=(const SharedGradients&) = delete;
  /// Puts it back, where the sums were not made.
  ~SharedGradients() {
    for (Shared& shared : shared_) shared.gradient->swap(shared.before);
  }

  void add_up() {
    std::vector<T> values;
    for (const auto& [gradient, before, sharing] : shared_) {
      const auto size = static_cast<std::size_t>(gradient->size());
      values.resize(values.size() + size * static_cast<std::size_t>(sharing.places));
      std::copy_n(gradient->data(), size,
                  values.end() - (sharing.places - sharing.place) * gradient->size());
    }
    layer_.sum(values);
    auto from = values.begin();
    for (const auto& [gradient, before, sharing] : shared_) {
      std::copy_n(from + sharing.place * gradient->size(), gradient->size(), gradient->data());
      *gradient += before;
      from += sharing.places * gradient->size();
    }
    shared_.clear();
  }

 private:
  struct Shared {
    RowMajorMatrix<T>* gradient;
    RowMajorMatrix<T> before;
    WeightSharing sharing;
  };

  const Layer& layer_;
  std::vector<Shared> shared_;
};

}  // namespace detail

/// The backward pass of a layer that ranks run together, by all of them at once with the same arguments:
/// each gets the whole gradient of `x`, and the gradients of its own weights, which ranks that share a weight
/// have in common. All must ask for the gradients of the same weights. See the other attention_backward.
template <class Whole, Communicator Comm, Activations X, Activations Upstream, Activations Dx>
void attention_backward(
    const ParallelAttention<Whole, Comm>& layer, const X& x,
    const AttentionTrace<typename ParallelAttention<Whole, Comm>::T>& trace,
    const Upstream& upstream, Dx&& dx,
    AttentionGradients<typename ParallelAttention<Whole, Comm>::T>& gradients,
    AttentionBackwardWorkspace<typename ParallelAttention<Whole, Comm>::T>& workspace,
    const TokenLayout& layout = {}) {
  using T = typename ParallelAttention<Whole, Comm>::T;
  gradients.require_fit(layer);
  detail::SharedGradients shared(layer, gradients);
  detail::attention_backward(layer, x, trace, upstream, dx, gradients, workspace, layout,
                             [&](std::span<T> dx_rows) { layer.sum(dx_rows); });
  shared.add_up();
}

}  // namespace vha
