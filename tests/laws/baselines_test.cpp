// SPDX-License-Identifier: Apache-2.0
// Every layer that VHA is compared with obeys the laws that VHA obeys: it is its naive twin, decode is
// prefill, a padded row is the row alone, nothing looks ahead, and the form that is served is the layer.

#include <functional>

#include "dynamic_head_layers.hpp"
#include "error_of.hpp"
#include "fixtures.hpp"
#include "naive_baselines.hpp"
#include "run.hpp"

namespace laws {
namespace {

using vha::Index;
using Matrix = vha::RowMajorMatrix<double>;
using support::error_of;

inline constexpr double tolerance_of_forms = 1e-12;

/// A layer and its naive twin.
template <class Layer>
struct Case {
  std::string name;
  Layer layer;
  std::function<naive::Vector(const naive::Vector& x, const naive::Positions&)> twin;
};

/// Layers of the library's own kinds, whose twin is the main layer's.
template <class LayerType>
struct OwnKind {
  using Layer = LayerType;
  static Case<Layer> own_case(const naive::Layer& twin, const char* name) {
    return {name, library_layer<Layer>(twin),
            [twin](const naive::Vector& x, const naive::Positions& positions) {
              return naive::forward(twin, x, positions).out;
            }};
  }
};

template <naive::Index KvHeads>
struct PlainHeads : OwnKind<vha::GqaAttention<double>> {
  static std::vector<Case<Layer>> cases(Random& random) {
    std::vector<Case<Layer>> result;
    for (LayerShape shape : layer_shapes) {
      shape.physical_heads = 6 / KvHeads;
      shape.kv_heads = KvHeads;
      naive::Layer twin = random_layer<double>(shape, random);
      const auto width = twin.query_heads() * twin.head_dim;
      twin.wq = random.values<double>(shape.hidden * width);
      if (shape.biases) twin.bq = random.values<double>(width);
      for (auto* map : {&twin.premix, &twin.postmix_a, &twin.postmix_b}) map->clear();
      result.push_back(own_case(twin, shape.name));
    }
    return result;
  }
};
struct Mha : PlainHeads<6> {};
struct Gqa : PlainHeads<3> {};
struct Mqa : PlainHeads<1> {};

struct GatedVha : OwnKind<vha::VhaAttention<double, vha::SigmoidGate<double>>> {
  static std::vector<Case<Layer>> cases(Random& random) {
    std::vector<Case<Layer>> result;
    for (const LayerShape& shape : layer_shapes) {
      result.push_back(own_case(random_gated_layer<double>(shape, random), shape.name));
    }
    return result;
  }
  static auto served(const Layer& layer) { return vha::fold_premix(layer); }
};

struct SiluPremix : OwnKind<vha::VhaAttention<double, vha::NoGate, vha::Silu>> {
  static std::vector<Case<Layer>> cases(Random& random) {
    std::vector<Case<Layer>> result;
    for (const LayerShape& shape : layer_shapes) {
      naive::Layer twin = random_layer<double>(shape, random);
      twin.premix_silu = true;
      result.push_back(own_case(twin, shape.name));
    }
    return result;
  }
  static auto served(const Layer& layer) { return vha::fold_postmix(layer); }
};

struct SiluPostmix {
  using Layer = vha::VhaAttention<double, vha::NoGate, vha::Identity, vha::Silu>;
  static std::vector<Case<Layer>> cases(Random& random) {
    std::vector<Case<Layer>> result;
    for (const LayerShape& shape : layer_shapes) {
      const naive::Layer twin = random_layer<double>(shape, random);
      const auto forward = [twin](const naive::Vector& x, const naive::Positions& positions) {
        return naive::linear(naive::silu(naive::forward(twin, x, positions).heads_mixed),
                             positions.size(), twin.query_heads() * twin.head_dim, twin.wo, twin.bo,
                             twin.hidden);
      };
      result.push_back({shape.name, library_layer<Layer>(twin), forward});
    }
    return result;
  }
  static auto served(const Layer& layer) { return vha::fold_premix(layer); }
};

struct Mfa {
  using Layer = vha::MfaAttention<double>;
  static std::vector<Case<Layer>> cases(Random& random) {
    std::vector<Case<Layer>> result;
    for (const LayerShape& shape : layer_shapes) {
      if (shape.value_scale != 1) continue;
      naive::Layer l = random_layer<double>(shape, random);
      const auto heads = l.physical_heads, factor = l.head_dim + 1;
      l.kv_heads = 1;
      l.physical_head_dim = factor;
      l.wq = random.values<double>(l.hidden * factor);
      if (shape.biases) l.bq = random.values<double>(factor);
      l.premix = random.values<double>(heads * factor * l.head_dim);
      for (auto* weight : {&l.wk, &l.wv}) *weight = random.values<double>(l.hidden * l.head_dim);
      if (shape.biases) l.bk = l.bv = random.values<double>(l.head_dim);
      l.wo = random.values<double>(heads * l.head_dim * l.hidden);

      Layer::Weights weights;
      const auto linear = [](const naive::Vector& weight, naive::Index in,
                             const naive::Vector& bias) {
        vha::Linear<double> result_of{own_weight<double>(weight, in)};
        if (!bias.empty()) result_of.bias = own_weight<double>(bias, 1);
        return result_of;
      };
      weights.query = linear(l.wq, l.hidden, l.bq);
      weights.key = linear(l.wk, l.hidden, l.bk);
      weights.value = linear(l.wv, l.hidden, l.bv);
      weights.output = linear(l.wo, heads * l.head_dim, l.bo);
      if (!l.q_norm.empty()) {
        weights.q_norm = own_weight<double>(l.q_norm, 1);
        weights.k_norm = own_weight<double>(l.k_norm, 1);
      }
      weights.premix.maps =
          vha::view_premix_maps<double>(l.premix.data(), static_cast<Index>(heads),
                                        static_cast<Index>(factor), static_cast<Index>(l.head_dim));
      for (auto& map : weights.premix.maps) map = vha::Weight<double>::own(map.to<double>());
      result.push_back({shape.name, Layer(config_of(l), weights),
                        [l](const naive::Vector& x, const naive::Positions& positions) {
                          return naive::mfa_forward(l, x, positions);
                        }});
    }
    return result;
  }
  static auto served(const Layer& layer) { return vha::fold_vha(layer); }
};

template <class LayerType, bool MapsValues>
struct LatentKind {
  using Layer = LayerType;
  static std::vector<Case<Layer>> cases(Random& random) {
    struct Shape {
      const char* name;
      naive::Index hidden, heads, groups, latent, content, value, turned;
      bool norm = false, biases = false;
      long long window = 0;
    };
    static const Shape shapes[] = {
        {"one latent", 11, 3, 1, 7, 5, 6, 4},
        {"one head of one channel, norm", 5, 1, 1, 1, 1, 1, 2, true},
        {"two latents, norm, biases, window", 9, 4, 2, 5, 3, 8, 2, true, true, 4},
        {"as many latents as heads", 7, 3, 3, 2, 6, 3, 6, false, true},
        {"wider than a register tile, window", 67, 6, 2, 34, 19, 35, 18, true, false, 17},
    };
    std::vector<Case<Layer>> result;
    for (const Shape& s : shapes) {
      naive::LatentLayer l;
      l.hidden = s.hidden;
      l.heads = s.heads;
      l.groups = s.groups;
      l.latent = s.latent;
      l.content = s.content;
      l.value = MapsValues ? s.value : s.latent;
      l.turned = s.turned;
      l.theta = 100;
      l.window = s.window;
      const auto projection = [&](naive::Index in, naive::Index out) {
        return random.values<double>(in * out, std::sqrt(3.0 / static_cast<double>(in)));
      };
      l.wq = projection(l.hidden, l.heads * (l.content + l.turned));
      l.wc = projection(l.hidden, l.groups * l.latent);
      l.wr = projection(l.hidden, l.turned);
      l.wo = projection(l.heads * l.value, l.hidden);
      if (s.biases) {
        l.bq = random.values<double>(l.heads * (l.content + l.turned));
        l.bc = random.values<double>(l.groups * l.latent);
        l.br = random.values<double>(l.turned);
        l.bo = random.values<double>(l.hidden);
      }
      if (s.norm) l.latent_norm = random.values<double>(l.latent, 0.5, 1);
      l.key_maps = random.values<double>(l.heads * l.latent * l.content);
      if (MapsValues) l.value_maps = random.values<double>(l.heads * l.latent * l.value);
      result.push_back({s.name, Layer(config_of_latent(l), weights_of(l)),
                        [l](const naive::Vector& x, const naive::Positions& positions) {
                          return naive::latent_forward(l, x, positions);
                        }});
    }
    return result;
  }

  static vha::LatentConfig config_of_latent(const naive::LatentLayer& l) {
    const auto size = [](naive::Index value) { return static_cast<Index>(value); };
    return {.hidden = size(l.hidden),
            .query_heads = size(l.heads),
            .kv_heads = size(l.groups),
            .latent_dim = size(l.latent),
            .content_dim = size(l.content),
            .value_dim = size(l.value),
            .rope_dim = size(l.turned),
            .rope_theta = l.theta,
            .rms_norm_eps = l.eps,
            .window = static_cast<Index>(l.window)};
  }

  static vha::LatentWeights<double> weights_of(const naive::LatentLayer& l) {
    vha::LatentWeights<double> weights;
    weights.query.weight = own_weight<double>(l.wq, l.hidden);
    Matrix latent(l.hidden, l.groups * l.latent + l.turned);
    latent << matrix_of<double>(l.wc, l.hidden), matrix_of<double>(l.wr, l.hidden);
    weights.latent.weight = vha::Weight<double>::own(latent);
    weights.output.weight = own_weight<double>(l.wo, l.heads * l.value);
    if (!l.bq.empty()) {
      weights.query.bias = own_weight<double>(l.bq, 1);
      Matrix bias(1, latent.cols());
      bias << matrix_of<double>(l.bc, 1), matrix_of<double>(l.br, 1);
      weights.latent.bias = vha::Weight<double>::own(bias);
      weights.output.bias = own_weight<double>(l.bo, 1);
    }
    if (!l.latent_norm.empty()) weights.latent_norm = own_weight<double>(l.latent_norm, 1);
    const auto maps = [&](const naive::Vector& values, naive::Index width) {
      std::vector<vha::Weight<double>> result;
      for (naive::Index head = 0; head < l.heads && !values.empty(); ++head) {
        const auto first = values.begin() + static_cast<std::ptrdiff_t>(head * l.latent * width);
        result.push_back(own_weight<double>(
            {first, first + static_cast<std::ptrdiff_t>(l.latent * width)}, l.latent));
      }
      return result;
    };
    weights.key_maps = maps(l.key_maps, l.content);
    weights.value_maps = maps(l.value_maps, l.value);
    return weights;
  }

  static auto served(const Layer& layer) { return vha::absorb(layer); }
};
struct Mla : LatentKind<vha::MlaAttention<double>, true> {};
struct Gva : LatentKind<vha::GvaAttention<double>, false> {};

struct DynamicHeads {
  using Layer = vha::DynamicHeadsAttention<double>;
  static std::vector<Case<Layer>> cases(Random& random) {
    std::vector<Case<Layer>> result;
    for (const auto& [name, layer] : random_dynamic_heads(random)) {
      result.push_back({name, library_layer(layer),
                        [twin = layer](const naive::Vector& x, const naive::Positions& positions) {
                          return naive::dynamic_heads_forward(twin, x, positions);
                        }});
    }
    return result;
  }
};

template <class Kind>
concept HasServedForm = requires(const typename Kind::Layer& layer) {
  Kind::served(layer);
};

template <class Kind>
class Baseline : public testing::Test {
 protected:
  using Layer = typename Kind::Layer;

  /// Calls `body(case, x)` for layers of awkward sizes and for few and many tokens.
  template <class Body>
  static void for_each_case(std::uint32_t seed, Body&& body) {
    Random random(seed);
    for (const auto& each : Kind::cases(random)) {
      for (const naive::Index tokens : {naive::Index(1), naive::Index(9), naive::Index(41)}) {
        SCOPED_TRACE(vha::text(each.name, ", ", tokens, " tokens"));
        const auto hidden = static_cast<naive::Index>(each.layer.hidden());
        body(each,
             matrix_of<double>(random.values<double>(tokens * hidden, std::sqrt(3.0)), tokens));
      }
    }
  }

  static vha::KvCache<double> cache_of(const Layer& layer, Index capacity, Index batch = 1) {
    return vha::KvCache<double>(layer.cache_shape(batch, capacity));
  }
};
using BaselineKinds = std::conditional_t<
    support::sanitized, testing::Types<Mfa, Mla, Gva, DynamicHeads>,
    testing::Types<Mha, Gqa, Mqa, GatedVha, SiluPremix, SiluPostmix, Mfa, Mla, Gva, DynamicHeads>>;
TYPED_TEST_SUITE(Baseline, BaselineKinds);

TYPED_TEST(Baseline, IsItsNaiveTwin) {
  this->for_each_case(1, [](const auto& each, const Matrix& x) {
    const auto tokens = static_cast<naive::Index>(x.rows());
    const naive::Vector values(x.data(), x.data() + x.size());
    EXPECT_TRUE(close(run(each.layer, x), each.twin(values, counted_positions(tokens)),
                      tolerance_of_forms));
    // At other positions too.
    const auto late = counted_positions(tokens, 70);
    const std::vector<vha::Position> positions(late.begin(), late.end());
    EXPECT_TRUE(close(run(each.layer, x, {.positions = positions}), each.twin(values, late),
                      tolerance_of_forms));
  });
}

TYPED_TEST(Baseline, DecodesThePrefilledBits) {
  this->for_each_case(2, [](const auto& each, const Matrix& x) {
    const Array expected = run(each.layer, x);
    std::vector<std::vector<Index>> chunkings{{x.rows()}};
    chunkings.emplace_back(static_cast<std::size_t>(x.rows()), 1);
    if (x.rows() >= 9) chunkings.push_back({5, 1, 0, 1, x.rows() - 7});
    for (const auto& chunks : chunkings) {
      auto cache = TestFixture::cache_of(each.layer, x.rows());
      EXPECT_TRUE(same_bits(run_in_chunks(each.layer, x, cache, chunks), expected))
          << testing::PrintToString(chunks);
    }
  });
}

TYPED_TEST(Baseline, ServesWhatItComputes) {
  if constexpr (HasServedForm<TypeParam>) {
    this->for_each_case(3, [](const auto& each, const Matrix& x) {
      const auto served = TypeParam::served(each.layer);
      const Array expected = run(each.layer, x);
      EXPECT_TRUE(close(run(served, x), expected, tolerance_of_forms));
      // It goes on in a cache that the layer filled.
      auto cache = TestFixture::cache_of(each.layer, x.rows());
      const Index half = x.rows() / 2;
      Array outputs = run(each.layer, x.topRows(half), cache);
      const Array rest = run(served, x.bottomRows(x.rows() - half), cache);
      outputs.values.insert(outputs.values.end(), rest.values.begin(), rest.values.end());
      outputs.shape[0] += rest.shape[0];
      EXPECT_TRUE(close(outputs, expected, tolerance_of_forms));
    });
  }
}

TYPED_TEST(Baseline, NeverLooksAhead) {
  this->for_each_case(4, [](const auto& each, const Matrix& x) {
    if (x.rows() == 1) return;
    const Index kept = x.rows() / 2;
    Matrix changed = x;
    changed.bottomRows(x.rows() - kept).setConstant(std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(same_bits(first_rows(run(each.layer, changed), kept),
                          first_rows(run(each.layer, x), kept)));
  });
}

TYPED_TEST(Baseline, GivesARowOfAPaddedBatchTheBitsOfTheRowAlone) {
  this->for_each_case(5, [](const auto& each, const Matrix& x) {
    const std::vector<Index> lengths{x.rows(), 0, (x.rows() + 1) / 2};
    vha::Tensor3<double> batch(3, x.rows(), x.cols());
    batch.setConstant(std::numeric_limits<double>::quiet_NaN());
    Array expected{{3, x.rows(), x.cols()}, {}};
    expected.values.resize(static_cast<std::size_t>(batch.size()), 0);
    for (Index row = 0; row < 3; ++row) {
      const Index length = lengths[static_cast<std::size_t>(row)], first = x.rows() - length;
      for (Index t = 0; t < length; ++t) {
        for (Index c = 0; c < x.cols(); ++c) batch(row, first + t, c) = x(t, c);
      }
      const Array alone = run(each.layer, Matrix(x.topRows(length)));
      std::copy(alone.values.begin(), alone.values.end(),
                expected.values.begin() + (row * x.rows() + first) * x.cols());
    }
    const vha::TokenLayout layout{.lengths = lengths, .padding = vha::Padding::left};
    EXPECT_TRUE(same_bits(run(each.layer, batch, layout), expected));
    auto cache = TestFixture::cache_of(each.layer, x.rows(), 3);
    EXPECT_TRUE(same_bits(run(each.layer, batch, cache, layout), expected));
  });
}

TYPED_TEST(Baseline, ServedFormsDecodeTheirPrefilledBits) {
  if constexpr (HasServedForm<TypeParam>) {
    this->for_each_case(6, [](const auto& each, const Matrix& x) {
      const auto served = TypeParam::served(each.layer);
      vha::KvCache<double> cache(served.cache_shape(1, x.rows()));
      const std::vector<Index> chunks(static_cast<std::size_t>(x.rows()), 1);
      EXPECT_TRUE(same_bits(run_in_chunks(served, x, cache, chunks), run(served, x)));
    });
  }
}

// The head counts alone make these of GqaAttention.
static_assert(vha::mha_config(8, 2, 6).kv_heads == 6);
static_assert(vha::gqa_config(8, 2, 6, 3).group_size() == 2);
static_assert(vha::mqa_config(8, 2, 6).group_size() == 6);

// The gradients through a map and the factor are those of the folded layer's W_Q, by the chain rule.
TEST(Mfa, GradientsAreThoseOfTheFoldedLayer) {
  Random random(1);
  for (const auto& each : Mfa::cases(random)) {
    SCOPED_TRACE(each.name);
    const auto& layer = each.layer;
    const auto folded = vha::fold_vha(layer);
    const auto hidden = static_cast<naive::Index>(layer.hidden());
    const Matrix x = matrix_of<double>(random.values<double>(9 * hidden), 9);
    const Matrix upstream = matrix_of<double>(random.values<double>(9 * hidden), 9);
    const auto backward = [&](const auto& of, Matrix& dx) {
      auto gradients = vha::AttentionGradients<double>::zeros_like(of);
      vha::AttentionTrace<double> trace;
      run(of, x, {}, &trace);
      vha::AttentionBackwardWorkspace<double> workspace;
      vha::attention_backward(of, x, trace, upstream, dx, gradients, workspace);
      return gradients;
    };
    Matrix dx(x.rows(), x.cols()), folded_dx(x.rows(), x.cols());
    const auto gradients = backward(layer, dx);
    const auto of_folded = backward(folded, folded_dx);
    EXPECT_TRUE(close(array_of(dx), array_of(folded_dx), tolerance_of_forms));
    EXPECT_TRUE(
        close(array_of(gradients.key.weight), array_of(of_folded.key.weight), tolerance_of_forms));

    const auto& w = layer.weights();
    const Matrix factor = w.query.weight.to<double>();
    const Index head_dim = layer.config().head_dim;
    Matrix factor_gradient = Matrix::Zero(factor.rows(), factor.cols());
    for (Index head = 0; head < layer.config().query_heads; ++head) {
      const auto at = static_cast<std::size_t>(head);
      const auto block = of_folded.query.weight.middleCols(head * head_dim, head_dim);
      factor_gradient += block * w.premix.maps[at].to<double>().transpose();
      Matrix map_gradient = factor.transpose() * block;
      if (!w.query.bias.empty()) {
        map_gradient += w.query.bias.to<double>().transpose() *
                        of_folded.query.bias.middleCols(head * head_dim, head_dim);
      }
      EXPECT_TRUE(
          close(array_of(gradients.premix[at]), array_of(map_gradient), tolerance_of_forms));
    }
    EXPECT_TRUE(
        close(array_of(gradients.query.weight), array_of(factor_gradient), tolerance_of_forms));
  }
}

TEST(Mfa, OfSeveralKvHeadsOrTooFewMapsIsRefused) {
  Random random(1);
  const auto layer = Mfa::cases(random).front().layer;
  auto config = layer.config();
  config.kv_heads = config.query_heads;
  EXPECT_EQ(error_of([&] { vha::MfaAttention<double>(config, layer.weights()); }),
            "kv_heads (of a layer with one query factor): expected 1, got 2");
  auto weights = layer.weights();
  weights.premix.maps.pop_back();
  EXPECT_EQ(error_of([&] { vha::MfaAttention<double>(layer.config(), weights); }),
            "premix.maps.size() (one map for each of query_heads): expected 2, got 1");
}

// A token takes its latents and one rotated key, whatever the form, and as the cost header says.
TEST(Latent, CachesLatentsAndOneKeyAlone) {
  Random random(1);
  for (const auto& each : Gva::cases(random)) {
    const auto& c = each.layer.config();
    const vha::KvCache<double> cache(each.layer.cache_shape(1, 3));
    const vha::GvaSizes sizes{
        .value_dim = c.value_dim, .kv_heads = c.kv_heads, .rope_dim = c.rope_dim};
    EXPECT_EQ(cache.bytes_per_token(), vha::cache_bytes_per_token(sizes, sizeof(double)));
  }
  for (const auto& each : Mla::cases(random)) {
    const auto& c = each.layer.config();
    if (c.kv_heads != 1) continue;
    const vha::KvCache<double> cache(vha::absorb(each.layer).cache_shape(1, 3));
    const vha::MlaSizes sizes{.latent_dim = c.latent_dim, .rope_dim = c.rope_dim};
    EXPECT_EQ(cache.bytes_per_token(), vha::cache_bytes_per_token(sizes, sizeof(double)));
  }
}

// Weights and cache in bfloat16, multiplied as such where the cache is too.
TEST(Latent, StoredNarrowlyIsTheLayerUpToRounding) {
  Random random(1);
  for (const auto& each : Mla::cases(random)) {
    SCOPED_TRACE(each.name);
    const auto narrow = each.layer.cast<vha::bfloat16>();
    const auto hidden = static_cast<naive::Index>(each.layer.hidden());
    const auto x = matrix_of<float>(random.values<vha::bfloat16>(9 * hidden), 9);
    const Array expected = run(narrow.cast<double>(), x.cast<double>().eval());
    EXPECT_TRUE(close(run(narrow, x), expected, tolerance<float>(4 * hidden)));
    EXPECT_TRUE(close(run(vha::absorb(narrow), x), expected, tolerance<float>(4 * hidden)));
    vha::KvCache<vha::bfloat16> cache(narrow.cache_shape(1, 9));
    EXPECT_TRUE(close(run(vha::absorb(narrow), x, cache), expected, tolerance<vha::bfloat16>(9)));
  }
}

TEST(Latent, WhatDoesNotFitIsRefusedByName) {
  Random random(1);
  const auto mla = Mla::cases(random).front().layer;
  const auto gva = Gva::cases(random).front().layer;
  const auto config_error = [&](auto&& change) {
    auto config = mla.config();
    change(config);
    return error_of([&] { vha::MlaAttention<double>(config, mla.weights()); });
  };
  EXPECT_EQ(config_error([](auto& c) { c.rope_dim = 3; }),
            "rope_dim: expected an even number of 2 or more (it must be even), got 3");
  EXPECT_EQ(config_error([](auto& c) { c.latent_dim = 0; }),
            "latent_dim: expected 1 or more, got 0");
  EXPECT_EQ(config_error([](auto& c) { c.content_dim = -1; }),
            "content_dim: expected 1 or more, got -1");
  EXPECT_EQ(config_error([](auto& c) { c.kv_heads = 2; }),
            "query_heads: expected a multiple of kv_heads = 2, got 3");
  EXPECT_EQ(config_error([](auto& c) { c.window = -1; }),
            "window: expected 0 (none) or more, got -1");
  EXPECT_EQ(config_error([](auto& c) { c.value_dim = 5; }),
            "output.weight: expected [15, 11], got [18, 11]");
  const auto weights_error = [&](const auto& layer, auto&& change) {
    using Layer = std::remove_cvref_t<decltype(layer)>;
    auto weights = layer.weights();
    change(weights);
    return error_of([&] { Layer(layer.config(), weights); });
  };
  EXPECT_EQ(weights_error(mla, [](auto& w) { w.key_maps.pop_back(); }),
            "key_maps.size() (one map for each of query_heads): expected 3, got 2");
  EXPECT_EQ(weights_error(mla, [](auto& w) { w.value_maps[1] = w.key_maps[1]; }),
            "value_maps[1]: expected [7, 6], got [7, 5]");
  EXPECT_EQ(weights_error(gva, [](auto& w) { w.value_maps = w.key_maps; }),
            "value_maps.size() (the latents are the values): expected 0, got 3");
  EXPECT_EQ(error_of([&] {
              auto config = gva.config();
              config.value_dim += 1;
              auto weights = gva.weights();
              weights.output.weight = vha::Weight<double>::own(Matrix::Zero(24, 11));
              vha::GvaAttention<double>(config, weights);
            }),
            "value_dim (the latents are the values): expected 7, got 8");
  // A cache of keys and values is none of latents.
  vha::KvCache<double> cache({.kv_heads = 1, .head_dim = 11, .value_dim = 7, .capacity = 4});
  EXPECT_EQ(error_of([&] { mla.forward(Matrix(Matrix::Ones(1, 11)), cache); }),
            "kv_cache.values_in_keys: expected true, got false");
}

/// Calls `body(twin, layer, x)` for each case, with more tokens than are composed at a time.
template <class Body>
void for_each_dynamic_case(Body&& body) {
  Random random(7);
  for (const auto& [name, twin] : random_dynamic_heads(random)) {
    SCOPED_TRACE(name);
    body(twin, library_layer(twin),
         matrix_of<double>(random.values<double>(150 * twin.hidden, std::sqrt(3.0)), 150));
  }
}

// Nets of zeros leave the identity: the plain layer.
TEST(DynamicHeads, WithoutMapsAreThePlainLayer) {
  for_each_dynamic_case([](const auto& twin, const auto&, const Matrix& x) {
    auto without = twin;
    const auto heads = twin.query_heads();
    for (const std::size_t side : {0U, 1U}) {
      for (auto* net : {&without.of_query[side], &without.of_key[side]}) {
        for (auto* weight : {&net->w2, &net->gate}) std::fill(weight->begin(), weight->end(), 0.0);
      }
      auto& base = without.base[side];
      for (naive::Index at = 0; at < base.size(); ++at) base[at] = at % (heads + 1) == 0 ? 1 : 0;
    }
    EXPECT_TRUE(close(run(library_layer(without), x),
                      run(library_layer<vha::GqaAttention<double>>(twin), x), tolerance_of_forms));
  });
}

TEST(DynamicHeads, AreTheNaiveTwinAndDecodeOverLongRows) {
  for_each_dynamic_case([](const auto& twin, const auto& layer, const Matrix& x) {
    const naive::Vector values(x.data(), x.data() + x.size());
    const Array expected = run(layer, x);
    EXPECT_TRUE(close(expected, naive::dynamic_heads_forward(twin, values, counted_positions(150)),
                      tolerance_of_forms));
    vha::KvCache<double> cache(layer.cache_shape(1, 200));
    EXPECT_TRUE(same_bits(run_in_chunks(layer, x, cache, {66, 1, 1, 70, 1, 11}), expected));
  });
}

// Tokens whose positions do not ascend see keys that lie apart.
TEST(DynamicHeads, SeeByPositionAlone) {
  for_each_dynamic_case([](const auto& twin, const auto& layer, const Matrix& x) {
    naive::Positions positions(150);
    for (naive::Index t = 0; t < 150; ++t) positions[t] = static_cast<long long>(t * 67 % 150);
    const naive::Vector values(x.data(), x.data() + x.size());
    const std::vector<vha::Position> given(positions.begin(), positions.end());
    EXPECT_TRUE(close(run(layer, x, {.positions = given}),
                      naive::dynamic_heads_forward(twin, values, positions), tolerance_of_forms));
  });
}

// A token takes what the cost header says, and so do the weights.
TEST(DynamicHeads, AreAsLargeAsTheCostHeaderSays) {
  for_each_dynamic_case([](const auto& twin, const auto& layer, const Matrix&) {
    const auto& c = layer.config();
    const auto& w = layer.weights();
    const vha::DynamicHeadsSizes sizes{.hidden = c.hidden,
                                       .head_dim = c.head_dim,
                                       .query_heads = c.query_heads,
                                       .kv_heads = c.kv_heads,
                                       .rank = static_cast<Index>(twin.rank),
                                       .dynamic_dim = w.before_softmax.query.dynamic_dim()};
    EXPECT_EQ(vha::KvCache<double>(layer.cache_shape(1, 3)).bytes_per_token(),
              vha::cache_bytes_per_token(sizes, sizeof(double)));
    Index count = 0;
    for (const auto* linear : {&w.query, &w.key, &w.value, &w.output})
      count += linear->weight.size();
    for (const auto* composition : {&w.before_softmax, &w.after_softmax}) {
      for (const auto* net : {&composition->query, &composition->key}) {
        count += net->hidden.size() + net->factors.size() + net->gate.size();
      }
    }
    EXPECT_EQ(count, vha::weight_count(sizes, vha::LayerForm::folded));
  });
}

// Weights and cache in bfloat16.
TEST(DynamicHeads, StoredNarrowlyAreTheLayerUpToRounding) {
  for_each_dynamic_case([](const auto&, const auto& layer, const Matrix& wide_x) {
    const auto narrow = layer.template cast<vha::bfloat16>();
    const vha::RowMajorMatrix<float> x =
        wide_x.topRows(9).template cast<vha::bfloat16>().template cast<float>();
    const Array expected = run(narrow.template cast<double>(), x.cast<double>().eval());
    EXPECT_TRUE(close(run(narrow, x), expected, 1e-4));
    vha::KvCache<vha::bfloat16> cache(narrow.cache_shape(1, 9));
    EXPECT_TRUE(close(run(narrow, x, cache), expected, 0.1));
  });
}

TEST(DynamicHeads, WhatDoesNotFitIsRefusedByName) {
  Random random(1);
  const auto layer = library_layer(random_dynamic_heads(random).front().second);
  const auto weights_error = [&](auto&& change) {
    auto weights = layer.weights();
    change(weights);
    return error_of([&] { DynamicHeads::Layer(layer.config(), weights); });
  };
  const auto zeros = [](Index rows, Index cols) {
    return vha::Weight<double>::own(Matrix::Zero(rows, cols));
  };
  EXPECT_EQ(
      weights_error([&](auto& w) { w.before_softmax.query.factors = zeros(5, 23); }),
      "before_softmax.query.factors.cols(): expected a positive multiple of 2 * query_heads = "
      "12, got 23");
  EXPECT_EQ(
      weights_error([&](auto& w) { w.before_softmax.query.factors = {}; }),
      "before_softmax.query.factors.cols(): expected a positive multiple of 2 * query_heads = "
      "12, got 0");
  EXPECT_EQ(weights_error([&](auto& w) { w.before_softmax.key.hidden = {}; }),
            "before_softmax.key.hidden.cols() (dynamic_dim): expected 1 or more, got 0");
  EXPECT_EQ(weights_error([&](auto& w) { w.before_softmax.query.hidden = zeros(10, 5); }),
            "before_softmax.query.hidden: expected [11, 5], got [10, 5]");
  EXPECT_EQ(weights_error([&](auto& w) { w.after_softmax.key.factors = zeros(5, 12); }),
            "after_softmax.key.factors: expected [5, 24], got [5, 12]");
  EXPECT_EQ(weights_error([&](auto& w) { w.after_softmax.query.gate = zeros(11, 3); }),
            "after_softmax.query.gate: expected [11, 6], got [11, 3]");
  EXPECT_EQ(weights_error([&](auto& w) { w.after_softmax.base = zeros(6, 5); }),
            "after_softmax.base: expected [6, 6], got [6, 5]");
  EXPECT_EQ(weights_error([&](auto& w) { w.key.weight = zeros(11, 6); }),
            "key.weight: expected [11, 18], got [11, 6]");
  // A cache of keys alone has no room for the maps.
  vha::KvCache<double> cache(layer.config(), 1, 4);
  EXPECT_EQ(error_of([&] { layer.forward(Matrix(Matrix::Ones(1, 11)), cache); }),
            "kv_cache.head_dim: expected 26, got 6");
}

}  // namespace
}  // namespace laws
