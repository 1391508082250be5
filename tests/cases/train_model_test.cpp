// SPDX-License-Identifier: Apache-2.0
// What vha_train is made of: the model's gradients against central differences, the data, and the
// checkpoint, resumed and folded.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include <vha/checkpoint/fold_model.hpp>
#include <vha/checkpoint/output_folder.hpp>

#include "../../examples/train/checkpoint.hpp"
#include "../../examples/train/evaluate.hpp"
#include "../../examples/train/gradients.hpp"
#include "../../examples/train/maps_report.hpp"
#include "../../examples/train/model.hpp"
#include "../../examples/train/pass.hpp"
#include "../../examples/train/recipe.hpp"
#include "../../examples/train/tasks.hpp"
#include "../../examples/train/trainer.hpp"
#include "error_of.hpp"
#include "sanitized.hpp"
#include "temporary_folder.hpp"

namespace {

using support::error_of;
using vha::Index;

train::ModelConfig small_model(bool premix, bool postmix) {
  return {.attention = {.hidden = 10, .head_dim = 6, .query_heads = 6, .kv_heads = 2},
          .maps = {premix, postmix, 3},
          .layers = 2,
          .intermediate = 7,
          .vocabulary = 12};
}

struct MapsCase {
  const char* name;
  bool premix, postmix;
};
std::ostream& operator<<(std::ostream& stream, const MapsCase& maps) {
  return stream << maps.name;
}

/// Two of them where a sanitizer runs along, which makes each as long as half a minute.
const std::vector<MapsCase> maps_cases =
    support::sanitized ? std::vector<MapsCase>{{"Vha", true, true}, {"Gqa", false, false}}
                       : std::vector<MapsCase>{{"Vha", true, true},
                                               {"Gqa", false, false},
                                               {"Premix", true, false},
                                               {"Postmix", false, true}};

class TrainModel : public testing::TestWithParam<MapsCase> {};

/// Some targets are absent, tokens are repeated, and no weight is near 0 or 1.
TEST_P(TrainModel, HasTheGradientsOfCentralDifferences) {
  train::LanguageModel<double> model(small_model(GetParam().premix, GetParam().postmix), 7);
  vha::NormalGenerator normal(3);
  for (auto& parameter : model.parameters()) {
    for (double& element : parameter.value.reshaped()) element += 0.3 * normal();
  }
  const std::vector<std::int32_t> inputs{3, 1, 4, 1, 5, 9, 2, 6, 5, 3};
  const std::vector<std::int32_t> targets{1, -1, 0, 5, 11, 2, -1, 5, 3, -1};
  const train::SequencesView sequences{5, inputs, targets};
  constexpr double scale = 0.25;
  train::Pass<double> pass;
  train::Gradients<double> gradients(model, false);
  EXPECT_EQ(pass.train(model, sequences, scale, gradients).asked, 7);

  double largest = 0, difference = 0;
  for (std::size_t k = 0; k < model.parameters().size(); ++k) {
    auto& parameter = model.parameters()[k];
    const auto& gradient = *gradients.in_order()[k];
    ASSERT_EQ(gradient.size(), parameter.value.size()) << parameter.name;
    EXPECT_GT(gradient.norm(), 0) << parameter.name;
    for (Index at = 0; at < gradient.size(); ++at) {
      double& element = parameter.value.data()[at];
      const double kept = element, step = 1e-4;
      const auto loss_at = [&](double value) {
        element = value;
        return scale * pass.score(model, sequences).loss;
      };
      // Of the fourth order, so that a step this long will do.
      const double expected = (8 * (loss_at(kept + step) - loss_at(kept - step)) -
                               (loss_at(kept + 2 * step) - loss_at(kept - 2 * step))) /
                              (12 * step);
      element = kept;
      EXPECT_NEAR(gradient.data()[at], expected, 1e-8) << parameter.name << " at " << at;
      largest = std::max(largest, std::abs(expected));
      difference = std::max(difference, std::abs(gradient.data()[at] - expected));
    }
  }
  EXPECT_GT(largest, 0.1);
  RecordProperty("largest_difference", std::to_string(difference));
}

TEST_P(TrainModel, LeavesOutTheGradientsOfFrozenMaps) {
  const train::LanguageModel<float> model(small_model(GetParam().premix, GetParam().postmix), 7);
  const std::vector<std::int32_t> inputs{3, 1, 4}, targets{1, 4, 1};
  train::Pass<float> pass;
  train::Gradients<float> all(model, false), frozen(model, true);
  for (auto* const gradients : {&all, &frozen})
    pass.train(model, {3, inputs, targets}, 1, *gradients);
  for (std::size_t k = 0; k < model.parameters().size(); ++k) {
    if (train::is_map(model.parameters()[k].role)) {
      EXPECT_EQ(frozen.in_order()[k]->size(), 0);
    } else {
      EXPECT_EQ(*frozen.in_order()[k], *all.in_order()[k]) << model.parameters()[k].name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Maps, TrainModel, testing::ValuesIn(maps_cases),
                         [](const auto& test) { return test.param.name; });

TEST(TrainRecall, AsksForTheValuesOfKeys) {
  const train::Recall recall(4, 20, 15);
  train::Sequences batch(50, 15);
  train::make_batch(recall, 1, 2, batch);
  EXPECT_EQ(batch.asked(), 50 * 7);
  for (Index row = 0; row < 50; ++row) {
    const auto sequence = batch.view(row, 1);
    std::map<std::int32_t, std::int32_t> values;
    for (std::size_t t = 0; t < 8; t += 2) {
      values[sequence.inputs[t]] = sequence.inputs[t + 1];
      EXPECT_LT(sequence.inputs[t], 10);
      EXPECT_GE(sequence.inputs[t + 1], 10);
      EXPECT_EQ(sequence.targets[t], -1);
      EXPECT_EQ(sequence.targets[t + 1], -1);
    }
    EXPECT_EQ(values.size(), 4U);
    for (std::size_t t = 8; t < 15; ++t) {
      ASSERT_TRUE(values.contains(sequence.inputs[t]));
      EXPECT_EQ(sequence.targets[t], values[sequence.inputs[t]]);
    }
  }
}

TEST(TrainRecall, IsAFunctionOfSeedAndStep) {
  const train::Recall recall(4, 20, 15);
  train::Sequences first(3, 15), again(3, 15), other_step(3, 15), other_seed(3, 15);
  train::make_batch(recall, 1, 2, first);
  train::make_batch(recall, 1, 2, again);
  train::make_batch(recall, 1, 3, other_step);
  train::make_batch(recall, 2, 2, other_seed);
  const auto inputs = [](const train::Sequences& batch) {
    const auto span = batch.view(0, 3).inputs;
    return std::vector<std::int32_t>(span.begin(), span.end());
  };
  EXPECT_EQ(inputs(first), inputs(again));
  EXPECT_NE(inputs(first), inputs(other_step));
  EXPECT_NE(inputs(first), inputs(other_seed));
}

TEST(TrainRecall, RefusesWhatHasNoRoom) {
  EXPECT_EQ(error_of([] { train::Recall(4, 20, 8); }),
            "tokens: expected more than the 8 of 4 pairs, got 8");
  EXPECT_EQ(error_of([] { train::Recall(4, 7, 15); }),
            "vocabulary: expected at least 8 for 4 pairs, got 7");
}

TEST(TrainText, TrainsOnWhatComesBeforeTheLastTenth) {
  std::string bytes(1000, 'a');
  bytes.replace(900, 100, 100, '\xE9');
  const train::Text text("text", bytes, 8);
  train::Sequences batch(2000, 8);
  train::make_batch(text, 1, 2, batch);
  for (const auto token : batch.view(0, 2000).targets) ASSERT_EQ(token, 'a');
  const auto held_out = train::held_out(text, 8);
  EXPECT_EQ(held_out.sequences(), 12);
  for (const auto token : held_out.view(0, 12).inputs) ASSERT_EQ(token, 0xE9);
  EXPECT_EQ(error_of([&] { train::Text("text", std::string(80, 'a'), 8); }),
            "text: expected a tenth that is longer than 8 tokens, got 80 bytes");
}

class TrainCheckpoint : public testing::TestWithParam<const char*> {
 protected:
  static train::Recipe recipe(const std::string& attention) {
    train::Recipe recipe;
    recipe.attention = attention;
    recipe.pairs = 4;
    recipe.vocabulary = 16;
    recipe.tokens = 12;
    recipe.hidden = 16;
    recipe.head_dim = 8;
    recipe.rank = 2;
    recipe.intermediate = 20;
    recipe.batch = 9;
    recipe.optimiser.steps = 8;
    recipe.optimiser.warm_up = 2;
    recipe.optimiser.learning_rate = recipe.optimiser.map_learning_rate = 0.03;
    return recipe;
  }
  /// A model in training.
  struct Run {
    explicit Run(train::Recipe given) : recipe(given), task(recipe.task()) {}
    void train(Index first, Index last) {
      for (Index step = first; step < last; ++step) trainer.step(step);
    }
    void save(const std::filesystem::path& folder, Index steps) {
      train::save(folder, trainer.model(), trainer.optimiser(), recipe.tokens, recipe.json(),
                  steps);
    }
    Index load(const std::filesystem::path& folder) {
      return train::load(folder, trainer.model(), trainer.optimiser(), recipe.json());
    }
    train::Recipe recipe;
    std::unique_ptr<train::Task> task;
    train::Trainer trainer{recipe, *task, {}};
  };
};

TEST_P(TrainCheckpoint, GoesOnBitForBit) {
  const support::TemporaryFolder temporary;
  Run undisturbed(recipe(GetParam())), interrupted(recipe(GetParam())), resumed(recipe(GetParam()));
  undisturbed.train(0, 8);
  interrupted.train(0, 3);
  interrupted.save(temporary / "saved", 3);
  EXPECT_EQ(resumed.load(temporary / "saved"), 3);
  resumed.train(3, 8);
  for (std::size_t k = 0; k < undisturbed.trainer.model().parameters().size(); ++k) {
    const auto& parameter = undisturbed.trainer.model().parameters()[k];
    EXPECT_EQ(resumed.trainer.model().parameters()[k].value, parameter.value) << parameter.name;
    EXPECT_NE(interrupted.trainer.model().parameters()[k].value, parameter.value) << parameter.name;
  }
}

TEST_P(TrainCheckpoint, ServesAndFoldsWithTheSameLoss) {
  const support::TemporaryFolder temporary;
  Run run(recipe(GetParam()));
  run.train(0, 8);
  run.save(temporary / "trained", 8);
  const auto loss = [&](const vha::checkpoint::Model& model) {
    train::Recipe kept;
    train::take_task(model.config().json(), kept);
    const auto score = train::evaluate(model, *kept.task(), kept.tokens, {});
    EXPECT_EQ(score.asked, 256 * 4);
    return score.mean_loss();
  };
  const double expected = run.trainer.held_out().mean_loss();
  EXPECT_GT(expected, 0.5);
  const vha::checkpoint::Model trained(temporary / "trained");
  EXPECT_NEAR(loss(trained), expected, 1e-6 * expected);
  EXPECT_EQ(trained.sizes().has_premix, run.recipe.maps().premix);
  EXPECT_EQ(trained.sizes().has_postmix(), run.recipe.maps().postmix);
  if (!trained.is_vha()) return;
  const vha::checkpoint::FoldedModel folded(trained);
  vha::checkpoint::OutputFolder out(temporary / "folded", false);
  out.write_file("config.json", folded.config().dump());
  out.write_tensors(folded.tensors(), folded.metadata(), 1'000'000'000);
  out.commit();
  EXPECT_NEAR(loss(vha::checkpoint::Model(temporary / "folded")), expected, 1e-6 * expected);
  for (Index layer = 0; layer < 2; ++layer) {
    const auto shown = vha::checkpoint::maps_report(trained, layer);
    const auto own = train::maps_report(run.trainer.model(), layer);
    EXPECT_EQ(own.premix_distance, shown.premix_distance);
    EXPECT_EQ(own.cross_group_share, shown.cross_group_share);
    EXPECT_GT(own.premix_distance + own.cross_group_share, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Attention, TrainCheckpoint,
                         testing::Values("vha", "gqa", "premix", "postmix"),
                         [](const auto& test) { return std::string(test.param); });

TEST_F(TrainCheckpoint, IsNotGoneOnFromWithAnotherRecipe) {
  const support::TemporaryFolder temporary;
  Run run(recipe("vha"));
  run.save(temporary / "saved", 0);
  train::Recipe other = recipe("vha");
  other.optimiser.clip = 2;
  const std::string error = error_of([&] { Run(other).load(temporary / "saved"); });
  EXPECT_TRUE(error.ends_with("config.json: training: clip: expected 2.0, got 1.0")) << error;
}

}  // namespace
