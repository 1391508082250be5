// SPDX-License-Identifier: Apache-2.0
// Threads change when a thing is computed, never what.

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dynamic_head_layers.hpp"
#include "fixtures.hpp"
#include "run.hpp"

namespace laws {
namespace {

using vha::Executor;
using vha::Index;

using Awake = vha::AwakeThreads<Eigen::ThreadPoolDevice>;

class Executors : public testing::Test {
 protected:
  Eigen::ThreadPool pool_{3};
  Eigen::ThreadPoolDevice two_{&pool_, 2}, four_{&pool_, 4};
  Awake awake_two_{two_}, awake_four_{four_};

  std::vector<Executor> executors() const {
    return {Executor(), two_, four_, awake_two_, awake_four_};
  }
};

TEST_F(Executors, RunEveryTaskOnce) {
  EXPECT_EQ(Executor().threads(), 1);
  EXPECT_EQ(Executor(Eigen::DefaultDevice()).threads(), 1);
  EXPECT_EQ(Executor(four_).threads(), 4);
  for (const Executor& executor : executors()) {
    for (const Index tasks : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::vector<std::atomic<int>> in_lane(static_cast<std::size_t>(executor.threads()));
      executor.for_each(tasks, [&](Index task, Index lane) {
        EXPECT_EQ(in_lane[static_cast<std::size_t>(lane)]++, 0) << "two threads in one lane";
        ++runs[static_cast<std::size_t>(task)];
        --in_lane[static_cast<std::size_t>(lane)];
      });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

TEST_F(Executors, ThrowWhatTheFirstFailingTaskThrows) {
  for (const Executor& executor : executors()) {
    for (int round = 0; round < 100; ++round) {
      try {
        executor.for_each(50, [](Index task, Index) {
          if (task >= 20) throw std::runtime_error(std::to_string(task));
        });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "20");
      }
    }
  }
}

TEST_F(Executors, WorkOnAThreadOfTheirOwnPool) {
  for (const Executor& executor : {Executor(four_), Executor(awake_four_)}) {
    Eigen::Barrier done(3);
    std::atomic<int> runs = 0;
    for (int k = 0; k < 3; ++k) {  // every thread of the pool waits for more
      pool_.Schedule([&] {
        executor.for_each(10, [&](Index, Index) { ++runs; });
        done.Notify();
      });
    }
    done.Wait();
    EXPECT_EQ(runs, 30);
  }
}

/// Some calls with tasks of different lengths; how many tasks there were.
int make_calls(const Executor& executor, int calls) {
  std::atomic<int> runs = 0;
  for (int call = 0; call < calls; ++call) {
    executor.for_each(5, [&](Index task, Index) {
      for (Index k = 0; k < 100 * (task % 2); ++k) std::this_thread::yield();
      ++runs;
    });
  }
  return runs;
}

TEST_F(Executors, AwakeThreadsServeManyCallers) {
  std::vector<int> runs(8);
  {
    std::vector<std::jthread> callers;
    for (int& count : runs) {
      callers.emplace_back([&] { count = make_calls(awake_four_, 200); });
    }
  }
  EXPECT_EQ(runs, std::vector<int>(8, 1000));
}

TEST_F(Executors, AwakeThreadsEndAtAnyTime) {
  for (int round = 0; round < 200; ++round) {
    const Awake awake(four_);
    EXPECT_EQ(make_calls(awake, round % 3), round % 3 * 5);
  }
}

// With patience for hours, they would be the pool's again only at the end.
TEST_F(Executors, AwakeThreadsGoBackToThePool) {
  EXPECT_EQ(make_calls(awake_four_, 3), 15);
  Eigen::Barrier done(3);
  for (int k = 0; k < 3; ++k) pool_.Schedule([&] { done.Notify(); });
  done.Wait();
  Eigen::Barrier done_at_the_end(3);
  {
    const Awake patient(four_, std::chrono::hours(10));
    EXPECT_EQ(make_calls(patient, 3), 15);
    for (int k = 0; k < 3; ++k) pool_.Schedule([&] { done_at_the_end.Notify(); });
    EXPECT_EQ(make_calls(patient, 3), 15);
  }
  done_at_the_end.Wait();
}

// As a pool that is out of memory.
struct RefusingDevice {
  static int numThreads() { return 4; }
  static int currentThreadId() { return -1; }
  const RefusingDevice* getPool() const { return this; }
  static void Schedule(const std::function<void()>&) { throw std::runtime_error("no more"); }
};

TEST(Executor, DoesWithoutAPoolThatRefuses) {
  const RefusingDevice device;
  const vha::AwakeThreads<RefusingDevice> awake(device);
  for (const Executor& executor : {Executor(device), Executor(awake)}) {
    EXPECT_EQ(make_calls(executor, 10), 50);
  }
}

/// Calls `body(executor)` for 1, 2 and 4 threads; all results must have the same bits.
template <class Body>
void expect_same_on(const std::vector<Executor>& executors, Body&& body) {
  const Array expected = body(executors.front());
  for (const Executor& executor : executors) {
    for (int round = 0; round < 3; ++round) {
      EXPECT_TRUE(same_bits(body(executor), expected)) << executor.threads() << " threads";
    }
  }
}

template <class Scalar>
class OnThreads : public Executors {};
using Scalars = testing::Types<double, float, vha::bfloat16>;
TYPED_TEST_SUITE(OnThreads, Scalars);

TYPED_TEST(OnThreads, ALayerGivesTheSameBits) {
  using T = vha::Compute<TypeParam>;
  vha::AttentionConfig config;
  config.hidden = 48;
  config.head_dim = 16;
  config.query_heads = 12;
  config.kv_heads = 2;
  const auto layer = vha::initialise_vha<TypeParam>(config, {.postmix_rank = 3});
  using Rows = vha::RowMajorMatrix<TypeParam>;
  Rows x(1500, config.hidden);
  Random random(7);
  for (Index k = 0; k < x.size(); ++k) x.data()[k] = vha::convert<TypeParam>(random());
  expect_same_on(this->executors(), [&](const Executor& executor) {
    return array_of(layer.forward(x, {}, executor).template cast<double>().eval());
  });
  // In chunks over a cache that is longer than what one thread takes; the last are decode steps.
  expect_same_on(this->executors(), [&](const Executor& executor) {
    vha::KvCache<TypeParam> cache(config, 1, x.rows());
    vha::AttentionWorkspace<T> workspace;
    workspace.executor = executor;
    Rows out(x.rows(), x.cols());
    Index first = 0;
    for (const Index count : {1100, 396, 1, 1, 2}) {
      Rows part(count, x.cols());
      layer.forward_into(Rows(x.middleRows(first, count)), cache, part, workspace);
      out.middleRows(first, count) = part;
      first += count;
    }
    EXPECT_EQ(first, x.rows());
    return array_of(out.template cast<double>().eval());
  });
  expect_same_on(this->executors(), [&](const Executor& executor) {
    return array_of(vha::fold_vha(layer, executor).weights().output.weight.template to<double>());
  });
  expect_same_on(this->executors(), [&](const Executor& executor) {
    return array_of(vha::fold_vha(layer, executor).weights().query.weight.template to<double>());
  });
}

TYPED_TEST(OnThreads, VirtualiseGivesTheSameBits) {
  // Queries that are no fold, of more work than one thread is woken for.
  const vha::AttentionConfig config{
      .hidden = 160, .head_dim = 32, .query_heads = 12, .kv_heads = 3};
  auto weights = vha::fold_vha(vha::initialise_vha<TypeParam>(config)).weights();
  Random random(8);
  const auto values =
      random.values<TypeParam>(static_cast<std::size_t>(config.hidden * config.query_width()));
  weights.query.weight = own_weight<TypeParam>(values, static_cast<naive::Index>(config.hidden));
  const vha::GqaAttention<TypeParam> gqa(config, weights);
  expect_same_on(this->executors(), [&](const Executor& executor) {
    const auto made = vha::virtualise(gqa, {}, executor);
    Array all = array_of(made.layer.weights().query.weight.template to<double>());
    for (const auto& map : made.layer.weights().premix.maps) {
      const Array more = array_of(map.template to<double>());
      all.values.insert(all.values.end(), more.values.begin(), more.values.end());
    }
    all.values.push_back(made.report.relative_error);
    all.shape = {static_cast<Index>(all.values.size())};
    return all;
  });
}

TEST_F(Executors, ComposeHeadsToTheSameBits) {
  Random random(9);
  for (const auto& [name, twin] : random_dynamic_heads(random)) {
    SCOPED_TRACE(name);
    const auto layer = library_layer(twin);
    const auto x = matrix_of<double>(random_tokens<double>(400, twin, random), 400);
    const Array expected = array_of(layer.forward(x));
    for (const Executor& executor : executors()) {
      EXPECT_TRUE(same_bits(array_of(layer.forward(x, {}, executor)), expected));
    }
  }
}

TEST(Threads, AreTakenAsTheReadmeSays) {
  vha::AttentionConfig config;
  config.hidden = 8;
  config.head_dim = 4;
  config.query_heads = 4;
  config.kv_heads = 2;
  const auto layer = vha::initialise_vha<float>(config);
  const vha::RowMajorMatrix<float> x = vha::RowMajorMatrix<float>::Random(3, 8);
  vha::RowMajorMatrix<float> out(3, 8);
  // clang-format off
Eigen::ThreadPool pool(2);
Eigen::ThreadPoolDevice device(&pool, 2);
const auto y = layer.forward(x, {}, device);
const auto served = vha::fold_vha(layer, device);
vha::AttentionWorkspace<float> workspace;
workspace.executor = device;  // of every forward_into with this workspace

const vha::AwakeThreads awake(device);
workspace.executor = awake;  // for decode: no thread needs to be woken for a step
  // clang-format on
  layer.forward_into(x, out, workspace);
  EXPECT_EQ(out, y);
  EXPECT_TRUE(served.forward(x).isApprox(y, 1e-4F));
}

}  // namespace
}  // namespace laws
