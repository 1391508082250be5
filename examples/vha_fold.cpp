// SPDX-License-Identifier: Apache-2.0
// Folds a trained VHA checkpoint, Hugging Face's or Paddle's, to a stock Qwen3 checkpoint.
#define EIGEN_USE_THREADS
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>
#include <vha/checkpoint/fold_model.hpp>
#include <vha/checkpoint/output_folder.hpp>
#include <vha/checkpoint/temporary_file.hpp>
#include <vha/checkpoint/tensor_files.hpp>

#include "input_folder.hpp"
#include "ranks.hpp"
#include "tool.hpp"

namespace {

using namespace vha::checkpoint;
using vha::Index;
using vha::text;

struct Options {
  std::filesystem::path input, output, report;
  std::string premix_position = "before-norm";
  std::string dtype = "keep";
  std::uint64_t max_shard_size = 5'000'000'000;
  int threads = 0;  // by default all of the machine's
  bool dry_run = false, verify = true, overwrite = false, quiet = false;
};

/// What a layer's outputs may differ by, relative to the largest, for the rounding of its folded
/// weights to the coarser of their stored types: where the softmax is sharp that is much, and where
/// heads or maps are in a wrong order it is about 1.
double bound(const Model& folded, Index layer) {
  double bound = 0;
  for (const char* const name : {"self_attn.q_proj", "self_attn.o_proj"}) {
    const Dtype dtype = folded.linear(layer, name, "weight").dtype();
    bound = std::max(bound, dtype == Dtype::f32 ? 1e-3 : dtype == Dtype::f16 ? 5e-2 : 2e-1);
  }
  return bound;
}

std::optional<Dtype> dtype_option(const std::string& name) {
  if (name == "keep") return std::nullopt;
  return name == "f32" ? Dtype::f32 : name == "f16" ? Dtype::f16 : Dtype::bf16;
}

/// What was found and what will be made of it.
Json plan(const Model& model, const FoldedModel& folded) {
  const bool in_out = model.layout() == LinearLayout::in_out;
  const bool is_fused = std::ranges::any_of(
      model.names(), [](const std::string& name) { return name.ends_with(".qkv_proj.weight"); });
  const bool by_group = model.options().fused_order == FusedOrder::by_group;
  const auto& s = model.sizes();
  const auto query = model.linear(0, "self_attn.q_proj", "weight");
  Json plan;
  plan["layers"] = model.layers();
  plan["linear_layout"] = text(in_out ? "[in, out]" : "[out, in]",
                               model.layout_is_guess() ? ", a guess by the names" : "");
  if (model.head_layout_is_guess()) {
    const auto head = model.linear("lm_head", "weight").layout();
    plan["head_layout"] = text(head == LinearLayout::in_out ? "[in, out]" : "[out, in]",
                               ", a guess, as lm_head.weight is square");
  }
  plan["fused_qkv"] = !is_fused ? "no" : by_group ? "by group" : "by projection";
  plan["input_dtype"] = dtype_name(query.parts().front().tensor->dtype);
  plan["hidden"] = s.hidden;
  plan["head_dim"] = s.head_dim;
  plan["physical_heads"] = s.physical_heads;
  plan["query_heads"] = s.query_heads;
  plan["kv_heads"] = s.kv_heads;
  plan["premix"] = s.has_premix;
  plan["postmix_rank"] = s.postmix_rank;
  plan["output_tensors"] = folded.tensors().size();
  plan["output_bytes"] = folded.bytes();
  return plan;
}

void print(const Json& plan) {
  for (const auto& [key, value] : plan.items()) {
    std::string label = key;
    std::ranges::replace(label, '_', ' ');
    std::printf("%-16s %s\n", label.c_str(),
                value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
  }
}

/// Of what is in the input's folder, what the output's will lack.
void print_left_out(const InputFolder& input) {
  std::string names;
  for (const std::string& name : input.other_weights) {
    names += (names.empty() ? "" : ", ") + detail::printable(name);
  }
  if (!names.empty()) {
    std::printf("left out model weights in another format: %s\n", names.c_str());
  }
  for (const std::string& name : input.sub_folders) {
    std::printf("sub-folder %s not copied\n", detail::printable(name).c_str());
  }
}

/// How many threads each rank has.
int threads_of_each(const Options& options, const Ranks& ranks) {
  if (options.threads > 0) return options.threads;
  const auto machine = static_cast<Index>(std::thread::hardware_concurrency());
  return static_cast<int>(std::max<Index>(machine / ranks.size(), 1));
}

/// The same tensors; as their bytes go by, a line on the terminal says how many did of all that
/// `is_mine(tensor)` is true of.
template <class Choice>
std::vector<StreamedTensor> with_progress(std::vector<StreamedTensor> tensors,
                                          const Choice& is_mine) {
  std::uint64_t all_bytes = 0;
  for (const StreamedTensor& tensor : tensors) {
    if (is_mine(tensor)) all_bytes += detail::bytes_of(tensor);
  }
  struct Progress {
    std::mutex mutex;
    std::uint64_t done = 0;
    std::uint64_t shown = 101;  // per cent
  };
  const auto progress = std::make_shared<Progress>();
  for (StreamedTensor& tensor : tensors) {
    tensor.write = [write = tensor.write, progress, all_bytes](const ByteSink& sink) {
      write([&](const std::byte* data, std::size_t size) {
        sink(data, size);
        const std::scoped_lock lock(progress->mutex);
        progress->done += size;
        const std::uint64_t percent = progress->done * 100 / all_bytes;
        if (percent == progress->shown) return;
        progress->shown = percent;
        std::fprintf(stderr, "\r[%-50s] %3d %%%s", std::string(percent / 2, '#').c_str(),
                     static_cast<int>(percent), percent == 100 ? "\n" : "");
      });
    };
  }
  return tensors;
}

/// Whether `path`, wherever links lead, is `folder` or in it.
bool is_within(const std::filesystem::path& path, const std::filesystem::path& folder) {
  const auto inner = std::filesystem::weakly_canonical(path);
  const auto outer = std::filesystem::weakly_canonical(folder);
  return std::ranges::mismatch(outer, inner).in1 == outer.end();
}

/// Refuses to write where that would take the input away, or change it.
void protect_input(const Options& options) {
  if (is_within(options.input, options.output)) {
    vha::raise("OUTPUT_DIR", "a folder that INPUT_DIR is not in", options.output.string());
  }
  if (is_within(options.output, options.input)) {
    vha::raise("OUTPUT_DIR", "a folder that is not in INPUT_DIR", options.output.string());
  }
  for (const auto& entry : std::filesystem::directory_iterator(options.input)) {
    if (is_within(entry.path(), options.output)) {
      vha::raise("OUTPUT_DIR", "a folder that no link in INPUT_DIR leads to",
                 options.output.string());
    }
  }
  if (!options.report.empty() && is_within(options.report, options.input)) {
    vha::raise("--report", "a file that is not in INPUT_DIR", options.report.string());
  }
}

/// The outputs' largest difference of every layer of the two models, each compared by one of the ranks.
std::vector<double> differences(const Model& model, const Model& folded,
                                const vha::Executor& executor, const Ranks& ranks) {
  std::vector<double> result(static_cast<std::size_t>(model.layers()), 0);
  for (Index layer = ranks.rank(); layer < model.layers(); layer += ranks.size()) {
    result[static_cast<std::size_t>(layer)] =
        compare_layers(model, folded, layer, executor).largest_difference;
  }
  return result;
}

/// With the layer named whose outputs differ most for its bound.
Json verification(const std::vector<double>& differences, const Model& folded) {
  Json result;
  double worst = -1;
  for (Index layer = 0; layer < folded.layers(); ++layer) {
    const double difference = differences[static_cast<std::size_t>(layer)];
    const double most = bound(folded, layer);
    result["layers"].push_back(difference);
    if (!(difference / most <= worst)) {
      worst = difference / most;
      result["worst_layer"] = layer;
      result["worst_difference"] = difference;
      result["bound"] = most;
    }
  }
  return result;
}

/// Throws where a layer's outputs differ too much.
void require_same_outputs(const Json& verification, bool is_quiet) {
  const double difference = verification["worst_difference"];
  const std::string layer = verification["worst_layer"].dump();
  if (!(difference <= verification["bound"])) {
    vha::raise("layer " + layer,
               text("outputs within ", verification["bound"].dump(),
                    " of the unfolded ones, relative to the largest (--no-verify accepts any)"),
               text(difference));
  }
  if (is_quiet) return;
  std::printf("verified: outputs differ by %.2e of the largest at most, in layer %s\n", difference,
              layer.c_str());
}

void write_report(const Options& options, const Json& report) {
  if (options.report.empty()) return;
  detail::TemporaryFile file(options.report, options.report.string());
  const std::string text = report.dump(2) + '\n';
  file.write(0, text.data(), text.size());
  file.commit();
}

/// The plan and what the maps learned, also printed.
Json describe(const Options& options, const Model& model, const FoldedModel& folded) {
  Json report = plan(model, folded);
  if (!options.quiet) print(report);
  for (Index layer = 0; layer < model.layers(); ++layer) {
    const auto maps = maps_report(model, layer);
    report["maps"].push_back({{"premix_distance_from_identity", maps.premix_distance},
                              {"postmix_cross_group_share", maps.cross_group_share}});
    if (options.quiet) continue;
    std::printf("layer %-3td |P - I| %.4g, Postmix across groups %.1f %%\n", layer,
                maps.premix_distance, 100 * maps.cross_group_share);
  }
  return report;
}

/// Whether a tensor is this rank's to write: whole layers are, and of the others every so many.
class Share {
 public:
  Share(const std::vector<StreamedTensor>& tensors, const Ranks& ranks) {
    Index others = 0;
    for (const StreamedTensor& tensor : tensors) {
      const auto in_layer = layer_tensor(tensor.name, "model.layers.");
      const Index number = in_layer ? in_layer->layer : others++;
      if (number % ranks.size() == ranks.rank()) names_.insert(tensor.name);
    }
  }
  bool operator()(const StreamedTensor& tensor) const { return names_.contains(tensor.name); }

 private:
  std::set<std::string> names_;
};

/// By all ranks together: the first one makes the folder and what is no tensor, each writes and verifies its
/// share of the layers.
void fold(const Options& options, const ModelOptions& model_options, Ranks& ranks) {
  const bool is_first = ranks.rank() == 0;
  std::unique_ptr<const Model> model;
  std::unique_ptr<const FoldedModel> folded;
  std::unique_ptr<const TensorFiles> files;
  std::vector<StreamedTensor> tensors;
  std::optional<OutputFolder> out;
  Json report;
  ranks.together([&] {
    if (options.premix_position == "after-norm") {
      vha::raise("--premix-position", "before-norm: only then is Premix a factor of W_Q",
                 "after-norm, which does not fold");
    }
    model = std::make_unique<const Model>(options.input, model_options);
    protect_input(options);
    folded = std::make_unique<const FoldedModel>(*model, dtype_option(options.dtype));
  });
  const Share is_mine(folded->tensors(), ranks);
  const bool on_terminal = is_first && !options.quiet && ::isatty(STDERR_FILENO) == 1;
  tensors = on_terminal ? with_progress(folded->tensors(), is_mine) : folded->tensors();
  ranks.together([&] {
    files = std::make_unique<const TensorFiles>(options.output, tensors, folded->metadata(),
                                                options.max_shard_size);
    if (!is_first) return;
    report = describe(options, *model, *folded);
    const InputFolder input = read_input_folder(options.input);
    if (!options.quiet) print_left_out(input);
    out.emplace(options.output, options.overwrite);
    if (options.dry_run) return;
    for (const std::string& name : input.files) out->copy_file(name, options.input / name);
    out->write_file("config.json", folded->config().dump(2) + '\n');
    files->create(out->path());
  });
  if (options.dry_run) {
    return ranks.together([&] {
      if (!is_first) return;
      write_report(options, report);
      if (!options.quiet) std::printf("dry run: nothing written\n");
    });
  }

  const std::filesystem::path folder = ranks.broadcast(out ? out->path().string() : "");
  const int threads = threads_of_each(options, ranks);
  Eigen::ThreadPool pool(std::max(1, threads - 1));
  const Eigen::ThreadPoolDevice device(&pool, threads);
  // A few threads keep a disk busy; more would only need more memory.
  const Eigen::ThreadPoolDevice writers(&pool, std::min(threads, 4));
  ranks.together([&] { files->write(folder, writers, is_mine); });
  if (options.verify) {
    std::unique_ptr<const Model> written;
    std::vector<double> found;
    ranks.together([&] {
      written = std::make_unique<const Model>(folder);
      found = differences(*model, *written, device, ranks);
    });
    ranks.sum(std::span<double>(found));
    report["verify"] = verification(found, *written);
  }
  ranks.together([&] { files->sync(folder); });
  ranks.together([&] {
    if (!is_first) return;
    write_report(options, report);
    if (options.verify) require_same_outputs(report["verify"], options.quiet);
    out->commit();
    if (options.quiet) return;
    std::printf("folded %td layers into %s\n", model->layers(), options.output.c_str());
  });
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is an error to report
  Options options;
  CLI::App app{
      "Folds a trained VHA checkpoint into a stock Qwen3 checkpoint (GQA, no new kernel).\n"
      "Under mpirun the processes share the layers out; the result is the same.\n"
      "Exit status: 0 done, 1 the model does not fold or differs, 2 bad arguments."};
  app.add_option("INPUT_DIR", options.input, "config.json and safetensors, as trained")
      ->required()
      ->check(model_folder);
  app.add_option("OUTPUT_DIR", options.output, "the folder to make")->required();
  const ModelFlags model_flags(app);
  app.add_option("--premix-position", options.premix_position,
                 "where the trainer applied Premix: files cannot tell; after-norm does not fold")
      ->check(CLI::IsMember({"before-norm", "after-norm"}))
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "what weights are stored as")
      ->check(CLI::IsMember({"keep", "f32", "bf16", "f16"}))
      ->capture_default_str();
  app.add_option("--max-shard-size", options.max_shard_size, "such as 5GB, 500MB")
      ->check([](const std::string& size) {
        return size.starts_with('-') ? "must not be negative" : std::string();
      })
      ->transform(CLI::AsSizeValue(true))
      ->capture_default_str();
  app.add_option("--threads", options.threads,
                 "of each process; else the machine's, shared out as if all ran on one; the result "
                 "is the same")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--dry-run", options.dry_run, "check and show the plan, write nothing");
  app.add_option("--report", options.report, "write what was found and done to this JSON file");
  app.add_flag("--verify,!--no-verify", options.verify,
               "hold every layer's output against the unfolded layer's (default)");
  app.add_flag("--overwrite", options.overwrite, "replace OUTPUT_DIR when the new one is complete");
  app.add_flag("--quiet", options.quiet, "print errors alone");
  return run_tool_on_ranks(app, "vha_fold", argc, argv,
                           [&](Ranks& ranks) { fold(options, model_flags.options(), ranks); });
}
