// SPDX-License-Identifier: Apache-2.0
// make_variants SAMPLES FOLDER: writes variants of the samples into an empty FOLDER, for the tests
// of the tools.
#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <vector>
#include <vha/checkpoint/linear_source.hpp>
#include <vha/checkpoint/safetensors_writer.hpp>
#include <vha/checkpoint/sharded_tensors.hpp>

namespace {

namespace fs = std::filesystem;
using namespace vha::checkpoint;

/// A sample's tensors, some of them changed.
class Variant {
 public:
  explicit Variant(const fs::path& sample)
      : config(read_json(sample / "config.json")), sample_(sample) {
    for (const TensorView* const tensor : sample_.tensors()) tensors.push_back(*tensor);
  }

  /// Stores a tensor's elements, each made another by `change`, as `To`.
  template <class To>
  void store(TensorView& tensor, Dtype dtype, const std::function<float(float)>& change) {
    std::string& bytes = bytes_.emplace_back();
    with_scalar(floating_dtype(tensor.name, tensor.dtype), [&]<class From>(From) {
      for (std::size_t at = 0; at < tensor.bytes; at += sizeof(From)) {
        const float value = vha::convert<float>(vha::load<From>(tensor.data + at));
        const To changed = vha::convert<To>(change(value));
        bytes.append(reinterpret_cast<const char*>(&changed), sizeof changed);
      }
    });
    tensor.dtype = dtype;
    tensor.data = reinterpret_cast<const std::byte*>(bytes.data());
    tensor.bytes = bytes.size();
  }

  void write(const fs::path& folder) const {
    fs::create_directories(folder);
    std::ofstream(folder / "config.json") << config.dump(2);
    write_safetensors(folder / "model.safetensors", tensors);
  }

  Json config;
  std::vector<TensorView> tensors;

 private:
  ShardedTensors sample_;
  std::list<std::string> bytes_;
};

float same(float value) {
  return value;
}

/// Maps whose large numbers cancel where the heads of a group see the same, as they do without any
/// query: rounded to bfloat16, the folded W_O is that of another model.
void write_cancelling(const fs::path& samples, const fs::path& folder) {
  Variant cancelling(samples / "hf-bf16");
  for (TensorView& tensor : cancelling.tensors) {
    if (tensor.name.ends_with("q_norm.weight")) {
      cancelling.store<vha::bfloat16>(tensor, Dtype::bf16, [](float) { return 0.0F; });
    } else if (tensor.name.ends_with("vha_postmix_U")) {
      int element = 0;  // of [heads, 2]
      cancelling.store<vha::bfloat16>(tensor, Dtype::bf16, [element](float) mutable {
        return element++ / 2 % 2 == 0 ? 1000.0F : -1000.0F;
      });
    }
  }
  cancelling.write(folder);
}

/// All float32 but for one W_Q, which is bfloat16 or holds the same numbers.
void write_mixed(const fs::path& samples, const fs::path& folder, bool is_mixed) {
  Variant mixed(samples / "hf-f32");
  for (TensorView& tensor : mixed.tensors) {
    if (!tensor.name.ends_with("layers.0.self_attn.q_proj.weight")) continue;
    mixed.store<vha::bfloat16>(tensor, Dtype::bf16, same);
    if (!is_mixed) mixed.store<float>(tensor, Dtype::f32, same);
  }
  mixed.write(folder);
}

/// As many tokens as channels, and a head.
void write_square_head(const fs::path& samples, const fs::path& folder) {
  Variant square(samples / "paddle-separate-f32");
  square.config["vocab_size"] = 64;
  square.config["tie_word_embeddings"] = false;
  for (TensorView& tensor : square.tensors) {
    if (tensor.name.find("embed_tokens") == std::string::npos) continue;
    tensor.shape = {64, 64};
    tensor.bytes = 64 * 64 * sizeof(float);
    TensorView head = tensor;
    head.name = "lm_head.weight";
    square.tensors.push_back(head);
    break;
  }
  square.write(folder);
}

/// A model beside which there is more.
void write_furnished(const fs::path& samples, const fs::path& folder) {
  Variant(samples / "hf-bf16").write(folder);
  for (const std::string_view name :
       {"pytorch_model.bin", "pytorch_model.bin.index.json", "model-q4.gguf", "tokenizer.json"}) {
    std::ofstream(folder / name) << name;
  }
  fs::create_directory(folder / "figures");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "make_variants SAMPLES FOLDER\n");
    return 2;
  }
  const fs::path samples = argv[1], folder = argv[2];
  try {
    fs::remove_all(folder);
    write_cancelling(samples, folder / "cancelling");
    write_mixed(samples, folder / "mixed", true);
    write_mixed(samples, folder / "mixed-as-f32", false);
    write_square_head(samples, folder / "square-head");
    write_furnished(samples, folder / "furnished");
    fs::create_directory(folder / "none");  // where nothing may be left
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "make_variants: %s\n", error.what());
    return 1;
  }
}
