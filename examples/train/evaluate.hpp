// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>
#include <vha/checkpoint/model.hpp>

#include "../qwen3.hpp"
#include "checkpoint.hpp"
#include "model.hpp"
#include "recipe.hpp"
#include "tasks.hpp"

namespace train {

/// The task of the recipe that a checkpoint keeps, trained or folded; where it keeps none, the given.
inline void take_task(const Json& config, Recipe& recipe) {
  const Json kept = config.value(recipe_key, Json::object());
  const auto take = [&](const char* key, Index& value) { value = kept.value(key, value); };
  take("tokens", recipe.tokens);
  if (!recipe.text.empty()) return;
  if (kept.value("task", "recall") != "recall") {
    vha::raise("--text", "the text to evaluate on, as the model was trained on one", "none");
  }
  take("pairs", recipe.pairs);
  take("vocabulary", recipe.vocabulary);
}

/// Scores a model by the code that serves it, which shares nothing with the training's.
inline Score evaluate(const vha::checkpoint::Model& model, const Task& task, Index tokens,
                      const vha::Executor& executor) {
  const Qwen3<float> qwen3(model);
  const Index vocabulary = qwen3.vocabulary();
  if (vocabulary < task.vocabulary()) {
    vha::raise("vocabulary", vha::text(task.vocabulary(), " tokens or more"),
               vha::text(vocabulary));
  }
  const Sequences sequences = held_out(task, tokens);
  std::vector<Score> scores(static_cast<std::size_t>(sequences.sequences()));
  executor.for_each(sequences.sequences(), [&](Index number, Index) {
    const SequencesView sequence = sequences.view(number, 1);
    auto caches = qwen3.caches(tokens);
    const auto logits = qwen3.logits({sequence.inputs.begin(), sequence.inputs.end()}, caches);
    Score& score = scores[static_cast<std::size_t>(number)];
    for (Index t = 0; t < tokens; ++t) {
      const Index target = sequence.targets[static_cast<std::size_t>(t)];
      if (target < 0) continue;
      const Eigen::RowVectorXd row = logits.row(t).cast<double>();
      Index likeliest = 0;
      const double most = row.maxCoeff(&likeliest);
      score.loss += std::log((row.array() - most).exp().sum()) + most - row[target];
      score.correct += likeliest == target ? 1 : 0;
      ++score.asked;
    }
  });
  Score sum;
  for (const Score& score : scores) sum += score;
  return sum;
}

}  // namespace train
