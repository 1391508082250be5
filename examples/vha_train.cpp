// SPDX-License-Identifier: Apache-2.0
// Trains a small language model with Virtual Head Attention, or with plain GQA, to a checkpoint that
// vha_fold folds.
#define EIGEN_USE_THREADS
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "qwen3.hpp"
#include "tool.hpp"
#include "train/adamw.hpp"
#include "train/checkpoint.hpp"
#include "train/evaluate.hpp"
#include "train/maps_report.hpp"
#include "train/recipe.hpp"
#include "train/trainer.hpp"

namespace {

using vha::Index;

struct Options {
  train::Recipe recipe;
  std::unique_ptr<train::Task> task;
  std::filesystem::path save, evaluate;
  Index save_every = 0, eval_every = 200, stop_at = 0;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  bool resume = false, quiet = false;
};

void print_score(const char* label, const train::Score& score) {
  std::printf("%s loss %.8f  accuracy %.2f %%\n", label, score.mean_loss(), 100 * score.accuracy());
  std::fflush(stdout);
}

/// As vha_fold does.
void print_maps(const train::LanguageModel<float>& model) {
  const auto& config = model.config();
  if (!config.maps.premix && !config.maps.postmix) return;
  for (Index layer = 0; layer < config.layers; ++layer) {
    const auto report = train::maps_report(model, layer);
    std::printf("layer %-3td |P - I| %.4g, Postmix across groups %.1f %%\n", layer,
                report.premix_distance, 100 * report.cross_group_share);
  }
}

/// Seconds since the call before.
class Clock {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// Refuses a folder that cannot be written, or that holds another training, before the work.
void check_folder(const Options& options) {
  if (options.save.empty()) return;
  if (std::filesystem::exists(options.save) && !options.resume) {
    vha::raise(options.save.string(), "no such folder, or --resume to go on from it", "one");
  }
  const vha::checkpoint::OutputFolder probe(options.save, true);
}

void run_training(Options& options, const vha::Executor& executor) {
  check_folder(options);
  train::Recipe& recipe = options.recipe;
  train::Trainer trainer(recipe, *options.task, executor);
  const train::Json json = recipe.json();
  Index step = 0;
  if (options.resume) {
    step = train::load(options.save, trainer.model(), trainer.optimiser(), json);
  }
  if (!options.quiet) {
    std::printf("%td parameters, %td of them maps%s\n", trainer.count(false), trainer.count(true),
                recipe.freeze_maps ? ", frozen" : "");
    if (options.resume) std::printf("goes on after step %td\n", step);
  }
  const auto save = [&] {
    if (options.save.empty()) return;
    train::save(options.save, trainer.model(), trainer.optimiser(), recipe.tokens, json, step);
  };
  const Index last = options.stop_at > 0 ? std::min(options.stop_at, recipe.optimiser.steps)
                                         : recipe.optimiser.steps;
  const Index shown_every = options.eval_every > 0 ? std::min<Index>(50, options.eval_every) : 50;
  constexpr double shown_after = 5;  // seconds, of a model that takes longer for so many steps
  Clock clock;
  double seconds = 0;
  Index steps_timed = 0;
  bool saved = options.resume;
  while (step < last) {
    clock.lap();
    const auto done = trainer.step(step++);
    seconds += clock.lap();
    ++steps_timed;
    if (!options.quiet && (step % shown_every == 0 || step == last || seconds > shown_after)) {
      const auto tokens = static_cast<double>(steps_timed * recipe.batch * recipe.tokens);
      std::printf("step %-6td loss %.4f  accuracy %5.1f %%  gradient %.3g  %.0f tokens/s\n", step,
                  done.score.mean_loss(), 100 * done.score.accuracy(), done.gradient_length,
                  tokens / seconds);
      std::fflush(stdout);
      seconds = 0;
      steps_timed = 0;
    }
    if (!options.quiet && options.eval_every > 0 && step % options.eval_every == 0 && step < last) {
      print_score("  held out:", trainer.held_out());
    }
    saved = options.save_every > 0 && step % options.save_every == 0;
    if (saved) save();
  }
  if (!saved) save();
  print_score("held-out", trainer.held_out());
  print_maps(trainer.model());
  if (!options.save.empty() && !options.quiet) std::printf("saved in %s\n", options.save.c_str());
}

void run_evaluation(Options& options, const vha::Executor& executor) {
  const vha::checkpoint::Model model(options.evaluate);
  train::take_task(model.config().json(), options.recipe);
  const auto task = options.recipe.task();
  print_score("held-out", train::evaluate(model, *task, options.recipe.tokens, executor));
}

void run(Options& options) {
  Eigen::ThreadPool pool(std::max(1, options.threads - 1));
  const Eigen::ThreadPoolDevice device(&pool, options.threads);
  if (options.evaluate.empty()) return run_training(options, device);
  run_evaluation(options, device);
}

void add_options(CLI::App& app, Options& options) {
  train::Recipe& recipe = options.recipe;
  const auto size = [&](const char* name, Index& value, const char* help, Index least = 1) {
    app.add_option(name, value, help)
        ->check(CLI::Range(least, Index(1) << 30))
        ->capture_default_str();
  };
  const auto number = [&](const char* name, double& value, const char* help) {
    app.add_option(name, value, help)->check(CLI::Range(0.0, 1e6))->capture_default_str();
  };
  app.add_option("--text", recipe.text,
                 "learn the bytes of this file, its last tenth held out; default: recall");
  size("--pairs", recipe.pairs, "recall: keys and values in a sequence");
  size("--vocabulary", recipe.vocabulary, "recall: tokens to choose from");
  size("--tokens", recipe.tokens, "tokens of a sequence");
  app.add_option("--attention", recipe.attention, "vha has both maps, gqa none")
      ->check(CLI::IsMember({"vha", "gqa", "premix", "postmix"}))
      ->capture_default_str();
  size("--hidden", recipe.hidden, "channels of the model");
  size("--layers", recipe.layers, "blocks of attention and MLP");
  size("--query-heads", recipe.query_heads, "query heads; virtual ones where there is Premix");
  size("--kv-heads", recipe.kv_heads, "K/V heads");
  size("--head-dim", recipe.head_dim, "channels of a head");
  size("--rank", recipe.rank, "of Postmix");
  size("--intermediate", recipe.intermediate, "channels within the MLP");
  size("--batch", recipe.batch, "sequences of a step");
  size("--steps", recipe.optimiser.steps, "optimiser steps, over which the cosine goes");
  number("--learning-rate", recipe.optimiser.learning_rate, "largest, after the warm-up");
  number("--map-learning-rate", recipe.optimiser.map_learning_rate, "the same of the maps");
  app.add_flag("--freeze-maps", recipe.freeze_maps, "leave the maps as they start");
  number("--weight-decay", recipe.optimiser.weight_decay, "of all but norms and maps");
  size("--warm-up", recipe.optimiser.warm_up, "steps of rising learning rate", 0);
  number("--clip", recipe.optimiser.clip, "longest gradient; 0: any");
  app.add_option("--seed", recipe.seed, "of the first weights and of the data")
      ->capture_default_str();
  app.add_option("--threads", options.threads, "threads to use; the result is the same")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  auto* const save = app.add_option("--save", options.save, "the checkpoint's folder to make");
  size("--save-every", options.save_every, "save every so many steps too; 0: at the end alone", 0);
  app.add_flag("--resume", options.resume, "go on from the checkpoint in --save, same options")
      ->needs(save);
  size("--stop-at", options.stop_at, "stop after this step, as if interrupted; 0: do not", 0);
  size("--eval-every", options.eval_every, "show the held-out loss every so many steps; 0: never",
       0);
  app.add_flag("--quiet", options.quiet, "print the result alone");
  app.add_option("--evaluate", options.evaluate,
                 "print the held-out loss of this model, trained or folded, and do nothing else")
      ->check(model_folder)
      ->excludes(save);
  check_arguments(app, [&] {
    if (!options.evaluate.empty()) return;  // the model says what it was trained on
    options.task = recipe.task();
    recipe.model(options.task->vocabulary()).attention.validate();
  });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small language model on associative recall or on the bytes of a text.\n"
      "Exit status: 0 done, 1 it cannot be done, 2 bad arguments."};
  add_options(app, options);
  return run_tool(app, "vha_train", argc, argv, [&] { run(options); });
}
