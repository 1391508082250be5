// SPDX-License-Identifier: Apache-2.0
#pragma once

// Fault: a softmax that divides by nothing, overflows, is taken in a narrow scalar, or subtracts
// infinities. Compiled as usual and with -ffast-math.

#include <cmath>

#include "fault_support.hpp"

namespace faults {
namespace {

template <class S>
class Fault07Softmax : public testing::Test {};
TYPED_TEST_SUITE(Fault07Softmax, Scalars);

TYPED_TEST(Fault07Softmax, ARowThatSeesNoKeyIsZeroAndLeavesTheOthersAlone) {
  Random random(1);
  for (const Index group_size : {1, 3, 17}) {
    Core<TypeParam> all{.groups = 2, .group_size = group_size, .head_dim = 5, .value_dim = 3};
    all.query_positions = {0, 5, 100, 4, 2, 9};  // the keys stand at 3, 4 and 9, the window is 10
    all.key_positions = {3, 4, 9};
    all.window = 10;
    all.fill(random);
    const auto together = all.run();
    const auto row_size = static_cast<std::ptrdiff_t>(2 * group_size * 3);
    const auto query_size = static_cast<std::ptrdiff_t>(2 * group_size * 5);
    for (std::ptrdiff_t row = 0; row < 6; ++row) {
      const bool blind = row == 0 || row == 2 || row == 4;
      const std::vector<TypeParam> result(together.begin() + row * row_size,
                                          together.begin() + (row + 1) * row_size);
      Core<TypeParam> alone = all;
      alone.query_positions = {all.query_positions[static_cast<std::size_t>(row)]};
      alone.query = {all.query.begin() + row * query_size,
                     all.query.begin() + (row + 1) * query_size};
      EXPECT_TRUE(same_bits(result, alone.run())) << "row " << row;
      const std::vector<TypeParam> zeros(result.size(), vha::convert<TypeParam>(0.0));
      EXPECT_EQ(bool(same_bits(result, zeros)), blind) << "row " << row;
    }
  }
  Core<TypeParam> no_keys{.groups = 2, .group_size = 2, .head_dim = 4, .value_dim = 3};
  no_keys.query_positions = {0, 1};
  no_keys.fill(random);
  EXPECT_TRUE(same_bits(no_keys.run(), std::vector<TypeParam>(24, vha::convert<TypeParam>(0.0))));
}

// Logits of 2000 · ±1000, in whatever block of keys the largest stands.
TYPED_TEST(Fault07Softmax, LogitsOfTwoMillionGiveExactlyTheWinningValue) {
  for (const Index keys : {2, 3, 255, 256, 257, 700}) {
    for (const Index winner : {Index(0), keys / 2, keys - 1}) {
      Core<TypeParam> core;
      core.query_positions = {keys};
      core.key_positions = counted(keys);
      core.query = {vha::convert<TypeParam>(2000.0)};
      core.key.assign(static_cast<std::size_t>(keys), vha::convert<TypeParam>(-1000.0));
      core.value.assign(static_cast<std::size_t>(keys), vha::convert<TypeParam>(-57344.0));
      core.key[static_cast<std::size_t>(winner)] = vha::convert<TypeParam>(1000.0);
      for (const double value : {3.140625, 0.0, -0x1p-10}) {
        core.value[static_cast<std::size_t>(winner)] = vha::convert<TypeParam>(value);
        EXPECT_TRUE(same_bits(core.run(), std::vector<TypeParam>{vha::convert<TypeParam>(value)}))
            << winner << " of " << keys;
      }
    }
  }
}

TYPED_TEST(Fault07Softmax, EqualLogitsOfTwoMillionGiveTheMean) {
  for (const double sign : {1.0, -1.0}) {
    for (const Index keys : {4, 512}) {
      Core<TypeParam> core;
      core.query_positions = {keys};
      core.key_positions = counted(keys);
      core.query = {vha::convert<TypeParam>(2000.0)};
      core.key.assign(static_cast<std::size_t>(keys), vha::convert<TypeParam>(sign * 1000));
      for (Index k = 0; k < keys; ++k) {
        core.value.push_back(vha::convert<TypeParam>(k % 4 == 0 ? 6.0 : 2.0));
      }
      EXPECT_TRUE(same_bits(core.run(), std::vector<TypeParam>{vha::convert<TypeParam>(3.0)}));
    }
  }
}

// 257 is no bfloat16, and 2049 no half: the logits must not be stored in the operands' scalar.
TYPED_TEST(Fault07Softmax, LogitsAreTakenWiderThanTheOperands) {
  const double small = 0.26894142136999512, large = 0.73105857863000488;  // of logits 1 apart
  for (const double root : {16.0, 32.0, 64.0}) {
    Core<TypeParam> core{.head_dim = 2, .value_dim = 2};
    core.query_positions = {1};
    core.key_positions = {0, 1};
    const auto numbers = [](std::initializer_list<double> values) {
      std::vector<TypeParam> result;
      for (const double value : values) result.push_back(vha::convert<TypeParam>(value));
      return result;
    };
    core.query = numbers({root, 1});
    core.key = numbers({root, 0, root, 1});  // logits root² and root² + 1
    core.value = numbers({1, 0, 0, 1});
    const auto wide = core.template run<vha::Compute<TypeParam>>();
    EXPECT_NEAR(static_cast<double>(wide[0]), small, 1e-6);
    EXPECT_NEAR(static_cast<double>(wide[1]), large, 1e-6);
    if constexpr (sizeof(TypeParam) == 2) {
      EXPECT_TRUE(same_bits(core.run(), numbers({small, large})));
    }
  }
}

// Hidden keys before, between and behind live ones, in blocks of all sizes around the core's own.
TYPED_TEST(Fault07Softmax, HiddenBlocksBeforeLiveOnes) {
  Random random(2);
  for (const Index hidden : {1, 200, 256, 300, 512, 600}) {
    for (const bool future : {true, false}) {
      Core<TypeParam> live{.groups = 2, .group_size = 2, .head_dim = 4, .value_dim = 3};
      live.query_positions = {1000, 1003};
      live.key_positions = {997, 1000, 999, 1003, 998};
      live.window = 50;
      live.fill(random);
      Core<TypeParam> both = live;
      const TypeParam nan = nan_of<TypeParam>;
      const auto far = counted(hidden, future ? 5000 : 0);
      both.key_positions.insert(both.key_positions.begin(), far.begin(), far.end());
      both.key.insert(both.key.begin(), far.size() * 2 * 4, nan);
      both.value.insert(both.value.begin(), far.size() * 2 * 3, nan);
      both.key_positions.insert(both.key_positions.end(), far.begin(), far.end());
      both.key.insert(both.key.end(), far.size() * 2 * 4, nan);
      both.value.insert(both.value.end(), far.size() * 2 * 3, nan);
      const double limit = sizeof(TypeParam) == 8 ? 1e-14 : sizeof(TypeParam) == 4 ? 1e-6 : 1e-2;
      EXPECT_LE(largest_difference(both.run(), live.run()), limit) << hidden << " hidden";
    }
  }
}

template <class T>
class Fault07SoftmaxState : public testing::Test {};
using ComputeScalars = testing::Types<double, float>;
TYPED_TEST_SUITE(Fault07SoftmaxState, ComputeScalars);

TYPED_TEST(Fault07SoftmaxState, MergesWithOneThatSawNothing) {
  using T = TypeParam;
  using State = vha::SoftmaxState<T>;
  T logits[] = {T(-2e6), T(-2e6)};
  State live;
  live.update({logits, 2});
  T factor = nan_of<T>, other_factor = nan_of<T>;
  const State left = State{}.merge(live, factor, other_factor);
  EXPECT_EQ(factor, T(0));
  EXPECT_EQ(other_factor, T(1));
  const State right = live.merge(State{}, factor, other_factor);
  EXPECT_EQ(factor, T(1));
  EXPECT_EQ(other_factor, T(0));
  for (const State& merged : {left, right}) {
    EXPECT_EQ(bits(merged.max), bits(T(-2e6)));
    EXPECT_EQ(bits(merged.sum), bits(T(2)));
  }
  const State nothing = State{}.merge(State{}, factor, other_factor);
  EXPECT_TRUE(nothing.empty());
  EXPECT_EQ(bits(nothing.normalizer()), bits(T(0)));
  EXPECT_EQ(bits(factor), bits(T(0)));
  EXPECT_EQ(bits(other_factor), bits(T(0)));
}

}  // namespace
}  // namespace faults
