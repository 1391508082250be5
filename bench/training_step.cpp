// SPDX-License-Identifier: Apache-2.0
// A training step of the 1.7B layer, unfolded: a forward that keeps what the backward pass needs, and
// the gradients of every weight and of the activations. Beside it the forward alone, and before
// all the memory that a step takes.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "ours.hpp"
#include "paper_work.hpp"

namespace {

using namespace bench;

class Step {
 public:
  Step(Index tokens, int threads) : layer_(layer()), threads_(threads) {
    const Index hidden = layer_.config().hidden;
    const auto matrix = [&](std::uint32_t seed) {
      const auto numbers = random_numbers<float>(tokens * hidden, 1, seed);
      return Matrix(Eigen::Map<const Matrix>(numbers.data(), tokens, hidden));
    };
    x_ = matrix(1);
    upstream_ = matrix(2);
    out_.setZero(tokens, hidden);
    dx_.setZero(tokens, hidden);
    forward_workspace_.executor = workspace_.executor = threads_.executor();
  }

  void forward() { layer_.forward_into(x_, out_, forward_workspace_); }
  void run() {
    layer_.forward_into(x_, out_, forward_workspace_, {}, &trace_);
    vha::attention_backward(layer_, x_, trace_, upstream_, dx_, gradients_, workspace_);
  }

 private:
  using Layer = vha::VhaAttention<float>;
  using Matrix = vha::RowMajorMatrix<float>;

  static const Layer& layer() {
    static const Layer layer = trained_layer(paper_layer).cast<float>();
    return layer;
  }

  Layer layer_;
  Threads threads_;
  Matrix x_, upstream_, out_, dx_;
  Layer::Workspace forward_workspace_;
  vha::AttentionTrace<float> trace_;
  vha::AttentionGradients<float> gradients_ = vha::AttentionGradients<float>::zeros_like(layer_);
  vha::AttentionBackwardWorkspace<float> workspace_;
};

Work training_step(Index tokens, int threads) {
  constexpr auto form = vha::LayerForm::unfolded;
  const auto forward = static_cast<double>(vha::prefill_flops(paper_sizes, form, tokens).total());
  const auto backward = static_cast<double>(vha::backward_flops(paper_sizes, form, tokens).total());
  const auto make = [=](auto run) {
    return [=]() -> Task {
      const auto step = std::make_shared<Step>(tokens, threads);
      return {[=] { run(*step); }, nullptr};
    };
  };
  return {vha::text("training_step/S:", tokens),
          Element::float32,
          threads,
          {{"vha", {.flops = forward + backward}, make([](Step& step) { step.run(); })},
           {"vha_forward", {.flops = forward}, make([](Step& step) { step.forward(); })}}};
}

/// The most memory that a process has which takes one step, for steps of more and more tokens.
void print_memory() {
  for (const Index tokens : {512, 1024, 2048, 4096}) {
    const ::pid_t process = ::fork();
    if (process == 0) {
      Step(tokens, 1).run();
      ::_exit(0);
    }
    int status = 0;
    ::rusage usage = {};
    ::wait4(process, &status, 0, &usage);
    std::printf("peak memory of a step over %4td tokens: %5ld MiB\n", tokens,
                usage.ru_maxrss / 1024);
  }
}

}  // namespace

int main(int argc, char** argv) {
  print_memory();  // before there are threads, which a fork would not take along
  return run_benchmarks(argc, argv, [](const Options& options) {
    std::vector<Work> works;
    for (const int threads : options.threads) {
      for (const Index tokens : {512, 2048}) works.push_back(training_step(tokens, threads));
    }
    return works;
  });
}
