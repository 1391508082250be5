// SPDX-License-Identifier: Apache-2.0
// Runs an attention layer split over the ranks of mpirun, and holds it against the whole one.
#define EIGEN_USE_THREADS
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>
#include <vha/checkpoint/model.hpp>
#include <vha/vha.hpp>

#include "ranks.hpp"
#include "tool.hpp"

namespace {

using vha::Index;
using vha::text;

struct Options {
  std::filesystem::path model;
  Index layer = 0;
  vha::AttentionConfig config{
      .hidden = 2048, .head_dim = 128, .query_heads = 16, .kv_heads = 2, .rope_theta = 1e6};
  Index postmix_rank = 4;
  std::string dtype = "f32";
  Index tokens = 512, steps = 32, rounds = 5;
  int threads = 1;
};

template <class T>
using Matrix = vha::RowMajorMatrix<T>;

template <class T>
Matrix<T> random_matrix(Index rows, Index cols, std::uint64_t seed) {
  vha::NormalGenerator normal(seed);
  Matrix<T> matrix(rows, cols);
  for (Index k = 0; k < matrix.size(); ++k) matrix.data()[k] = static_cast<T>(normal());
  return matrix;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// A prefill and the steps of a decode behind it.
template <class T>
struct Run {
  Matrix<T> outputs;
  double prefill_seconds = 0, step_seconds = 0;
};

template <class Layer, class T>
Run<T> run(const Layer& layer, const Matrix<T>& x, const Options& options,
           const vha::Executor& executor) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  Run<T> result{Matrix<T>(x.rows(), x.cols())};
  typename Layer::Workspace workspace;
  workspace.executor = executor;
  std::vector<double> prefills, steps;
  for (Index round = 0; round < options.rounds; ++round) {
    vha::KvCache<T> kv_cache(layer.cache_shape(1, x.rows()));
    auto start = Clock::now();
    layer.forward_into(x.topRows(options.tokens), kv_cache, result.outputs.topRows(options.tokens),
                       workspace);
    prefills.push_back(seconds_since(start));
    for (Index t = options.tokens; t < x.rows(); ++t) {
      start = Clock::now();
      layer.forward_into(x.middleRows(t, 1), kv_cache, result.outputs.middleRows(t, 1), workspace);
      steps.push_back(seconds_since(start));
    }
  }
  result.prefill_seconds = median(prefills);
  result.step_seconds = median(steps);
  return result;
}

/// Runs the layer whole, on the first rank, and split over all, which it prints a line about. Throws where
/// the outputs differ by more than round-off, or what was exchanged is not what the cost header says.
template <class Layer>
void compare(const char* name, const Layer& layer, vha::LayerForm form, Index postmix_rank,
             const Options& options, Ranks& ranks) {
  using T = typename Layer::T;
  Eigen::ThreadPool pool(std::max(1, options.threads - 1));
  const Eigen::ThreadPoolDevice device(&pool, options.threads);
  const auto x = random_matrix<T>(options.tokens + options.steps, layer.hidden(), 1);
  Run<T> whole;
  ranks.together([&] {
    if (ranks.rank() == 0) whole = run(layer, x, options, device);
  });
  vha::CountedCommunicator counted(ranks);
  const Run<T> split = run(vha::ParallelAttention(layer, counted), x, options, device);

  ranks.together([&] {
    const Index formula = vha::exchanged_bytes_per_token(
        vha::LayerSizes::of(layer.config(), postmix_rank), form, ranks.size(), sizeof(T));
    const Index tokens = options.rounds * x.rows();
    if (counted.bytes() != tokens * formula) {
      vha::raise(text(name, ": bytes exchanged for ", tokens, " tokens"), text(tokens * formula),
                 text(counted.bytes()));
    }
    if (ranks.rank() != 0) return;
    const double difference = vha::compare_outputs(whole.outputs, split.outputs).largest_difference;
    std::printf("%-9s  %10.1e  %14td  %9.2f  %9.2f  %5.2f  %9.3f  %9.3f  %5.2f\n", name, difference,
                formula, 1e3 * whole.prefill_seconds, 1e3 * split.prefill_seconds,
                whole.prefill_seconds / split.prefill_seconds, 1e3 * whole.step_seconds,
                1e3 * split.step_seconds, whole.step_seconds / split.step_seconds);
    const double bound = sizeof(T) == sizeof(double) ? 1e-12 : 1e-5;
    if (!(difference <= bound)) {
      vha::raise(text(name, ": outputs' largest difference, of the largest output"),
                 text("at most ", bound), text(difference));
    }
  });
}

/// The layer as it is and, where it has maps, folded.
template <class Layer>
void compare_forms(const Layer& layer, const Options& options, Ranks& ranks) {
  using Weights = typename Layer::Weights;
  Index postmix_rank = 0;
  if constexpr (Weights::has_postmix) postmix_rank = layer.weights().postmix.rank();
  const vha::AttentionConfig& config = layer.config();
  ranks.together([&] {
    const auto slice = vha::slice_heads(config, ranks.rank(), ranks.size());
    if (ranks.rank() != 0) return;
    std::printf(
        "hidden %td, head_dim %td, %td query heads, %td K/V heads, Postmix rank %td; %s\n"
        "%td rank%s of %td query heads and %td K/V head%s each, %d thread%s\n"
        "prefill of %td tokens, then %td steps of decode; medians, %td round%s\n\n"
        "             largest       exchanged        prefill, ms                 decode, ms/token\n"
        "attention  difference         B/token      whole      split  ratio      whole      split  "
        "ratio\n",
        config.hidden, config.head_dim, config.query_heads, config.kv_heads, postmix_rank,
        sizeof(typename Layer::T) == sizeof(double) ? "f64" : "f32", ranks.size(),
        ranks.size() == 1 ? "" : "s", slice.query_heads, slice.kv_heads,
        slice.kv_heads == 1 ? "" : "s", options.threads, options.threads == 1 ? "" : "s",
        options.tokens, options.steps, options.rounds, options.rounds == 1 ? "" : "s");
  });
  if constexpr (Weights::has_premix || Weights::has_postmix) {
    compare("unfolded", layer, vha::LayerForm::unfolded, postmix_rank, options, ranks);
    compare("folded", vha::fold_vha(layer), vha::LayerForm::folded, 0, options, ranks);
  } else {
    compare("GQA", layer, vha::LayerForm::folded, 0, options, ranks);
  }
}

/// A layer of random weights, the same on every rank.
template <class T>
vha::VhaAttention<T> made_layer(const Options& options) {
  const auto fresh = vha::initialise_vha<T>(options.config, {.postmix_rank = options.postmix_rank});
  auto weights = fresh.weights();
  weights.postmix.b = random_matrix<T>(options.config.query_heads, options.postmix_rank, 2);
  return {options.config, weights};
}

void compare_layer(const Options& options, const vha::checkpoint::ModelOptions& model_options,
                   Ranks& ranks) {
  if (!options.model.empty()) {
    std::unique_ptr<const vha::checkpoint::Model> model;
    ranks.together([&] {
      model = std::make_unique<const vha::checkpoint::Model>(options.model, model_options);
    });
    model->with_layer<float>(options.layer,
                             [&](const auto& layer) { compare_forms(layer, options, ranks); });
  } else if (options.dtype == "f64") {
    compare_forms(made_layer<double>(options), options, ranks);
  } else {
    compare_forms(made_layer<float>(options), options, ranks);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Runs an attention layer split over the ranks of mpirun, as in mpirun -n 2 vha_parallel, and "
      "holds "
      "it\nagainst the whole layer: outputs, bytes exchanged for each token, times.\n"
      "Exit status: 0 they agree, 1 they do not, 2 bad arguments."};
  const auto add_size = [&](const char* flag, Index& size, const char* help) {
    return app.add_option(flag, size, help)
        ->check(CLI::Range(Index{1}, Index{1} << 24))
        ->capture_default_str();
  };
  auto* const model = app.add_option("--model", options.model, "take a layer of this checkpoint")
                          ->check(model_folder)
                          ->type_name("DIR");
  const ModelFlags model_flags(app);
  app.add_option("--layer", options.layer, "of the checkpoint")
      ->check(CLI::Range(Index{0}, Index{1} << 24))
      ->needs(model)
      ->capture_default_str();
  for (auto* const size : {add_size("--hidden", options.config.hidden, "of a layer that is made"),
                           add_size("--head-dim", options.config.head_dim, "channels, even"),
                           add_size("--query-heads", options.config.query_heads, "virtual ones"),
                           add_size("--kv-heads", options.config.kv_heads, "or groups"),
                           add_size("--postmix-rank", options.postmix_rank, "of its Postmix")}) {
    size->excludes(model);
  }
  app.add_option("--dtype", options.dtype, "of its weights and of the arithmetic")
      ->check(CLI::IsMember({"f32", "f64"}))
      ->excludes(model)
      ->capture_default_str();
  add_size("--tokens", options.tokens, "to prefill");
  add_size("--steps", options.steps, "to decode");
  add_size("--rounds", options.rounds, "to time");
  app.add_option("--threads", options.threads, "of each rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  check_arguments(app, [&] {
    if (model->count() == 0) return options.config.validate();
    const vha::checkpoint::ModelConfig config(options.model / "config.json");
    const Index layers = config.size("num_hidden_layers");
    if (options.layer >= layers) {
      vha::raise("--layer", text("0 to ", layers - 1), text(options.layer));
    }
  });
  return run_tool_on_ranks(app, "vha_parallel", argc, argv, [&](Ranks& ranks) {
    compare_layer(options, model_flags.options(), ranks);
  });
}
