// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tests of known faults share. Results are compared by their bits, so that the checks hold
// under -ffast-math, where NaN compares as it likes.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>
#include <vha/vha.hpp>

#include "error_of.hpp"
#include "random.hpp"

namespace faults {

using laws::Random;
using vha::Index;
using vha::Position;
using vha::RowMajorMatrix;
using vha::Weight;

using Scalars = testing::Types<double, float, vha::bfloat16, vha::half>;

template <class S>
inline const S nan_of = std::numeric_limits<S>::quiet_NaN();

/// The text of the Error that `call` throws.
using support::error_of;

/// Success where `call` throws an Error whose text has all `parts`: the argument, what was expected
/// and what came.
testing::AssertionResult refuses(const auto& call, std::initializer_list<std::string_view> parts) {
  const std::string message = error_of(call);
  for (const auto part : parts) {
    if (message.find(part) == std::string::npos) {
      return testing::AssertionFailure() << '"' << part << "\" is not in \"" << message << '"';
    }
  }
  return testing::AssertionSuccess();
}

template <class S>
auto bits(S value) {
  if constexpr (sizeof(S) == 8) return std::bit_cast<std::uint64_t>(value);
  if constexpr (sizeof(S) == 4) return std::bit_cast<std::uint32_t>(value);
  if constexpr (sizeof(S) == 2) return std::bit_cast<std::uint16_t>(value);
}

/// Success where two runs of memory have as many elements, with the same bits. For vectors, and for
/// Eigen's matrices and tensors of one storage order.
template <class A, class B>
testing::AssertionResult same_bits(const A& actual, const B& expected) {
  const auto count = static_cast<std::size_t>(actual.size());
  if (count != static_cast<std::size_t>(expected.size())) {
    return testing::AssertionFailure() << count << " elements, not " << expected.size();
  }
  for (std::size_t k = 0; k < count; ++k) {
    if (bits(actual.data()[k]) == bits(expected.data()[k])) continue;
    return testing::AssertionFailure()
           << "element " << k << " is " << actual.data()[k] << ", not " << expected.data()[k];
  }
  return testing::AssertionSuccess();
}

/// The largest difference of two results of one shape; not to be asked of NaN.
template <class A, class B>
double largest_difference(const A& actual, const B& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double largest = 0;
  for (Index k = 0; k < static_cast<Index>(actual.size()); ++k) {
    EXPECT_TRUE(vha::is_finite(actual.data()[k])) << "element " << k;
    largest = std::max(largest, std::abs(static_cast<double>(actual.data()[k]) -
                                         static_cast<double>(expected.data()[k])));
  }
  return largest;
}

template <class S>
RowMajorMatrix<S> matrix(Index rows, Index cols, const std::vector<double>& values) {
  EXPECT_EQ(static_cast<Index>(values.size()), rows * cols);
  RowMajorMatrix<S> result(rows, cols);
  for (Index k = 0; k < result.size(); ++k) {
    result.data()[k] = vha::convert<S>(values[static_cast<std::size_t>(k)]);
  }
  return result;
}

template <class S>
Weight<S> weight(Index rows, Index cols, const std::vector<double>& values) {
  return Weight<S>::own(matrix<S>(rows, cols, values));
}

template <class S>
RowMajorMatrix<S> random_matrix(Index rows, Index cols, Random& random, double scale = 1) {
  return matrix<S>(rows, cols, random.values<S>(static_cast<std::size_t>(rows * cols), scale));
}

/// The row-major elements of a weight in double.
template <class S>
std::vector<double> elements(const Weight<S>& weight) {
  std::vector<double> result(static_cast<std::size_t>(weight.size()));
  weight.copy_to(result.data());
  return result;
}

/// The elements as they stand in a row-major `[out, in]` file.
template <class S>
std::vector<double> out_in(const Weight<S>& weight) {
  return elements(Weight<double>::own(weight.template to<double>().transpose()));
}

inline std::vector<Position> counted(Index count, Position first = 0) {
  std::vector<Position> positions(static_cast<std::size_t>(count));
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

/// A VHA layer of random weights: Premix neither symmetric nor near the identity, Postmix that mixes
/// all heads, biases everywhere.
template <class Layer>
Layer random_layer(const vha::AttentionConfig& config, Random& random, bool qk_norm = true) {
  using S = typename Layer::Scalar;
  const Index d = config.head_dim, heads = config.query_heads;
  const auto linear = [&](Index in, Index out) {
    const double scale = 2 / std::sqrt(static_cast<double>(in));
    vha::Linear<S> result{Weight<S>::own(random_matrix<S>(in, out, random, scale))};
    result.bias = Weight<S>::own(random_matrix<S>(1, out, random));
    return result;
  };
  typename Layer::Weights w;
  w.key = linear(config.hidden, config.kv_width());
  w.value = linear(config.hidden, config.kv_width());
  w.output = linear(config.query_width(), config.hidden);
  if (qk_norm) {
    w.q_norm = weight<S>(1, d, random.values<S>(static_cast<std::size_t>(d), 0.5, 1));
    w.k_norm = weight<S>(1, d, random.values<S>(static_cast<std::size_t>(d), 0.5, 1));
  }
  if constexpr (Layer::Weights::has_premix) {
    w.query = linear(config.hidden, config.group_size() * d);
    for (Index group = 0; group < config.kv_heads; ++group) {
      w.premix.maps.push_back(linear(d, d).weight);
    }
  } else {
    w.query = linear(config.hidden, config.query_width());
  }
  if constexpr (Layer::Weights::has_postmix) {
    w.postmix.a = linear(heads, 2).weight;
    w.postmix.b = linear(heads, 2).weight;
  }
  return Layer(config, std::move(w));
}

/// The operands of the attention core, for one sequence; heads token by token.
template <class S>
struct Core {
  Index groups = 1, group_size = 1, head_dim = 1, value_dim = 1;
  std::vector<Position> query_positions = {}, key_positions = {};
  std::vector<S> query = {}, key = {}, value = {};
  Index window = 0;
  double scale = 1;

  Index tokens() const { return static_cast<Index>(query_positions.size()); }
  Index keys() const { return static_cast<Index>(key_positions.size()); }

  void fill(Random& random) {
    const auto values = [&](Index count) {
      std::vector<S> result;
      for (const double x : random.values<S>(static_cast<std::size_t>(count))) {
        result.push_back(vha::convert<S>(x));
      }
      return result;
    };
    query = values(tokens() * groups * group_size * head_dim);
    key = values(keys() * groups * head_dim);
    value = values(keys() * groups * value_dim);
  }

  /// The result, in memory that was NaN before.
  template <class O = S>
  std::vector<O> run() const {
    const Index heads = groups * group_size;
    std::vector<O> out(static_cast<std::size_t>(tokens() * heads * value_dim), nan_of<O>);
    vha::CausalAttentionWorkspace<vha::Compute<S>> workspace;
    vha::causal_attention(
        vha::token_major_heads(query.data(), tokens(), groups, group_size, head_dim),
        vha::token_major_heads(key.data(), keys(), groups, 1, head_dim),
        vha::token_major_heads(value.data(), keys(), groups, 1, value_dim),
        std::span<const Position>(query_positions), std::span<const Position>(key_positions),
        {scale, {window}},
        vha::token_major_heads(out.data(), tokens(), groups, group_size, value_dim), workspace);
    return out;
  }
};

}  // namespace faults
