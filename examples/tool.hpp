// SPDX-License-Identifier: Apache-2.0
// What the tools that read whole models have in common on their command lines.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vha/checkpoint/named_tensors.hpp>

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

/// Parses the arguments and runs the tool; returns its exit status: 0, 1 after an error, which is
/// printed in one line, or 2 for bad arguments.
template <class Run>
int run_tool(CLI::App& app, const char* name, int argc, char** argv, const Run& run) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
}
