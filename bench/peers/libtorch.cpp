// SPDX-License-Identifier: Apache-2.0
// libtorch: grouped attention out of its batched products and softmax, float32 and bf16.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>

#include "../threads.hpp"
#include "peers.hpp"

namespace bench {

namespace {

// As in OpenMP's header, which not every compiler has.
extern "C" void omp_set_num_threads(int);

/// The calling thread's torch operations use `torch` threads. Products of float go to the BLAS, which
/// has threads of its own: OpenBLAS's are set, if it is OpenBLAS.
void set_threads(int torch, int blas) {
  at::get_num_threads();  // the first call on a thread would undo the next
  omp_set_num_threads(torch);
  static const auto set_blas =
      reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (set_blas != nullptr) set_blas(blas);
}

template <class S>
constexpr at::ScalarType type_of = sizeof(S) == 2 ? at::kBFloat16 : at::kFloat;

/// The memory at `data` as a tensor.
template <class S>
at::Tensor view(S* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  using Element = std::remove_const_t<S>;
  return at::from_blob(const_cast<Element*>(data), sizes, strides, at::dtype(type_of<Element>));
}
template <class S>
at::Tensor view(S* data, at::IntArrayRef sizes) {
  using Element = std::remove_const_t<S>;
  return at::from_blob(const_cast<Element*>(data), sizes, at::dtype(type_of<Element>));
}

template <class S>
Task product_task(const ProductOperands<S>& o) {
  const c10::InferenceMode inference;
  // As nn.Linear has it, [out, in].
  const auto weight = view(o.b, {o.depth, o.cols}).t().contiguous();
  const auto a = view(o.a, {o.rows, o.depth});
  const auto c = view(o.c, {o.rows, o.cols});
  const auto run = [=, threads = o.threads] {
    const c10::InferenceMode without_gradients;
    set_threads(threads, threads);
    auto out = c;
    at::mm_out(out, a, weight.t());
  };
  return {run, copy_from(o.c, o.rows * o.cols)};
}

/// Tile by tile of queries, a thread for each K/V head: torch's threads and its BLAS's, at work in
/// turns, would spin in each other's way.
template <class S>
class Core {
 public:
  explicit Core(const CoreOperands<S>& operands) : o_(operands), threads_(operands.threads) {
    const c10::InferenceMode inference;
    const Index most = std::min(tile_tokens, o_.tokens) * o_.group_size;
    const auto options = at::dtype(type_of<S>);
    query_ = at::zeros({heads(), most * o_.head_dim}, options);
    out_ = at::zeros_like(query_);
    logits_ = at::zeros({heads(), most * o_.keys}, options);
    weights_ = at::zeros_like(logits_);
    mask_ = at::full({tile_tokens, tile_tokens}, -HUGE_VAL, options).triu(1);
  }

  void run() {
    threads_.executor().for_each(heads(), [this](Index head, Index) {
      const c10::InferenceMode inference;
      set_threads(1, 1);
      for (Index first = 0; first < o_.tokens; first += tile_tokens) attend(head, first);
    });
  }

 private:
  Index heads() const { return o_.batch * o_.kv_heads; }

  void attend(Index head, Index first) {
    const Index d = o_.head_dim, group = o_.group_size;
    const Index tokens = std::min(tile_tokens, o_.tokens - first), rows = tokens * group;
    const Index keys = o_.keys - o_.tokens + first + tokens;
    const auto part = [&](const at::Tensor& buffer, at::IntArrayRef sizes) {
      return buffer[head].narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
    };
    const auto token_major = [&](auto* data) {
      const Index token = head / o_.kv_heads * o_.tokens + first;
      return view(data + token * o_.query_width() + head % o_.kv_heads * group * d,
                  {tokens, group, d}, {o_.query_width(), d, 1});
    };
    const auto cached = [&](const S* data) {
      return view(data + head * o_.capacity * d, {keys, d});
    };
    auto query = part(query_, {tokens, group, d});
    query.copy_(token_major(o_.query)).mul_(o_.scale());
    auto logits = part(logits_, {rows, keys});
    at::mm_out(logits, query.view({rows, d}), cached(o_.key).t());
    if (tokens > 1) {
      logits.view({tokens, group, keys})
          .narrow(2, keys - tokens, tokens)
          .add_(mask_.narrow(0, 0, tokens).narrow(1, 0, tokens).unsqueeze(1));
    }
    auto weights = part(weights_, {rows, keys});
    at::_softmax_out(weights, logits, -1, false);
    auto out = part(out_, {rows, d});
    at::mm_out(out, weights, cached(o_.value));
    token_major(o_.out).copy_(out.view({tokens, group, d}));
  }

  CoreOperands<S> o_;
  Threads threads_;
  at::Tensor query_, out_, logits_, weights_, mask_;
};

template <class S>
Task core_task(const CoreOperands<S>& o) {
  const auto core = std::make_shared<Core<S>>(o);
  return {[core] { core->run(); }, copy_from(o.out, o.out_size())};
}

class LibtorchPeer : public Peer {
 public:
  std::string name() const override { return "libtorch"; }
  std::string version() const override { return TORCH_VERSION; }
  bool supports(Element element) const override { return element != Element::float64; }

  Task product(const ProductOperands<float>& o) override { return product_task(o); }
  Task product(const ProductOperands<bfloat16>& o) override { return product_task(o); }
  Task core(const CoreOperands<float>& o) override { return core_task(o); }
  Task core(const CoreOperands<bfloat16>& o) override { return core_task(o); }
};

}  // namespace

std::unique_ptr<Peer> make_libtorch_peer() {
  return std::make_unique<LibtorchPeer>();
}

}  // namespace bench
