// SPDX-License-Identifier: Apache-2.0
// oneDNN: its matmul, with weights in the layout that it asks for, and its softmax between two of
// them. Float32 and bf16.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <utility>

#include "peers.hpp"

namespace bench {

namespace {

using dnnl::memory;
using Dims = memory::dims;
using Arguments = std::unordered_map<int, memory>;

static_assert(DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP,
              "the oneDNN peer sets its threads by OpenMP");

template <class S>
constexpr memory::data_type type_of = sizeof(S) == 2 ? memory::data_type::bf16
                                                     : memory::data_type::f32;

// As in OpenMP's header, which not every compiler has.
extern "C" void omp_set_num_threads(int);

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

/// Primitives and what each is run on, in order.
class Sequence {
 public:
  template <class S>
  memory at(S* data, const Dims& dims, const Dims& strides) const {
    using Element = std::remove_const_t<S>;
    return {{dims, type_of<Element>, strides}, cpu(), const_cast<Element*>(data)};
  }

  void add(const dnnl::primitive& primitive, Arguments arguments) {
    steps_.push_back({primitive, std::move(arguments)});
  }
  void add_product(const memory& a, const memory& b, const memory& c, float scale = 1) {
    dnnl::primitive_attr attributes;
    if (scale != 1) attributes.set_output_scales(0, {scale});
    const dnnl::matmul::primitive_desc desc({a.get_desc(), b.get_desc(), c.get_desc()}, attributes,
                                            cpu());
    add(dnnl::matmul(desc), {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
  }

  std::size_t size() const { return steps_.size(); }
  void run(std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) steps_[i].first.execute(stream_, steps_[i].second);
    stream_.wait();
  }

 private:
  dnnl::stream stream_{cpu()};
  std::vector<std::pair<dnnl::primitive, Arguments>> steps_;
};

template <class S>
Task product_task(const ProductOperands<S>& o) {
  omp_set_num_threads(o.threads);
  const auto sequence = std::make_shared<Sequence>();
  const auto a = sequence->at(o.a, {o.rows, o.depth}, {o.depth, 1});
  const auto b = sequence->at(o.b, {o.depth, o.cols}, {o.cols, 1});
  const auto c = sequence->at(o.c, {o.rows, o.cols}, {o.cols, 1});
  const memory::desc any({o.depth, o.cols}, type_of<S>, memory::format_tag::any);
  const dnnl::matmul::primitive_desc desc({a.get_desc(), any, c.get_desc()}, cpu());
  memory packed(desc.weights_desc(), cpu());
  Sequence packing;
  packing.add(dnnl::reorder(b, packed), {{DNNL_ARG_FROM, b}, {DNNL_ARG_TO, packed}});
  packing.run(0, 1);
  sequence->add(dnnl::matmul(desc),
                {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, c}});
  const auto run = [sequence, threads = o.threads] {
    omp_set_num_threads(threads);
    sequence->run(0, sequence->size());
  };
  return {run, copy_from(o.c, o.rows * o.cols)};
}

/// Tile by tile of queries, all K/V heads of a sequence in one product.
template <class S>
class Core {
 public:
  explicit Core(const CoreOperands<S>& operands) : o_(operands) {
    omp_set_num_threads(o_.threads);
    const Index most = std::min(tile_tokens, o_.tokens) * o_.group_size;
    query_.resize(static_cast<std::size_t>(o_.kv_heads * most * o_.head_dim));
    out_.resize(query_.size());
    logits_.resize(static_cast<std::size_t>(o_.kv_heads * most * o_.keys));
    if (sizeof(S) == 2) weights_.resize(logits_.size());
    for (Index batch = 0; batch < o_.batch; ++batch) {
      for (Index first = 0; first < o_.tokens; first += tile_tokens) add_tile(batch, first);
    }
  }

  void run() {
    omp_set_num_threads(o_.threads);
    for (const Tile& tile : tiles_) {
      gather(tile);
      sequence_.run(tile.step, tile.step + 1);
      mask(tile);
      sequence_.run(tile.step + 1, tile.step_end);
      scatter(tile);
    }
  }

 private:
  struct Tile {
    Index batch, first, tokens;
    std::size_t step, step_end;
  };

  Index keys_of(const Tile& tile) const { return o_.keys - o_.tokens + tile.first + tile.tokens; }

  void add_tile(Index batch, Index first) {
    Tile tile{batch, first, std::min(tile_tokens, o_.tokens - first), sequence_.size(), 0};
    const Index heads = o_.kv_heads, rows = tile.tokens * o_.group_size, d = o_.head_dim;
    const Index keys = keys_of(tile), cached = batch * heads * o_.capacity * d;
    const auto query = sequence_.at(query_.data(), {heads, rows, d}, {rows * d, d, 1});
    const auto out = sequence_.at(out_.data(), {heads, rows, d}, {rows * d, d, 1});
    const auto logits = sequence_.at(logits_.data(), {heads, rows, keys}, {rows * keys, keys, 1});
    const auto key = sequence_.at(o_.key + cached, {heads, d, keys}, {o_.capacity * d, 1, d});
    const auto value = sequence_.at(o_.value + cached, {heads, keys, d}, {o_.capacity * d, d, 1});
    sequence_.add_product(query, key, logits, o_.scale());
    const dnnl::softmax_forward::primitive_desc softmax(
        {dnnl::prop_kind::forward_inference, logits.get_desc(), 2}, cpu());
    sequence_.add(dnnl::softmax_forward(softmax), {{DNNL_ARG_SRC, logits}, {DNNL_ARG_DST, logits}});
    if constexpr (sizeof(S) == 2) {
      const auto weights =
          sequence_.at(weights_.data(), {heads, rows, keys}, {rows * keys, keys, 1});
      sequence_.add(dnnl::reorder(logits, weights),
                    {{DNNL_ARG_FROM, logits}, {DNNL_ARG_TO, weights}});
      sequence_.add_product(weights, value, out);
    } else {
      sequence_.add_product(logits, value, out);
    }
    tile.step_end = sequence_.size();
    tiles_.push_back(tile);
  }

  template <class Body>
  void each_head(const Tile& tile, const Body& body) const {
    const Index width = o_.group_size * o_.head_dim;
    for (Index group = 0; group < o_.kv_heads; ++group) {
      for (Index token = 0; token < tile.tokens; ++token) {
        body((group * tile.tokens + token) * width,
             (tile.batch * o_.tokens + tile.first + token) * o_.query_width() + group * width,
             width);
      }
    }
  }
  void gather(const Tile& tile) {
    each_head(tile, [&](Index packed, Index token_major, Index width) {
      std::copy_n(o_.query + token_major, width, query_.data() + packed);
    });
  }
  void scatter(const Tile& tile) const {
    each_head(tile, [&](Index packed, Index token_major, Index width) {
      std::copy_n(out_.data() + packed, width, o_.out + token_major);
    });
  }
  void mask(const Tile& tile) {
    const Index keys = keys_of(tile), rows = tile.tokens * o_.group_size;
    for (Index row = 0; row < o_.kv_heads * rows; ++row) {
      const Index hidden = tile.tokens - 1 - row % rows / o_.group_size;
      std::fill_n(logits_.data() + (row + 1) * keys - hidden, hidden, -HUGE_VALF);
    }
  }

  CoreOperands<S> o_;
  Sequence sequence_;
  std::vector<S> query_, out_, weights_;
  std::vector<float> logits_;
  std::vector<Tile> tiles_;
};

template <class S>
Task core_task(const CoreOperands<S>& o) {
  const auto core = std::make_shared<Core<S>>(o);
  return {[core] { core->run(); }, copy_from(o.out, o.out_size())};
}

class OneDnnPeer : public Peer {
 public:
  std::string name() const override { return "onednn"; }
  std::string version() const override {
    const auto* const v = dnnl_version();
    return vha::text(v->major, '.', v->minor, '.', v->patch);
  }
  bool supports(Element element) const override { return element != Element::float64; }

  Task product(const ProductOperands<float>& o) override { return product_task(o); }
  Task product(const ProductOperands<bfloat16>& o) override { return product_task(o); }
  Task core(const CoreOperands<float>& o) override { return core_task(o); }
  Task core(const CoreOperands<bfloat16>& o) override { return core_task(o); }
};

}  // namespace

std::unique_ptr<Peer> make_onednn_peer() {
  return std::make_unique<OneDnnPeer>();
}

}  // namespace bench
