// SPDX-License-Identifier: Apache-2.0
// What the tools have in common on their command lines.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <vha/checkpoint/model_config.hpp>
#include <vha/checkpoint/named_tensors.hpp>
#include <vha/core/error.hpp>

/// The flags by which a user tells what a checkpoint's files do not.
class ModelFlags {
 public:
  explicit ModelFlags(CLI::App& app) {
    app.add_option("--layout", layout_, "order of linear weights")
        ->check(CLI::IsMember({"auto", "in-out", "out-in"}))
        ->capture_default_str();
    app.add_option("--fused-order", fused_order_,
                   "a fused qkv_proj is [Q0|K0|V0|Q1|...] by K/V group, or [Q|K|V] by projection")
        ->check(CLI::IsMember({"by-group", "by-projection"}))
        ->capture_default_str();
    app.add_option("--names", names_,
                   "JSON of patterns for other trainers' names, such as "
                   "{\"h.{layer}.wq\": \"layers.{layer}.self_attn.q_proj.weight\"}")
        ->check(CLI::ExistingFile);
  }

  /// Throws vha::Error where the file of names is none.
  vha::checkpoint::ModelOptions options() const {
    using vha::checkpoint::FusedOrder;
    using vha::checkpoint::LinearLayout;
    vha::checkpoint::ModelOptions result;
    if (layout_ != "auto") {
      result.layout = layout_ == "in-out" ? LinearLayout::in_out : LinearLayout::out_in;
    }
    if (fused_order_ == "by-projection") result.fused_order = FusedOrder::by_projection;
    if (!names_.empty()) result.names = vha::checkpoint::TensorNames::from_file(names_);
    return result;
  }

 private:
  std::string layout_ = "auto", fused_order_ = "by-group";
  std::filesystem::path names_;
};

/// Calls `check` once all arguments are parsed: a vha::Error of its is one of bad arguments.
template <class Check>
void check_arguments(CLI::App& app, Check check) {
  app.parse_complete_callback([check] {
    try {
      check();
    } catch (const vha::Error& error) {
      throw CLI::ValidationError(error.what());
    }
  });
}

/// Accepts a model's folder: one with a config.json that can be read.
inline const CLI::Validator model_folder(
    [](const std::string& folder) {
      try {
        const vha::checkpoint::ModelConfig config(std::filesystem::path(folder) / "config.json");
        return std::string();
      } catch (const vha::Error& error) {
        return std::string(error.what());
      }
    },
    "DIR");

/// Parses the arguments. Returns the exit status where the tool is to end at once: 0 after --help, 2
/// after bad arguments, for which one line is printed.
inline std::optional<int> parse_arguments(CLI::App& app, const char* name, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 2;
  }
}

/// Parses the arguments and runs the tool; returns its exit status: 0, or after an error, which is
/// printed in one line, 2 for bad arguments and 1 for any other.
template <class Run>
int run_tool(CLI::App& app, const char* name, int argc, char** argv, const Run& run) {
  if (const auto status = parse_arguments(app, name, argc, argv)) return *status;
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
}
