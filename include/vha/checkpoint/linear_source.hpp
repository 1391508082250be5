// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>
#include <vha/checkpoint/dtype.hpp>
#include <vha/checkpoint/message_text.hpp>
#include <vha/checkpoint/tensor_view.hpp>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>
#include <vha/core/view.hpp>
#include <vha/core/weight.hpp>

// Projections as they stand in a checkpoint: `[in, out]` or `[out, in]`, alone or fused with others
// along the output.

namespace vha::checkpoint {

/// The order of a linear layer's weight in its file.
enum class LinearLayout {
  out_in,  ///< nn.Linear's, and Hugging Face's
  in_out,  ///< Paddle's
};

/// The type whose bits a floating-point tensor holds; U16 is how Paddle writes bfloat16.
/// @throws vha::Error for any other, naming `label`.
inline Dtype floating_dtype(const std::string& label, Dtype dtype) {
  if (dtype == Dtype::u16) return Dtype::bf16;
  if (dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16) return dtype;
  raise(label, "F32, BF16, F16, or U16 for BF16 (a quantised or integer weight does not fold)",
        std::string(dtype_name(dtype)));
}

/// Calls `body` with an object of the scalar that `dtype` names. Precondition: of floating_dtype.
template <class Body>
decltype(auto) with_scalar(Dtype dtype, Body&& body) {
  if (dtype == Dtype::f32) return body(float());
  if (dtype == Dtype::f16) return body(half());
  return body(bfloat16());
}

/// Output channels [first, first + count) of a tensor.
struct OutputChannels {
  const TensorView* tensor;
  Index first;
  Index count;
};

/// A weight matrix `[in, out]`, or a bias (in = 1), put together from ranges of output channels.
class LinearSource {
 public:
  LinearSource() = default;
  /// Precondition: one type and one input width for all.
  LinearSource(LinearLayout layout, Index in, std::vector<OutputChannels> parts)
      : layout_(layout), in_(in), parts_(std::move(parts)) {
    for (const auto& part : parts_) out_ += part.count;
  }

  LinearLayout layout() const { return layout_; }
  bool empty() const { return parts_.empty(); }
  Index in() const { return in_; }
  Index out() const { return out_; }
  Dtype dtype() const {
    return floating_dtype(detail::printable(name()), parts_.front().tensor->dtype);
  }
  const std::string& name() const { return parts_.front().tensor->name; }
  const std::vector<OutputChannels>& parts() const { return parts_; }

  /// As a weight stored as `S`: in place where it is one range of that type, else a copy.
  template <StorageScalar S>
  Weight<S> weight() const {
    if (empty()) return {};
    return with_scalar(dtype(), [&](auto scalar) -> Weight<S> {
      using From = decltype(scalar);
      if (parts_.size() == 1) return part_weight<From>(parts_.front()).template cast<S>();
      RowMajorMatrix<S> matrix(in_, out_);
      Index col = 0;
      for (const auto& part : parts_) {
        const auto columns = part_weight<From>(part).template cast<S>();
        matrix.middleCols(col, part.count) = columns.template to<S>();
        col += part.count;
      }
      return Weight<S>::own(std::move(matrix));
    });
  }

  /// Gives the bytes of the matrix `[out, in]` to `sink`, some rows at a time, its elements as they
  /// are.
  template <class Sink>
  void write_out_in(const Sink& sink) const {
    if (empty()) return;
    with_scalar(dtype(), [&]<class S>(S) {
      for (const auto& part : parts_) write_part<S>(part, sink);
    });
  }

 private:
  /// The elements between one output channel and the next, and between one input and the next.
  std::pair<Index, Index> strides(const OutputChannels& part) const {
    if (layout_ == LinearLayout::out_in) return {in_, 1};
    return {1, part.tensor->shape.back()};
  }

  template <StorageScalar S>
  Weight<S> part_weight(const OutputChannels& part) const {
    const auto [out_stride, in_stride] = strides(part);
    const auto offset = static_cast<std::size_t>(part.first * out_stride) * sizeof(S);
    return Weight<S>::view(part.tensor->data + offset, in_, part.count, in_stride, out_stride);
  }

  template <StorageScalar S, class Sink>
  void write_part(const OutputChannels& part, const Sink& sink) const {
    if (in_ == 0) return;
    constexpr Index elements_at_once = (Index(1) << 20) / static_cast<Index>(sizeof(S));
    const auto [out_stride, in_stride] = strides(part);
    const std::byte* const data = part.tensor->data;
    const Index rows_at_once = std::max<Index>(elements_at_once / in_, 1);
    std::vector<S> rows(static_cast<std::size_t>(std::min(rows_at_once, part.count) * in_));
    for (Index first = 0; first < part.count; first += rows_at_once) {
      const Index count = std::min(rows_at_once, part.count - first);
      const MatrixView<S> channels{data, part.first + part.count, in_, out_stride, in_stride};
      copy_elements(channels.block(part.first + first, 0, count, in_), rows.data());
      sink(reinterpret_cast<const std::byte*>(rows.data()),
           static_cast<std::size_t>(count * in_) * sizeof(S));
    }
  }

  LinearLayout layout_ = LinearLayout::out_in;
  Index in_ = 0;
  Index out_ = 0;
  std::vector<OutputChannels> parts_;
};

}  // namespace vha::checkpoint
