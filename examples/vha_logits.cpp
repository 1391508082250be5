// SPDX-License-Identifier: Apache-2.0
// The logits of a dense Qwen3 model, VHA or folded, for some tokens.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>
#include <vha/checkpoint/safetensors_writer.hpp>

#include "qwen3.hpp"
#include "tool.hpp"

namespace {

struct Options {
  std::string model, write;
  std::vector<vha::Index> tokens;
  bool cache = false, loss = false;
};

template <class S>
Matrix run(const vha::checkpoint::Model& model, const Options& options) {
  const Qwen3<S> qwen3(model);
  auto caches = qwen3.caches(static_cast<vha::Index>(options.tokens.size()));
  if (!options.cache) return qwen3.logits(options.tokens, caches);
  Matrix logits(static_cast<vha::Index>(options.tokens.size()), qwen3.vocabulary());
  for (vha::Index t = 0; t < logits.rows(); ++t) {
    logits.row(t) = qwen3.logits({options.tokens[static_cast<std::size_t>(t)]}, caches);
  }
  return logits;
}

void print(const Matrix& logits) {
  for (vha::Index t = 0; t < logits.rows(); ++t) {
    std::vector<vha::Index> best(static_cast<std::size_t>(logits.cols()));
    for (std::size_t k = 0; k < best.size(); ++k) best[k] = static_cast<vha::Index>(k);
    const auto shown = best.begin() + std::min<std::ptrdiff_t>(3, logits.cols());
    std::partial_sort(best.begin(), shown, best.end(),
                      [&](auto a, auto b) { return logits(t, a) > logits(t, b); });
    std::printf("after token %td:", t);
    for (auto token = best.begin(); token != shown; ++token) {
      std::printf("  %td (%.6g)", *token, static_cast<double>(logits(t, *token)));
    }
    std::printf("\n");
  }
}

/// The mean of -log p over the tokens that follow the first, each by the logits before it.
double mean_loss(const Matrix& logits, const std::vector<vha::Index>& tokens) {
  double sum = 0;
  for (vha::Index t = 1; t < logits.rows(); ++t) {
    const Eigen::RowVectorXd row = logits.row(t - 1).cast<double>();
    const double most = row.maxCoeff();
    sum += std::log((row.array() - most).exp().sum()) + most -
           row[tokens[static_cast<std::size_t>(t)]];
  }
  return sum / static_cast<double>(logits.rows() - 1);
}

void write(const std::string& path, const Matrix& logits) {
  const vha::checkpoint::TensorView view{"logits",
                                         vha::checkpoint::Dtype::f32,
                                         {logits.rows(), logits.cols()},
                                         reinterpret_cast<const std::byte*>(logits.data()),
                                         static_cast<std::size_t>(logits.size()) * sizeof(float)};
  vha::checkpoint::write_safetensors(path, {&view, 1});
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Runs a dense Qwen3 model, VHA as trained or folded, and prints the likeliest next tokens.\n"
      "Exit status: 0 done, 1 the model does not run, 2 bad arguments."};
  app.add_option("MODEL_DIR", options.model, "config.json and safetensors")
      ->required()
      ->check(model_folder);
  app.add_option("--tokens", options.tokens, "token numbers, as 1,2,3")->delimiter(',')->required();
  app.add_flag("--cache", options.cache, "token by token through the cache, as in decode");
  app.add_flag("--loss", options.loss,
               "print the mean loss, -log p, of the tokens after the first");
  app.add_option("--write", options.write, "write the logits to this safetensors file");
  const ModelFlags model_flags(app);
  check_arguments(app, [&] {
    if (options.loss && options.tokens.size() < 2) {
      vha::raise("--loss", "two --tokens or more", vha::text(options.tokens.size()));
    }
  });
  return run_tool(app, "vha_logits", argc, argv, [&] {
    const vha::checkpoint::Model model(options.model, model_flags.options());
    const Matrix logits = vha::checkpoint::with_scalar(
        common_dtype(model), [&](auto scalar) { return run<decltype(scalar)>(model, options); });
    print(logits);
    if (options.loss) std::printf("mean loss %.8f\n", mean_loss(logits, options.tokens));
    if (!options.write.empty()) write(options.write, logits);
  });
}
