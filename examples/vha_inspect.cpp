// SPDX-License-Identifier: Apache-2.0
// Shows what training did to the Premix and Postmix maps of a checkpoint.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/model.hpp>
#include <vha/checkpoint/temporary_file.hpp>

#include "inspect/maps_json.hpp"
#include "inspect/page.hpp"
#include "tool.hpp"

namespace {

using inspect::Json;
using vha::Index;
using vha::checkpoint::Model;

struct Options {
  std::filesystem::path folder;
  std::string format = "table";
  std::filesystem::path html;
  std::vector<Index> layers;
};

void print_premix(const Json& premix) {
  std::printf(
      "\nPremix. |P - I|: distance from the identity; |P - R|: from the nearest rotation R;\n"
      "condition: largest over smallest singular value; |P - P'|: to the nearest and the farthest\n"
      "map of the layer's other groups. Distances are Frobenius norms.\n"
      "layer group   |P - I|   |P - R|  largest sv smallest sv  condition   |P - P'| nearest, "
      "farthest\n");
  bool any_reflection = false;
  for (const Json& layer : premix) {
    const Json& groups = layer["groups"];
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const Json& map = groups[group];
      const Json& condition = map["condition_number"];
      const bool is_reflection = map["nearest_rotation_is_reflection"];
      any_reflection = any_reflection || is_reflection;
      std::printf("%5td %5zu %9.4g %9.4g%s %10.4g %11.4g", layer["layer"].get<Index>(), group,
                  map["distance_from_identity"].get<double>(),
                  map["distance_from_rotation"].get<double>(), is_reflection ? "*" : " ",
                  map["singular_values"].front().get<double>(),
                  map["singular_values"].back().get<double>());
      if (condition.is_null()) {
        std::printf(" %10s", "singular");
      } else {
        std::printf(" %10.4g", condition.get<double>());
      }
      auto others = layer["distances_between_groups"][group].get<std::vector<double>>();
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(group));
      if (others.empty()) {
        std::printf(" %18s %9s\n", "-", "-");
      } else {
        const auto [nearest, farthest] = std::ranges::minmax(others);
        std::printf(" %18.4g %9.4g\n", nearest, farthest);
      }
    }
  }
  if (any_reflection) std::printf("* R includes a reflection: its determinant is -1\n");
}

void print_postmix(const Json& postmix, Index rank, Index query_heads) {
  std::printf(
      "\nPostmix of rank %td. Singular values are those of B A^T = M - I; the effective rank is "
      "exp\n"
      "of their entropy; across groups: that share of the squares of M - I.\n"
      "layer  largest sv  of sum  effective rank  across groups\n",
      rank);
  for (const Json& mixing : postmix) {
    double sum = 0;
    for (const double value : mixing["singular_values"]) sum += value;
    const double largest = mixing["singular_values"].front();
    std::printf("%5td %11.4g %5.1f %% %15.4g %12.1f %%\n", mixing["layer"].get<Index>(), largest,
                sum == 0 ? 0 : 100 * largest / sum, mixing["effective_rank"].get<double>(),
                100 * mixing["cross_group_share"].get<double>());
  }
  if (rank >= query_heads) {
    std::printf("note: a rank of %td or more is full rank for %td heads: M can be any matrix\n",
                query_heads, query_heads);
  }
}

void print_table(const Json& maps) {
  std::printf("%s: %td layers, %td physical heads of %td, %td query heads of %td, %td K/V heads\n",
              vha::checkpoint::detail::printable(maps["model"].get<std::string>()).c_str(),
              maps["layers"].get<Index>(), maps["physical_heads"].get<Index>(),
              maps["physical_head_dim"].get<Index>(), maps["query_heads"].get<Index>(),
              maps["head_dim"].get<Index>(), maps["kv_heads"].get<Index>());
  if (!maps["premix"].is_null()) print_premix(maps["premix"]);
  if (!maps["postmix"].is_null()) {
    print_postmix(maps["postmix"], maps["postmix_rank"], maps["query_heads"]);
  }
}

/// A name in it may be any bytes: what is no UTF-8 is replaced.
std::string dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

void write_page(const std::filesystem::path& path, const Json& maps, const Json& images) {
  Json shown = maps;
  shown["images"] = images;
  const std::string page = inspect::page(dump(shown, -1));
  vha::checkpoint::detail::TemporaryFile file(path, path.string());
  file.write(0, page.data(), page.size());
  file.commit();
}

/// The layers to inspect: all, or those asked for, each once and in order. Throws vha::Error where the
/// model has no such layer.
std::vector<Index> layers_of(const Model& model, std::vector<Index> asked) {
  if (asked.empty()) {
    for (Index layer = 0; layer < model.layers(); ++layer) asked.push_back(layer);
  }
  std::ranges::sort(asked);
  asked.erase(std::unique(asked.begin(), asked.end()), asked.end());
  for (const Index layer : asked) {
    if (layer < 0 || layer >= model.layers()) {
      vha::raise("--layer", vha::text("0 to ", model.layers() - 1), vha::text(layer));
    }
  }
  return asked;
}

void run(const Options& options, const Model& model, const std::vector<Index>& layers) {
  const Json maps = inspect::analyse(model, layers);
  if (!options.html.empty()) write_page(options.html, maps, inspect::images(model, layers));
  if (options.format == "json") {
    std::printf("%s\n", dump(maps, 2).c_str());
  } else {
    print_table(maps);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that grows too large is an error to report
  Options options;
  CLI::App app{
      "Shows what training did to the Premix and Postmix maps of a VHA checkpoint.\n"
      "Exit status: 0 done, 1 there are no maps, or no finite ones, 2 bad arguments or no such "
      "model."};
  app.add_option("CHECKPOINT_DIR", options.folder, "config.json and safetensors, as trained")
      ->required()
      ->check(model_folder);
  const ModelFlags model_flags(app);
  app.add_option("--format", options.format, "what is printed; json has all singular values")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  app.add_option("--html", options.html, "write a page with plots, which needs no network, to FILE")
      ->check([](const std::string& file) {
        // No slip of the command line replaces a config.json.
        return file.ends_with(".html") ? std::string() : "FILE is to end in .html: " + file;
      })
      ->type_name("FILE");
  app.add_option("--layer", options.layers, "these layers alone, from 0 on (default: all)")
      ->type_name("N");
  std::optional<Model> model;
  std::vector<Index> layers;
  check_arguments(app, [&] {
    model.emplace(options.folder, model_flags.options());
    layers = layers_of(*model, options.layers);
  });
  return run_tool(app, "vha_inspect", argc, argv, [&] { run(options, *model, layers); });
}
