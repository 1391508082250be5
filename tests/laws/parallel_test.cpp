// SPDX-License-Identifier: Apache-2.0
// Layers split over ranks are the layers: with ranks that are threads. tests/mpi has them with MPI.

#include <stdexcept>

#include "error_of.hpp"
#include "parallel_checks.hpp"
#include "rank_threads.hpp"

namespace parallel {
namespace {

using support::error_of;
using support::run_on_ranks;
using vha::AttentionConfig;

static_assert(vha::Communicator<vha::SingleProcess>);
static_assert(vha::Communicator<support::RankThread>);
static_assert(vha::Communicator<vha::CountedCommunicator<support::RankThread>>);

TEST(Parallel, AnyNumberOfRanksIsTheLayer) {
  int checked = 0;
  for (const LayerShape& shape : shapes) {
    for (const Index ranks : {1, 2, 3, 4, 6, 8}) {
      if (!fits(shape, ranks)) continue;
      SCOPED_TRACE(vha::text(shape.name, ", ", ranks, " ranks"));
      run_on_ranks(ranks, [&](auto& communicator) { check_shape(shape, communicator); });
      ++checked;
    }
  }
  EXPECT_EQ(checked, 4 + 3 + 3 + 3 + 4);
}

TEST(Parallel, ActivationsAfterTheMaps) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Curved>(laws::random_layer<double>(shapes[0], random));
  for (const Index ranks : {2, 4}) {
    run_on_ranks(ranks, [&](auto& communicator) {
      check_layer(layer, communicator, vha::LayerForm::unfolded, 2, 0);
    });
  }
}

TEST(Parallel, ASingleProcessNeedsNoMachinery) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Vha>(laws::random_layer<double>(shapes[2], random));
  vha::SingleProcess alone;
  const vha::ParallelAttention part(layer, alone);
  const Tensor x = random_tensor(2, 5, layer.hidden(), random);
  EXPECT_TRUE(same_bits(laws::run(part, x), laws::run(layer, x)));
}

// More tokens than go through the projections together: two sums for each block.
TEST(Parallel, SumsOnceForABlockOfTokens) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Vha>(laws::random_layer<double>(shapes[0], random));
  const Tensor x = random_tensor(1, 513, layer.hidden(), random);
  const Array expected = laws::run(layer, x);
  run_on_ranks(2, [&](auto& communicator) {
    vha::CountedCommunicator counted(communicator);
    EXPECT_TRUE(close(laws::run(vha::ParallelAttention(layer, counted), x), expected, tolerance));
    EXPECT_EQ(counted.sums(), 4);
  });
}

TEST(Parallel, FrozenWeightsExchangeNothing) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Vha>(laws::random_layer<double>(shapes[1], random));
  const Tensor x = random_tensor(1, 3, layer.hidden(), random);
  run_on_ranks(2, [&](auto& communicator) {
    vha::CountedCommunicator counted(communicator);
    const vha::ParallelAttention part(layer, counted);
    vha::AttentionTrace<double> trace;
    typename decltype(part)::Workspace workspace;
    Tensor out(1, 3, layer.hidden()), dx(1, 3, layer.hidden());
    part.forward_into(x, out, workspace, {}, &trace);
    counted.reset();
    vha::AttentionGradients<double> none;
    vha::AttentionBackwardWorkspace<double> backward_workspace;
    vha::attention_backward(part, x, trace, out, dx, none, backward_workspace);
    EXPECT_EQ(counted.bytes(), 3 * vha::backward_exchanged_bytes_per_token(
                                       vha::LayerSizes::of(layer.config(), 2),
                                       vha::LayerForm::unfolded, 2, sizeof(double)));
  });
}

// Also of weights that ranks share: with four ranks, keys, values and maps are each on two.
TEST(Parallel, ABackwardPassThatIsRefusedLeavesTheGradientsAsTheyWere) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Vha>(laws::random_layer<double>(shapes[1], random));
  const Tensor x = random_tensor(1, 3, layer.hidden(), random);
  run_on_ranks(4, [&](auto& communicator) {
    const vha::ParallelAttention part(layer, communicator);
    vha::AttentionTrace<double> trace;
    typename decltype(part)::Workspace workspace;
    Tensor out(1, 3, layer.hidden()), dx(1, 3, layer.hidden());
    part.forward_into(x, out, workspace, {}, &trace);
    const auto of_all = [&](auto& gradients, auto&& body) {
      gradients.for_each(part, [&](const auto&, const auto&, auto& gradient) { body(gradient); });
    };
    auto gradients = vha::AttentionGradients<double>::zeros_like(part);
    of_all(gradients, [](auto& gradient) { gradient.setConstant(7); });
    vha::AttentionBackwardWorkspace<double> backward_workspace;
    const Tensor too_short(1, 2, layer.hidden());
    EXPECT_THROW(
        vha::attention_backward(part, x, trace, too_short, dx, gradients, backward_workspace),
        vha::Error);
    of_all(gradients, [](auto& gradient) { EXPECT_TRUE((gradient.array() == 7).all()); });
  });
}

TEST(Parallel, WeightsAreViews) {
  laws::Random random(3);
  const auto layer =
      laws::library_layer<Gated>(laws::random_gated_layer<double>(shapes[4], random));
  run_on_ranks(2, [&](auto& communicator) {
    const vha::ParallelAttention part(layer, communicator);
    const auto& whole = layer.weights();
    const auto& mine = part.weights();
    const Index k = communicator.rank();
    EXPECT_EQ(mine.query.weight.view().data, whole.query.weight.view().data);
    EXPECT_EQ(mine.key.weight.view().data, whole.key.weight.view().address(0, 8 * k));
    EXPECT_EQ(mine.output.weight.view().data, whole.output.weight.view().address(32 * k, 0));
    EXPECT_EQ(mine.premix.maps.size(), 1U);
    EXPECT_EQ(mine.postmix.a.view().data, whole.postmix.a.view().address(4 * k, 0));
    EXPECT_EQ(mine.output.bias.empty(), k != 0);
  });
}

TEST(Parallel, TheWeightsLiveAsLongAsThePart) {
  vha::SingleProcess alone;
  laws::Random random(3);
  const auto naive_layer = laws::random_layer<double>(shapes[0], random);
  const Tensor x = random_tensor(1, 2, 11, random);
  const auto part = vha::ParallelAttention(laws::library_layer<Vha>(naive_layer), alone);
  EXPECT_TRUE(same_bits(laws::run(part, x), laws::run(laws::library_layer<Vha>(naive_layer), x)));
}

TEST(Parallel, UnevenSplitsAreRefusedByName) {
  const AttentionConfig config{.hidden = 8, .head_dim = 4, .query_heads = 12, .kv_heads = 3};
  const auto error = [&](Index rank, Index ranks) {
    return error_of([&] { vha::slice_heads(config, rank, ranks); });
  };
  EXPECT_EQ(error(0, 2), "ranks: expected a divisor of kv_heads = 3, got 2");
  const std::string times =
      "ranks: expected kv_heads = 3 times a divisor of the 4 query heads in "
      "each group, got ";
  EXPECT_EQ(error(0, 4), times + "4");
  EXPECT_EQ(error(0, 9), times + "9");
  EXPECT_EQ(error(0, 24), times + "24");
  EXPECT_EQ(error(0, 0), "ranks: expected 1 or more, got 0");
  EXPECT_EQ(error(6, 6), "rank: expected 0 to 5, got 6");
  for (const Index ranks : {1, 3, 6, 12}) EXPECT_EQ(error(0, ranks), "no vha::Error");
}

TEST(Parallel, SlicesCoverTheHeads) {
  const AttentionConfig config{.hidden = 8, .head_dim = 4, .query_heads = 12, .kv_heads = 3};
  for (const Index ranks : {1, 3, 6, 12}) {
    Index next = 0;
    for (Index rank = 0; rank < ranks; ++rank) {
      const auto slice = vha::slice_heads(config, rank, ranks);
      EXPECT_EQ(slice.first_query_head, next);
      next += slice.query_heads;
      EXPECT_EQ(slice.kv_heads * slice.members, slice.query_heads);
      for (Index head = slice.first_query_head; head < next; ++head) {
        EXPECT_GE(head / config.group_size(), slice.first_kv_head);
        EXPECT_LT(head / config.group_size(), slice.first_kv_head + slice.kv_heads);
        EXPECT_GE(head % config.group_size(), slice.first_member);
        EXPECT_LT(head % config.group_size(), slice.first_member + slice.members);
      }
    }
    EXPECT_EQ(next, config.query_heads);
  }
}

// A cache of the whole layer's is not a rank's.
TEST(Parallel, ACacheOfOtherHeadsIsRefused) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Vha>(laws::random_layer<double>(shapes[0], random));
  const Matrix x = Matrix::Ones(1, layer.hidden());
  EXPECT_EQ(error_of([&] {
              run_on_ranks(2, [&](auto& communicator) {
                vha::KvCache<double> whole_cache(layer.config(), 1, 4);
                vha::ParallelAttention(layer, communicator).forward(x, whole_cache);
              });
            }),
            "kv_cache.kv_heads: expected 1, got 2");
}

TEST(Parallel, AFailureOfOneRankReachesTheOthers) {
  laws::Random random(3);
  const auto layer = laws::library_layer<Vha>(laws::random_layer<double>(shapes[0], random));
  const Matrix x = Matrix::Ones(2, layer.hidden());
  EXPECT_EQ(error_of([&] {
              run_on_ranks(2, [&](auto& communicator) {
                const vha::ParallelAttention part(layer, communicator);
                vha::KvCache<double> cache(part.config(), 1, communicator.rank() == 0 ? 2 : 1);
                part.forward(x, cache);
              });
            }).find("kv_cache"),
            0U);
}

}  // namespace
}  // namespace parallel
