// SPDX-License-Identifier: Apache-2.0
// vha_check: holds a layer that somebody else computed against the library, step by step.
//
// A case file is a safetensors file with one layer's configuration in __metadata__, its weights, an
// input, and the expected value of every step (tests/cases has examples). Each layer is run as the
// case says, `prefill` tokens at once and the rest one at a time through a KvCache, and compared
// with every trace.*, folded.* and expected.out tensor that the file has. Where it has an upstream
// gradient, the trained layer's backward pass is run too and compared with every expected.grad.*.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <vector>
#include <vha/checkpoint/safetensors_writer.hpp>

#include "case_file.hpp"
#include "tool.hpp"

namespace {

using Tensors = std::map<std::string, CaseTensor>;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const auto extent : shape) text += (text == "[" ? "" : ", ") + std::to_string(extent);
  return text + "]";
}

/// Copies a chunk `[batch, tokens, ...]` to its place among all tokens `[batch, all_tokens, ...]`.
template <class Tensor>
void put(CaseTensor& target, const Tensor& chunk, vha::Index first, vha::Index all_tokens) {
  const vha::Index batch = chunk.dimension(0), tokens = chunk.dimension(1);
  const vha::Index width = batch * tokens == 0 ? 0 : chunk.size() / (batch * tokens);
  if (target.shape.empty()) {
    for (const auto extent : chunk.dimensions()) target.shape.push_back(extent);
    target.shape[1] = all_tokens;
    target.values.resize(static_cast<std::size_t>(batch * all_tokens * width));
  }
  for (vha::Index row = 0; row < batch; ++row) {
    for (vha::Index k = 0; k < tokens * width; ++k) {
      target.values[static_cast<std::size_t>((row * all_tokens + first) * width + k)] =
          static_cast<double>(chunk.data()[row * tokens * width + k]);
    }
  }
}

/// Every step of the layer on the case's input, under the names that the file has for them.
template <class Layer>
Tensors run(const Layer& layer, const CaseFile& file) {
  using T = typename Layer::T;
  const CaseTensor x = file.tensor("x", 3);
  const vha::Index batch = x.shape[0], tokens = x.shape[1], hidden = x.shape[2];
  const std::vector<vha::Position> positions = file.positions(batch, tokens);
  const auto prefill = std::min(tokens, file.number<vha::Index>("prefill", tokens));
  if (prefill < 1 && tokens > 0) vha::raise("prefill", "1 or more", std::to_string(prefill));

  Tensors steps;
  if (batch * tokens == 0) return steps;
  vha::KvCache<typename Layer::Scalar> cache(layer.config(), batch, tokens);
  typename Layer::Workspace workspace;
  for (vha::Index first = 0, count = prefill; first < tokens; first += count, count = 1) {
    vha::Tensor3<T> chunk(batch, count, hidden), out(batch, count, hidden);
    std::vector<vha::Position> chunk_positions;
    for (vha::Index row = 0; row < batch; ++row) {
      for (vha::Index k = 0; k < count; ++k) {
        const auto token = static_cast<std::size_t>(row * tokens + first + k);
        chunk_positions.push_back(positions[token]);
        for (vha::Index c = 0; c < hidden; ++c) {
          chunk(row, k, c) = static_cast<T>(
              x.values[token * static_cast<std::size_t>(hidden) + static_cast<std::size_t>(c)]);
        }
      }
    }
    vha::AttentionTrace<T> trace;
    layer.forward_into(chunk, cache, out, workspace, {.positions = chunk_positions}, &trace);
    const auto record = [&](const char* name, const auto& tensor) {
      put(steps[name], tensor, first, tokens);
    };
    if constexpr (Layer::Weights::has_premix) record("trace.q_physical", trace.q_physical);
    record("trace.q_virtual", trace.q_virtual);
    record("trace.q_rotated", trace.q_rotated);
    record("trace.k_rotated", trace.k_rotated);
    record("trace.v", trace.v);
    record("trace.heads", trace.heads);
    if constexpr (Layer::Weights::has_postmix) record("trace.heads_mixed", trace.heads_mixed);
    record("expected.out", out);
  }
  return steps;
}

template <class T>
vha::Tensor3<T> activations(const CaseTensor& from) {
  vha::Tensor3<T> tensor(from.shape[0], from.shape[1], from.shape[2]);
  for (std::size_t k = 0; k < from.values.size(); ++k) {
    tensor.data()[k] = static_cast<T>(from.values[k]);
  }
  return tensor;
}

/// What a case file calls the gradient of this weight.
std::string gradient_name(const std::string& weight) {
  static const std::map<std::string, std::string> names = {
      {"query.weight", "wq"},  {"query.bias", "bq"},   {"key.weight", "wk"},
      {"key.bias", "bk"},      {"value.weight", "wv"}, {"value.bias", "bv"},
      {"output.weight", "wo"}, {"output.bias", "bo"},  {"gate.weight", "wgate"},
      {"gate.bias", "bgate"}};
  const auto found = names.find(weight);
  return "expected.grad." +
         (found == names.end() ? weight.substr(0, weight.find('[')) : found->second);
}

/// The gradients of Σ out · upstream, under the names that the file has for them.
template <class Layer>
Tensors run_backward(const Layer& layer, const CaseFile& file) {
  using T = typename Layer::T;
  const CaseTensor input = file.tensor("x", 3);
  const auto x = activations<T>(input), upstream = activations<T>(file.tensor("upstream", 3));
  const auto positions = file.positions(input.shape[0], input.shape[1]);
  const vha::TokenLayout layout{.positions = positions};
  vha::Tensor3<T> out = x, dx = x;
  vha::AttentionTrace<T> trace;
  typename Layer::Workspace forward_workspace;
  layer.forward_into(x, out, forward_workspace, layout, &trace);
  auto gradients = vha::AttentionGradients<T>::zeros_like(layer);
  vha::AttentionBackwardWorkspace<T> workspace;
  vha::attention_backward(layer, x, trace, upstream, dx, gradients, workspace, layout);

  Tensors steps;
  put(steps["expected.grad.x"], dx, 0, input.shape[1]);
  gradients.for_each(layer, [&](const std::string& name, const auto&, const auto& gradient) {
    CaseTensor& target = steps[gradient_name(name)];
    if (name.starts_with("premix")) {  // one below the other
      target.shape = {layer.config().kv_heads, gradient.rows(), gradient.cols()};
    } else if (name.ends_with("norm") || name.ends_with("bias")) {
      target.shape = {gradient.cols()};
    } else {
      target.shape = {gradient.rows(), gradient.cols()};
    }
    target.values.insert(target.values.end(), gradient.data(), gradient.data() + gradient.size());
  });
  return steps;
}

template <class S>
CaseTensor tensor_of(const vha::Weight<S>& weight) {
  const vha::RowMajorMatrix<double> values = weight.template to<double>();
  return {{values.rows(), values.cols()}, {values.data(), values.data() + values.size()}};
}

/// The steps of the layer's fold, as far as it has one, and the folded weights.
template <class Layer>
Tensors run_folded(const Layer& layer, const CaseFile& file) {
  const auto folded = [&] {
    if constexpr (Layer::Weights::has_gate) {
      return fold_premix(layer);
    } else {
      return fold_vha(layer);
    }
  }();
  Tensors steps = run(folded, file);
  steps["folded.wq"] = tensor_of(folded.weights().query.weight);
  if constexpr (!Layer::Weights::has_gate) {
    steps["folded.wo"] = tensor_of(folded.weights().output.weight);
  }
  return steps;
}

struct Verdict {
  double absolute = 0;
  double relative = 0;  ///< to the largest expected value
  std::string worst = "-";
  bool passed = true;
};

/// Compares every step that the file has a value for.
Verdict compare(const Tensors& steps, const CaseFile& file, double bound) {
  Verdict verdict;
  std::size_t compared = 0;
  for (const auto& [name, actual] : steps) {
    if (!file.has(name)) continue;
    ++compared;
    const CaseTensor expected = file.tensor(name);
    if (expected.shape != actual.shape) {
      vha::raise(name, shape_text(actual.shape) + " from the configuration",
                 shape_text(expected.shape) + " in the file");
    }
    double largest = 0, error = 0;
    bool comparable = true;
    for (std::size_t i = 0; i < actual.values.size(); ++i) {
      const double difference = std::abs(actual.values[i] - expected.values[i]);
      comparable = comparable && vha::is_finite(difference);
      largest = std::max(largest, std::abs(expected.values[i]));
      error = std::max(error, difference);
    }
    const double relative = error == 0 ? 0 : error / largest;
    verdict.absolute = std::max(verdict.absolute, error);
    if (!comparable || relative > bound) verdict.passed = false;
    if (!comparable || relative > verdict.relative) {
      verdict.relative = comparable ? relative : std::numeric_limits<double>::quiet_NaN();
      verdict.worst = name;
    }
    if (!comparable) return verdict;
  }
  if (compared == 0) {
    vha::raise("case", "at least one of trace.*, folded.* and expected.*", "none of them");
  }
  return verdict;
}

void write(const std::filesystem::path& path, const std::map<std::string, Tensors>& by_layer) {
  std::vector<vha::checkpoint::TensorView> views;
  for (const auto& [layer, steps] : by_layer) {
    for (const auto& [name, tensor] : steps) {
      const std::string step = name == "expected.out" ? "out" : name;
      views.push_back({layer + "." + step, vha::checkpoint::Dtype::f64, tensor.shape,
                       reinterpret_cast<const std::byte*>(tensor.values.data()),
                       tensor.values.size() * sizeof(double)});
    }
  }
  vha::checkpoint::write_safetensors(path, views);
}

struct Options {
  std::string layer = "both";
  std::string dtype = "f64";
  double bound = 0;  ///< 0: the dtype's usual one
  std::string write;
  std::vector<std::string> cases;
};

/// Runs one case; true where every comparison holds.
template <class S>
bool check_case(const Options& options, const std::string& path, double bound) {
  const CaseFile file(path);
  std::map<std::string, Tensors> by_layer;
  const auto run_layers = [&](const auto& layer) {
    if (options.layer != "folded") {
      by_layer["vha"] = run(layer, file);
      if (file.has("upstream")) by_layer["vha"].merge(run_backward(layer, file));
    }
    if (options.layer != "vha") by_layer["folded"] = run_folded(layer, file);
  };
  if (file.flag("gated")) {
    run_layers(file.layer<S, vha::SigmoidGate<S>>());
  } else {
    run_layers(file.layer<S, vha::NoGate>());
  }
  bool passed = true;
  for (const auto& [name, steps] : by_layer) {
    const Verdict verdict = compare(steps, file, bound);
    std::printf("%-28s %-7s %-5s absolute %8.2e  relative %8.2e  at %-18s %s\n",
                std::filesystem::path(path).stem().c_str(), name.c_str(), options.dtype.c_str(),
                verdict.absolute, verdict.relative, verdict.worst.c_str(),
                verdict.passed ? "ok" : "MISMATCH");
    passed = passed && verdict.passed;
  }
  if (!options.write.empty()) write(options.write, by_layer);
  return passed;
}

bool check_case(const Options& options, const std::string& path) {
  // What a layer of a few dozen channels loses in each storage type, with a margin of two.
  const auto bound = [&](double usual) { return options.bound > 0 ? options.bound : usual; };
  if (options.dtype == "f64") return check_case<double>(options, path, bound(1e-12));
  if (options.dtype == "f32") return check_case<float>(options, path, bound(2e-5));
  if (options.dtype == "f16") return check_case<vha::half>(options, path, bound(2e-3));
  return check_case<vha::bfloat16>(options, path, bound(2e-2));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Compares a VHA layer and its fold with case files, step by step.\n"
      "Exit status: 0 all agree, 1 a mismatch, 2 bad input."};
  app.add_option("--layer", options.layer, "vha (as trained), folded, or both")
      ->check(CLI::IsMember({"vha", "folded", "both"}))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "what weights and cache are stored in")
      ->check(CLI::IsMember({"f64", "f32", "bf16", "f16"}))
      ->capture_default_str();
  app.add_option("--bound", options.bound,
                 "largest difference that passes, relative to the tensor's largest value (default: "
                 "f64 1e-12, f32 2e-5, bf16 2e-2, f16 2e-3)")
      ->check(CLI::Range(1e-300, 1e300));
  app.add_option("--write", options.write, "write every computed step of one CASE to this file");
  app.add_option("CASE", options.cases, "case files (safetensors)")->required();
  check_arguments(app, [&] {
    if (options.write.empty()) return;
    if (options.cases.size() != 1) {
      vha::raise("--write", "exactly one CASE", vha::text(options.cases.size()));
    }
    std::error_code none;
    if (std::filesystem::equivalent(options.write, options.cases.front(), none)) {
      vha::raise("--write", "another file than the CASE", options.write);
    }
  });
  if (const auto ended = parse_arguments(app, "vha_check", argc, argv)) return *ended;

  int status = 0;
  for (const std::string& path : options.cases) {
    try {
      if (!check_case(options, path)) status = std::max(status, 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "vha_check: %s: %s\n", path.c_str(), error.what());
      status = 2;
    }
  }
  return status;
}
