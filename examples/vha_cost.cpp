// SPDX-License-Identifier: Apache-2.0
// Says what a model costs with each kind of attention: cache, weights, FLOPs, and decode times.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/json_file.hpp>
#include <vha/core/scalar.hpp>
#include <vha/cost/roofline.hpp>
#include <vha/parallel/head_slice.hpp>

#include "cost/features.hpp"
#include "cost/shape.hpp"
#include "cost/variants.hpp"
#include "tool.hpp"

namespace {

using cost::Comparison;
using cost::Index;
using cost::RankCosts;
using cost::Shape;
using cost::Variant;
using cost::Work;
using vha::checkpoint::Json;

struct Options {
  std::string shape_name, dtype = "bf16", format = "table";
  std::filesystem::path config;
  bool features = false;
  Shape told;
  Work work;
  vha::Machine machine;
};

/// A named shape or a configuration, with the sizes that flags give in its place.
Shape chosen_shape(const Options& options) {
  Shape shape;
  if (!options.config.empty()) shape = cost::read_shape(options.config);
  for (const auto& known : cost::known_shapes) {
    if (known.name == options.shape_name) shape = known.shape;
  }
  for (Index Shape::*size :
       {&Shape::layers, &Shape::hidden, &Shape::head_dim, &Shape::query_heads, &Shape::kv_heads,
        &Shape::postmix_rank, &Shape::mla_latent_dim, &Shape::mla_rope_dim, &Shape::gva_rope_dim,
        &Shape::mlp_width, &Shape::experts, &Shape::active_experts}) {
    if (options.told.*size != 0) shape.*size = options.told.*size;
  }
  return cost::complete(shape);
}

double ratio(Index value, Index reference) {
  return static_cast<double>(value) / static_cast<double>(reference);
}

std::string number(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

/// 2129920 as "2,129,920".
std::string grouped(Index value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

/// Of GFLOPs with two decimals, or more where there is little.
std::string gigaflops(Index flops) {
  const double value = static_cast<double>(flops) * 1e-9;
  return number(value, value < 0.1 ? 6 : 2);
}

std::string bytes_text(Index bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return number(value, unit == 0 ? 0 : 1) + " " + units[unit];
}

std::string difference(Index flops, Index reference) {
  if (flops == reference) return "0";
  const std::string size = gigaflops(std::abs(flops - reference));
  return (flops < reference ? "-" : "+") + size;
}

using Table = std::vector<std::vector<std::string>>;

Table table(const Comparison& comparison, const Work& work) {
  const Variant& reference = comparison.variants[comparison.reference];
  Table rows{{"attention", "cache B/token", "x " + reference.name, "cache", "query weights",
              "served", "training", "- " + reference.name, "prefill", "decode", "FLOPs/B",
              "cache > weights"}};
  if (work.machine) rows[0].push_back("ms/step");
  if (work.ranks) {
    for (const char* const title : {"rank's B/token", "exchanged", "as trained"}) {
      rows[0].push_back(title);
    }
  }
  for (const Variant& v : comparison.variants) {
    rows.push_back(
        {v.name, std::to_string(v.cache_bytes_per_token_layer),
         number(ratio(v.cache_bytes_per_token_layer, reference.cache_bytes_per_token_layer), 3),
         bytes_text(v.cache_bytes), grouped(v.query_weights_trained),
         grouped(v.query_weights_served), gigaflops(v.training_flops),
         difference(v.training_flops, reference.training_flops), gigaflops(v.prefill_flops),
         gigaflops(v.decode_flops), number(v.step.intensity(), 2),
         grouped(v.cache_dominates_from)});
    if (v.step_seconds) rows.back().push_back(number(*v.step_seconds * 1e3, 3));
    if (!work.ranks) continue;
    for (Index RankCosts::*cost :
         {&RankCosts::cache_bytes_per_token_layer, &RankCosts::exchanged_as_served,
          &RankCosts::exchanged_as_trained}) {
      rows.back().push_back(v.rank ? std::to_string((*v.rank).*cost) : "-");
    }
  }
  return rows;
}

/// The first column from the left, the others to the right, or of words all from the left.
void print(const Table& rows, bool is_markdown, bool is_words = false) {
  std::vector<std::size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (std::size_t at = 0; at < row.size(); ++at)
      widths[at] = std::max(widths[at], row[at].size());
  }
  const std::string_view between = is_markdown ? " | " : "  ";
  for (std::size_t line = 0; line < rows.size(); ++line) {
    std::string text(is_markdown ? "| " : "");
    for (std::size_t at = 0; at < widths.size(); ++at) {
      const std::string padding(widths[at] - rows[line][at].size(), ' ');
      if (at > 0) text += between;
      text += at == 0 || is_words ? rows[line][at] + padding : padding + rows[line][at];
    }
    std::printf("%s%s\n", text.c_str(), is_markdown ? " |" : "");
    if (line > 0 || !is_markdown) continue;
    std::printf("|");
    for (std::size_t at = 0; at < widths.size(); ++at) {
      const std::string rule(widths[at] + 1, '-');
      std::printf("%s%s|", rule.c_str(), at == 0 || is_words ? "-" : ":");
    }
    std::printf("\n");
  }
}

std::string convention(const Work& work, const char* between) {
  return vha::text(
      "FLOPs: matrix products of attention and MLP, no LM head; training is 3 forwards; ",
      "training and prefill count all of ", work.tokens, " keys.", between, "Decode: batch ",
      work.batch, " behind ", work.context, " cached tokens, ", work.element_bytes,
      " bytes a weight and a cache element.");
}

void print_text(const Comparison& comparison, const Shape& shape, const Work& work,
                bool is_markdown) {
  print(table(comparison, work), is_markdown);
  std::string notes = "\n" + convention(work, "\n") +
                      "\nCache B/token and query weights, trained and served, are one layer's; "
                      "cache is the batch's; training, prefill and\ndecode are GFLOPs per token; "
                      "from \"cache > weights\" cached tokens on, decode reads more cache than "
                      "weights.\n";
  for (const Variant& v : comparison.variants) {
    if (!v.prefill_flops_premix_apart) continue;
    notes += v.name +
             ", with Premix apart in prefill: " + gigaflops(*v.prefill_flops_premix_apart) +
             " GFLOPs per token. ";
  }
  if (comparison.matched_heads) {
    notes += vha::text("MHA of ", *comparison.matched_heads, " heads has ",
                       comparison.variants[comparison.reference].name, "'s attention weights.");
  }
  if (work.ranks) {
    notes += vha::text(
        "\nOver ", *work.ranks,
        " ranks: a rank's cache, and the bytes that it gives to sums over the ranks for each "
        "token and layer, of\nactivations in float: in a forward as it is served and as it is "
        "trained. \"-\" where the ranks do not divide the heads.");
  }
  notes += vha::text("\nMLA: latent ", shape.mla_latent_dim, ", RoPE key ", shape.mla_rope_dim,
                     ". MFA: one K/V head of ", 2 * shape.head_dim, ". GVA: ", shape.kv_heads,
                     " value heads, RoPE key ", shape.gva_rope_dim, ".\n");
  std::fputs(notes.c_str(), stdout);
}

Json json_of(const Variant& v, const Variant& reference) {
  Json json{{"attention", v.name},
            {"cache_bytes_per_token_layer", v.cache_bytes_per_token_layer},
            {"cache_bytes_per_token", v.cache_bytes_per_token},
            {"cache_bytes", v.cache_bytes},
            {"query_weights_trained", v.query_weights_trained},
            {"query_weights_served", v.query_weights_served},
            {"weights_trained", v.weights_trained},
            {"weights_served", v.weights_served},
            {"training_flops", v.training_flops},
            {"prefill_flops", v.prefill_flops},
            {"prefill_flops_premix_apart", nullptr},
            {"decode_flops", v.decode_flops},
            {"cache_ratio", ratio(v.cache_bytes_per_token, reference.cache_bytes_per_token)},
            {"training_ratio", ratio(v.training_flops, reference.training_flops)},
            {"prefill_ratio", ratio(v.prefill_flops, reference.prefill_flops)},
            {"decode_ratio", ratio(v.decode_flops, reference.decode_flops)},
            {"step_weight_bytes", v.step.bytes.weights},
            {"step_cache_bytes", v.step.bytes.cache},
            {"step_flops", v.step.flops},
            {"step_flops_per_byte", v.step.intensity()},
            {"cache_dominates_from", v.cache_dominates_from},
            {"step_seconds", nullptr},
            {"rank_cache_bytes_per_token_layer", nullptr},
            {"rank_weights_served_layer", nullptr},
            {"exchanged_bytes_as_served", nullptr},
            {"exchanged_bytes_as_trained", nullptr},
            {"exchanged_bytes_backward", nullptr}};
  if (v.prefill_flops_premix_apart) {
    json["prefill_flops_premix_apart"] = *v.prefill_flops_premix_apart;
  }
  if (v.step_seconds) json["step_seconds"] = *v.step_seconds;
  if (v.rank) {
    json["rank_cache_bytes_per_token_layer"] = v.rank->cache_bytes_per_token_layer;
    json["rank_weights_served_layer"] = v.rank->weights_served;
    json["exchanged_bytes_as_served"] = v.rank->exchanged_as_served;
    json["exchanged_bytes_as_trained"] = v.rank->exchanged_as_trained;
    if (v.rank->exchanged_backward) {
      json["exchanged_bytes_backward"] = *v.rank->exchanged_backward;
    }
  }
  return json;
}

void print_json(const Comparison& comparison, const Shape& shape, const Work& work) {
  const Variant& reference = comparison.variants[comparison.reference];
  Json json{{"layers", shape.layers},
            {"hidden", shape.hidden},
            {"head_dim", shape.head_dim},
            {"query_heads", shape.query_heads},
            {"kv_heads", shape.kv_heads},
            {"postmix_rank", shape.postmix_rank},
            {"mla_latent_dim", shape.mla_latent_dim},
            {"mla_rope_dim", shape.mla_rope_dim},
            {"gva_rope_dim", shape.gva_rope_dim},
            {"mlp_width", shape.mlp_width},
            {"experts", shape.experts},
            {"active_experts", shape.active_experts},
            {"tokens", work.tokens},
            {"context", work.context},
            {"batch", work.batch},
            {"element_bytes", work.element_bytes},
            {"ranks", work.ranks.value_or(1)},
            {"reference", reference.name},
            {"convention", convention(work, " ")}};
  for (const Variant& v : comparison.variants) json["variants"].push_back(json_of(v, reference));
  std::printf("%s\n", json.dump(2).c_str());
}

/// A header, then a line for each variant; what does not apply is empty.
void print_csv(const Comparison& comparison) {
  const Variant& reference = comparison.variants[comparison.reference];
  std::string header;
  for (const Variant& v : comparison.variants) {
    const Json fields = json_of(v, reference);
    std::string names, line;
    for (const auto& [key, value] : fields.items()) {
      const char* separator = line.empty() ? "" : ",";
      names += separator + key;
      line += separator;
      if (value.is_string()) line += value.get<std::string>();
      if (value.is_number()) line += value.dump();
    }
    if (header.empty()) std::printf("%s\n", (header = names).c_str());
    std::printf("%s\n", line.c_str());
  }
}

void print_features(const std::string& format) {
  const Table rows = cost::features();
  if (format == "table" || format == "markdown") return print(rows, format == "markdown", true);
  Json kinds;
  for (std::size_t line = format == "json" ? 1 : 0; line < rows.size(); ++line) {
    std::string fields;
    Json kind;
    for (std::size_t at = 0; at < rows[line].size(); ++at) {
      fields += (at == 0 ? "\"" : ",\"") + rows[line][at] + "\"";
      kind[rows[0][at]] = rows[line][at];
    }
    if (format == "csv") std::printf("%s\n", fields.c_str());
    kinds.push_back(std::move(kind));
  }
  if (format == "json") std::printf("%s\n", kinds.dump(2).c_str());
}

void run(const Options& options, const Shape& shape) {
  if (options.features) return print_features(options.format);
  const Comparison comparison = cost::compare(shape, options.work);
  if (options.format == "json") {
    print_json(comparison, shape, options.work);
  } else if (options.format == "csv") {
    print_csv(comparison);
  } else {
    print_text(comparison, shape, options.work, options.format == "markdown");
  }
}

void require_rate(const char* flag, double rate) {
  if (!vha::is_finite(rate) || rate <= 0) vha::raise(flag, "a number above 0", vha::text(rate));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  Shape shape;
  CLI::App app{
      "Says what a model costs with each kind of attention: cache, query weights, FLOPs per token, "
      "and a decode step by the roofline.\n"
      "Exit status: 0 done, 2 bad arguments."};
  const auto add_size = [&](const char* flag, Index& size, const char* help) {
    return app.add_option(flag, size, help)->check(CLI::Range(Index{1}, Index{1} << 40));
  };
  auto* const named = app.add_option("--shape", options.shape_name, "one of the paper's models")
                          ->check(CLI::IsMember({"0.6B", "1.7B", "4B", "30B-A3B"}));
  app.add_option("--config", options.config, "config.json of a Qwen3 model, with or without VHA")
      ->type_name("FILE")
      ->excludes(named);
  add_size("--layers", options.told.layers, "of the model");
  add_size("--hidden", options.told.hidden, "channels of the model");
  add_size("--head-dim", options.told.head_dim, "channels of a head, even; else 128");
  add_size("--query-heads", options.told.query_heads, "that attend; of VHA its virtual heads");
  add_size("--kv-heads", options.told.kv_heads, "of VHA and GVA; else 2");
  add_size("--postmix-rank", options.told.postmix_rank, "of VHA; else query heads / 4");
  add_size("--mla-latent", options.told.mla_latent_dim,
           "channels of MLA's latent; else 4 head_dim");
  add_size("--mla-rope", options.told.mla_rope_dim, "of MLA's shared key; else half head_dim");
  add_size("--gva-rope", options.told.gva_rope_dim,
           "of GVA's shared key; else 16, at most half head_dim");
  add_size("--mlp", options.told.mlp_width, "channels of the MLP, or of one expert");
  add_size("--experts", options.told.experts, "of each layer; else 1");
  add_size("--active-experts", options.told.active_experts, "that a token uses; else 1");
  add_size("--tokens", options.work.tokens, "of a sequence in training and prefill")
      ->capture_default_str();
  add_size("--batch", options.work.batch, "sequences that decode together")->capture_default_str();
  add_size("--context", options.work.context, "cached tokens of each of them")
      ->capture_default_str();
  app.add_option("--dtype", options.dtype, "of weights and cache")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str();
  auto* const bandwidth = app.add_option("--machine-bandwidth", options.machine.bandwidth,
                                         "bytes/s read, such as 3.35e12");
  auto* const flops =
      app.add_option("--machine-flops", options.machine.flops, "FLOP/s of products, such as 9.9e14")
          ->needs(bandwidth);
  bandwidth->needs(flops);
  Index ranks = 1;
  auto* const tensor_parallel =
      add_size("--tensor-parallel", ranks, "ranks that share out each layer's heads");
  app.add_flag("--features", options.features,
               "show what each kind of attention is and can do, in place of costs");
  app.add_option("--format", options.format, "what is printed; json and csv have all digits")
      ->check(CLI::IsMember({"table", "markdown", "csv", "json"}))
      ->capture_default_str();
  check_arguments(app, [&] {
    if (options.features) return;
    shape = chosen_shape(options);
    Work& work = options.work;
    work.element_bytes = options.dtype == "f32" ? 4 : 2;
    if (bandwidth->count() > 0) {
      require_rate("--machine-bandwidth", options.machine.bandwidth);
      require_rate("--machine-flops", options.machine.flops);
      work.machine = options.machine;
    }
    if (tensor_parallel->count() > 0) {
      vha::require_even_split("--tensor-parallel", shape.query_heads, shape.kv_heads, ranks);
      work.ranks = ranks;
    }
    cost::require_countable(shape, std::max(work.tokens, work.context + 1), work.batch);
  });
  return run_tool(app, "vha_cost", argc, argv, [&] { run(options, shape); });
}
