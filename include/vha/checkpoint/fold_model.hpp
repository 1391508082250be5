// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <vha/checkpoint/linear_source.hpp>
#include <vha/checkpoint/model.hpp>
#include <vha/checkpoint/safetensors_writer.hpp>
#include <vha/vha.hpp>

namespace vha::checkpoint {

/// The stock model that a VHA model folds to, tensor by tensor, none of them made before it is asked
/// for. Holds references: the model must live as long.
class FoldedModel {
 public:
  /// `dtype` is what all floating-point tensors are stored as; by default each stays what it is.
  /// @throws vha::Error where the model is no VHA model, or a tensor has no place in a stock one.
  explicit FoldedModel(const Model& model, std::optional<Dtype> dtype = {})
      : model_(model), dtype_(dtype) {
    if (!model.is_vha()) {
      raise(model.tensors().folder().string(), "Premix or Postmix maps in its layers",
            "none: it is a stock model, or its maps have other names");
    }
    for (const std::string& name : model.names()) add(name);
  }

  /// In the order of the input's; each may be asked for its bytes any number of times, several at a
  /// time.
  const std::vector<StreamedTensor>& tensors() const { return tensors_; }

  Json config() const {
    const auto& sizes = model_.sizes();
    const LinearSource query = model_.linear(0, "self_attn.q_proj", "weight");
    return model_.config().folded(sizes.query_heads, sizes.kv_heads, sizes.head_dim,
                                  torch_name(stored(query.dtype())));
  }

  Metadata metadata() const {
    Metadata metadata = model_.tensors().metadata();
    metadata["format"] = "pt";
    return metadata;
  }

  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& tensor : tensors_) sum += *detail::tensor_bytes(tensor.dtype, tensor.shape);
    return sum;
  }

 private:
  static std::string_view torch_name(Dtype dtype) {
    return dtype == Dtype::f32 ? "float32" : dtype == Dtype::f16 ? "float16" : "bfloat16";
  }

  Dtype stored(Dtype source) const { return dtype_.value_or(source); }

  void add(const std::string& name) {
    const auto in_layer = layer_tensor(name);
    if (!in_layer) return add_alone(name);
    const Index layer = in_layer->layer;
    const std::string_view part = in_layer->part;
    if (Model::is_map(part)) return;
    const auto dot = name.rfind('.');
    const std::string module = name.substr(0, dot), kind = name.substr(dot + 1);
    const auto parent = module.substr(0, module.rfind('.') + 1);
    if (module.ends_with(".qkv_proj")) {
      add_query(layer, kind);
      add_linear(parent + "k_proj", kind);
      add_linear(parent + "v_proj", kind);
    } else if (module.ends_with(".up_gate_proj")) {
      add_linear(parent + "gate_proj", kind);
      add_linear(parent + "up_proj", kind);
    } else if (part.starts_with("self_attn.q_proj.")) {
      add_query(layer, kind);
    } else if (part == "self_attn.o_proj.weight" && model_.sizes().has_postmix()) {
      add_output(layer);
    } else {
      add_alone(name);
    }
  }

  void add_alone(const std::string& name) {
    if (Model::is_linear(name)) {
      return add_linear(name.substr(0, name.rfind('.')), "weight");
    }
    const TensorView& tensor = model_.at(name);
    // A norm, a bias or the embedding: row by row as it stands.
    const Index width = tensor.shape.back();
    const Index rows = tensor.shape.size() == 2 ? tensor.shape.front() : 1;
    add_moved(name, tensor.shape, LinearSource(LinearLayout::out_in, width, {{&tensor, 0, rows}}));
  }

  void add_linear(const std::string& module, const std::string& kind) {
    const LinearSource source = model_.linear(module, kind);
    add_moved(module + '.' + kind, shape_of(source, kind), source);
  }

  static std::vector<std::int64_t> shape_of(const LinearSource& source, const std::string& kind) {
    if (kind == "bias") return {source.out()};
    return {source.out(), source.in()};
  }

  /// A tensor whose elements stay what they are, but for their order and their type.
  void add_moved(const std::string& name, std::vector<std::int64_t> shape, LinearSource source) {
    const Dtype from = source.dtype(), to = stored(from);
    add_streamed(name, to, std::move(shape), [this, source, from, to](const ByteSink& sink) {
      const auto piece = [&](const std::byte* data, std::size_t size) {
        convert_bytes(source.name(), from, to, data, size, sink);
      };
      if (source.layout() == LinearLayout::in_out) {
        source.write_out_in(piece);
        return forget(source);
      }
      const auto channel = static_cast<std::size_t>(source.in()) * dtype_size(from);
      for (const auto& part : source.parts()) {
        model_.tensors().read(*part.tensor, static_cast<std::size_t>(part.first) * channel,
                              static_cast<std::size_t>(part.count) * channel, piece);
      }
    });
  }

  void add_query(Index layer, const std::string& kind) {
    const auto source = model_.linear(layer, "self_attn.q_proj", kind);
    const std::string name = Model::layer_name(layer, "self_attn.q_proj.") + kind;
    if (!model_.sizes().has_premix) return add_moved(name, shape_of(source, kind), source);
    const Index out = model_.sizes().query_heads * model_.sizes().head_dim;
    std::vector<std::int64_t> shape{out, source.in()};
    if (kind == "bias") shape.pop_back();
    add_folded(name, std::move(shape), source, [this, layer, source]<class To, class S>(To, S) {
      return folded_query<To>(source.name(), source.weight<S>(), model_.premix_maps<float>(layer));
    });
  }

  void add_output(Index layer) {
    const auto source = model_.linear(layer, "self_attn.o_proj", "weight");
    add_folded(Model::layer_name(layer, "self_attn.o_proj.weight"), shape_of(source, "weight"),
               source, [this, layer, source]<class To, class S>(To, S) {
                 return folded_output<To>(source.name(), source.weight<S>(),
                                          model_.postmix<float>(layer).dense());
               });
  }

  /// Summed wide and rounded once, to the type that it is stored in.
  template <class Fold>
  void add_folded(const std::string& name, std::vector<std::int64_t> shape,
                  const LinearSource& source, Fold fold) {
    const Dtype to = stored(source.dtype());
    add_streamed(name, to, std::move(shape), [this, source, to, fold](const ByteSink& sink) {
      with_scalar(to, [&](auto scalar) {
        const auto folded = with_scalar(
            source.dtype(), [&](auto source_scalar) { return fold(scalar, source_scalar); });
        forget(source);
        const TensorView view{{},
                              to,
                              {folded.rows(), folded.cols()},
                              reinterpret_cast<const std::byte*>(folded.data()),
                              static_cast<std::size_t>(folded.size()) * sizeof(scalar)};
        LinearSource(LinearLayout::in_out, folded.rows(), {{&view, 0, folded.cols()}})
            .write_out_in(sink);
      });
    });
  }

  void add_streamed(const std::string& name, Dtype dtype, std::vector<std::int64_t> shape,
                    std::function<void(const ByteSink&)> write) {
    tensors_.push_back(
        {TensorNames::hugging_face(name), dtype, std::move(shape), std::move(write)});
  }

  void forget(const LinearSource& source) const {
    for (const auto& part : source.parts()) model_.tensors().forget(*part.tensor);
  }

  /// Whole elements of `from`, each rounded once to `to`.
  static void convert_bytes(const std::string& name, Dtype from, Dtype to, const std::byte* data,
                            std::size_t size, const ByteSink& sink) {
    if (from == to) return sink(data, size);
    with_scalar(from, [&](auto from_scalar) {
      with_scalar(to, [&](auto to_scalar) {
        using From = decltype(from_scalar);
        using To = decltype(to_scalar);
        std::vector<To> converted(size / sizeof(From));
        for (std::size_t k = 0; k < converted.size(); ++k) {
          const From value = load<From>(data + k * sizeof(From));
          converted[k] = convert<To>(value);
          if (!is_finite(converted[k]) && is_finite(value)) {
            raise(detail::printable(name),
                  "elements in the range of " + std::string(dtype_name(to)),
                  text(static_cast<double>(value)));
          }
        }
        sink(reinterpret_cast<const std::byte*>(converted.data()), converted.size() * sizeof(To));
      });
    });
  }

  const Model& model_;
  std::optional<Dtype> dtype_;
  std::vector<StreamedTensor> tensors_;
};

/// What training did to a layer's maps.
struct MapsReport {
  double premix_distance = 0;    ///< the largest ‖P_g - I‖_F of the groups
  double cross_group_share = 0;  ///< of the sum of squares of M - I, what joins heads of two groups
};

/// Precondition: a layer of the model.
inline MapsReport maps_report(const Model& model, Index layer) {
  MapsReport report;
  const auto& sizes = model.sizes();
  if (sizes.has_premix) {
    for (const auto& map : model.premix_maps<float>(layer)) {
      report.premix_distance = std::max(report.premix_distance, distance_from_identity(map));
    }
  }
  if (sizes.has_postmix()) {
    const auto change = postmix_change(model.postmix<float>(layer));
    report.cross_group_share = cross_group_share(change, sizes.kv_heads);
  }
  return report;
}

/// Runs a layer of a VHA model and of its fold on the same 32 random tokens, in float.
inline FoldReport compare_layers(const Model& model, const Model& folded, Index layer,
                                 const Executor& executor = {}) {
  constexpr Index tokens = 32;
  RowMajorMatrix<float> x(tokens, model.sizes().hidden);
  NormalGenerator normal(static_cast<std::uint64_t>(layer) + 1);
  for (Index k = 0; k < x.size(); ++k) x.data()[k] = static_cast<float>(normal());
  RowMajorMatrix<float> expected, actual;
  const auto run = [&](const Model& of, RowMajorMatrix<float>& out) {
    of.with_layer<float>(layer,
                         [&](const auto& attention) { out = attention.forward(x, {}, executor); });
    of.forget_layer(layer);
  };
  run(model, expected);
  run(folded, actual);
  try {
    return compare_outputs(expected, actual);
  } catch (const Error& error) {
    throw Error(text(model.tensors().folder().string(), ": layer ", layer, ": ", error.what()));
  }
}

}  // namespace vha::checkpoint
