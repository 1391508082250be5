// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "adamw.hpp"
#include "gradients.hpp"
#include "model.hpp"
#include "pass.hpp"
#include "recipe.hpp"
#include "tasks.hpp"

namespace train {

/// A model, its optimiser and its data, step by step. A batch is cut into a fixed number of shares,
/// each of which one thread takes through the whole model: the bits depend on the recipe alone, not on
/// the threads.
class Trainer {
 public:
  struct Step {
    Score score;
    double gradient_length = 0;
  };

  /// `task` must live as long.
  Trainer(const Recipe& recipe, const Task& task, const vha::Executor& executor)
      : recipe_(recipe),
        task_(task),
        executor_(executor),
        model_(recipe.model(task.vocabulary()), recipe.seed),
        optimiser_(model_.parameters(), recipe.optimiser),
        batch_(recipe.batch, recipe.tokens),
        held_out_(train::held_out(task, recipe.tokens)),
        passes_(static_cast<std::size_t>(executor.threads())) {
    for (Index share = 0; share < std::min(most_shares, recipe.batch); ++share) {
      gradients_.emplace_back(model_, recipe.freeze_maps);
    }
  }

  LanguageModel<float>& model() { return model_; }
  AdamW<float>& optimiser() { return optimiser_; }

  /// Trains on the batch of a step, counted from 0. Returns the score before it.
  Step step(Index step) {
    make_batch(task_, recipe_.seed, step, batch_);
    const float scale = 1.0F / static_cast<float>(batch_.asked());
    const auto shares = static_cast<Index>(gradients_.size());
    std::vector<Score> scores(gradients_.size());
    executor_.for_each(shares, [&](Index share, Index thread) {
      const auto at = static_cast<std::size_t>(share);
      const Index first = share * recipe_.batch / shares;
      const Index end = (share + 1) * recipe_.batch / shares;
      gradients_[at].set_zero();
      scores[at] = passes_[static_cast<std::size_t>(thread)].train(
          model_, batch_.view(first, end - first), scale, gradients_[at]);
    });
    Step result;
    for (const Score& score : scores) result.score += score;
    result.gradient_length = optimiser_.step(step, model_.parameters(), gradients_, executor_);
    return result;
  }

  Score held_out() {
    // Not all at once, for the memory that the pass keeps.
    const Index at_once = std::max<Index>(1, recipe_.batch / most_shares);
    std::vector<Score> scores(
        static_cast<std::size_t>(vha::pieces(held_out_.sequences(), at_once)));
    executor_.for_each(static_cast<Index>(scores.size()), [&](Index task, Index thread) {
      const Index first = task * at_once;
      const Index count = std::min(at_once, held_out_.sequences() - first);
      scores[static_cast<std::size_t>(task)] =
          passes_[static_cast<std::size_t>(thread)].score(model_, held_out_.view(first, count));
    });
    Score sum;
    for (const Score& score : scores) sum += score;
    return sum;
  }

  /// The elements of all parameters, or of the maps alone.
  Index count(bool maps_alone) const {
    Index sum = 0;
    for (const auto& parameter : model_.parameters()) {
      if (!maps_alone || is_map(parameter.role)) sum += parameter.value.size();
    }
    return sum;
  }

 private:
  static constexpr Index most_shares = 8;

  Recipe recipe_;
  const Task& task_;
  vha::Executor executor_;
  LanguageModel<float> model_;
  AdamW<float> optimiser_;
  Sequences batch_, held_out_;
  std::vector<Pass<float>> passes_;         // a thread's
  std::deque<Gradients<float>> gradients_;  // a share's
};

}  // namespace train
