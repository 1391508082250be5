// SPDX-License-Identifier: Apache-2.0
// ggml: its flash attention, and its products, whose results are always float. Float32 and bf16.
#include <ggml-cpu.h>
#include <ggml.h>

#include <cmath>
#include <cstdint>

#include "peers.hpp"

namespace bench {

namespace {

template <class S>
constexpr ggml_type type_of = sizeof(S) == 2 ? GGML_TYPE_BF16 : GGML_TYPE_F32;

/// Tensors over memory that stands already, and one operation on them.
class Graph {
 public:
  Graph() : context_(ggml_init({.mem_size = 1 << 20, .mem_buffer = nullptr, .no_alloc = true})) {
    ggml_cpu_init();
  }
  ~Graph() {
    if (pool_ != nullptr) ggml_threadpool_free(pool_);
    ggml_free(context_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  ggml_context* context() { return context_; }

  /// A contiguous tensor, its sizes from the innermost outwards as is ggml's order.
  template <class S>
  ggml_tensor* at(S* data, ggml_type type, Index n0, Index n1, Index n2 = 1, Index n3 = 1) {
    ggml_tensor* const tensor = ggml_new_tensor_4d(context_, type, n0, n1, n2, n3);
    tensor->data = const_cast<std::remove_const_t<S>*>(data);
    return tensor;
  }

  /// Makes `result`, into `out`, ready to be computed.
  void plan(ggml_tensor* result, float* out, int threads) {
    result->data = out;
    graph_ = ggml_new_graph(context_);
    ggml_build_forward_expand(graph_, result);
    auto parameters = ggml_threadpool_params_default(threads);
    pool_ = ggml_threadpool_new(&parameters);
    plan_ = ggml_graph_plan(graph_, threads, pool_);
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void run() {
    if (ggml_graph_compute(graph_, &plan_) != GGML_STATUS_SUCCESS) {
      throw std::runtime_error("ggml_graph_compute failed");
    }
  }

 private:
  ggml_context* context_;
  ggml_cgraph* graph_ = nullptr;
  ggml_threadpool* pool_ = nullptr;
  ggml_cplan plan_ = {};
  std::vector<std::uint8_t> work_;
};

/// The operand as float, for ggml takes bf16 for weights, keys and values alone, and its results
/// back: itself where it is float, else a copy in `buffer`.
const float* input(const float* data, std::vector<float>&) {
  return data;
}
const float* input(const bfloat16*, std::vector<float>& buffer) {
  return buffer.data();
}
float* output(float* data, std::vector<float>&) {
  return data;
}
float* output(bfloat16*, std::vector<float>& buffer) {
  return buffer.data();
}

template <class S>
class Product {
 public:
  explicit Product(const ProductOperands<S>& o)
      : o_(o),
        weight_(static_cast<std::size_t>(o.depth * o.cols)),
        a_(sizeof(S) == 4 ? 0 : static_cast<std::size_t>(o.rows * o.depth)),
        c_(sizeof(S) == 4 ? 0 : static_cast<std::size_t>(o.rows * o.cols)) {
    for (Index j = 0; j < o.cols; ++j) {
      for (Index k = 0; k < o.depth; ++k) {
        weight_[static_cast<std::size_t>(j * o.depth + k)] = o.b[k * o.cols + j];
      }
    }
    ggml_tensor* const weight = graph_.at(weight_.data(), type_of<S>, o.depth, o.cols);
    ggml_tensor* const a = graph_.at(input(o.a, a_), GGML_TYPE_F32, o.depth, o.rows);
    graph_.plan(ggml_mul_mat(graph_.context(), weight, a), output(o.c, c_), o.threads);
  }

  void run() {
    for (std::size_t k = 0; k < a_.size(); ++k) a_[k] = vha::convert<float>(o_.a[k]);
    graph_.run();
    for (std::size_t k = 0; k < c_.size(); ++k) o_.c[k] = vha::convert<S>(c_[k]);
  }

 private:
  ProductOperands<S> o_;
  std::vector<S> weight_;
  std::vector<float> a_, c_;
  Graph graph_;
};

template <class S>
class Core {
 public:
  explicit Core(const CoreOperands<S>& o)
      : o_(o),
        query_(sizeof(S) == 4 ? 0 : static_cast<std::size_t>(o.out_size())),
        out_(query_.size()) {
    const Index heads = o.kv_heads * o.group_size, d = o.head_dim;
    auto* const context = graph_.context();
    const auto query = ggml_permute(
        context, graph_.at(input(o.query, query_), GGML_TYPE_F32, d, heads, o.tokens, o.batch), 0,
        2, 1, 3);
    const auto cached = [&](const S* data) {
      ggml_tensor* const all = graph_.at(data, type_of<S>, d, o.capacity, o.kv_heads, o.batch);
      return ggml_view_4d(context, all, d, o.keys, o.kv_heads, o.batch, all->nb[1], all->nb[2],
                          all->nb[3], 0);
    };
    ggml_tensor* mask = nullptr;  // a single query sees all
    if (o.tokens > 1) {
      mask_.assign(static_cast<std::size_t>(o.tokens * o.keys), ggml_fp32_to_fp16(0));
      for (Index token = 0; token < o.tokens; ++token) {
        const auto row = mask_.begin() + static_cast<std::ptrdiff_t>(token * o.keys);
        std::fill(row + static_cast<std::ptrdiff_t>(o.keys - o.tokens + token + 1),
                  row + static_cast<std::ptrdiff_t>(o.keys), ggml_fp32_to_fp16(-HUGE_VALF));
      }
      mask = graph_.at(mask_.data(), GGML_TYPE_F16, o.keys, o.tokens);
    }
    graph_.plan(
        ggml_flash_attn_ext(context, query, cached(o.key), cached(o.value), mask, o.scale(), 0, 0),
        output(o.out, out_), o.threads);
  }

  void run() {
    for (std::size_t k = 0; k < query_.size(); ++k) query_[k] = vha::convert<float>(o_.query[k]);
    graph_.run();
    for (std::size_t k = 0; k < out_.size(); ++k) o_.out[k] = vha::convert<S>(out_[k]);
  }

 private:
  CoreOperands<S> o_;
  std::vector<float> query_, out_;
  std::vector<ggml_fp16_t> mask_;
  Graph graph_;
};

template <class State, class Operands>
Task task(const Operands& o, std::function<void(float*)> copy_result) {
  const auto state = std::make_shared<State>(o);
  return {[state] { state->run(); }, std::move(copy_result)};
}

class GgmlPeer : public Peer {
 public:
  std::string name() const override { return "ggml"; }
  std::string version() const override { return ggml_version(); }
  bool supports(Element element) const override { return element != Element::float64; }

  Task product(const ProductOperands<float>& o) override { return make_product(o); }
  Task product(const ProductOperands<bfloat16>& o) override { return make_product(o); }
  Task core(const CoreOperands<float>& o) override { return make_core(o); }
  Task core(const CoreOperands<bfloat16>& o) override { return make_core(o); }

 private:
  template <class S>
  static Task make_product(const ProductOperands<S>& o) {
    return task<Product<S>>(o, copy_from(o.c, o.rows * o.cols));
  }
  template <class S>
  static Task make_core(const CoreOperands<S>& o) {
    return task<Core<S>>(o, copy_from(o.out, o.out_size()));
  }
};

}  // namespace

std::unique_ptr<Peer> make_ggml_peer() {
  return std::make_unique<GgmlPeer>();
}

}  // namespace bench
