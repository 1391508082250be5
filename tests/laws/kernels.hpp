// SPDX-License-Identifier: Apache-2.0
// The matrix product and the attention core against plain loops in double, for every type that they
// multiply in. Compiled for several processors, so that each path of the kernels is run.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>
#include <vha/attention/causal_attention.hpp>
#include <vha/ops/matrix_product.hpp>

namespace {

using vha::bfloat16;
using vha::Index;
using vha::Position;

/// Numbers in [-1, 1) that bfloat16 holds exactly.
template <class S>
std::vector<S> numbers(Index count, std::uint32_t seed) {
  std::vector<S> result(static_cast<std::size_t>(count));
  for (S& value : result) {
    seed = seed * 1664525U + 1013904223U;
    value = vha::convert<S>(static_cast<float>(static_cast<int>(seed >> 24) - 128) / 128.0F);
  }
  return result;
}

template <class S>
double wide(S value) {
  return vha::convert<double>(value);
}

template <class T>
class Kernel : public testing::Test {};
using Operands = testing::Types<double, float, bfloat16>;
TYPED_TEST_SUITE(Kernel, Operands);

template <class T, class A, class B>
void check_product(Index rows, Index depth, Index cols, bool a_turned, bool b_turned) {
  SCOPED_TRACE(testing::Message() << rows << 'x' << depth << 'x' << cols << " turned " << a_turned
                                  << b_turned << " bytes " << sizeof(A) << sizeof(B));
  const auto a = numbers<A>(rows * depth, 1);
  const auto b = numbers<B>(depth * cols, 2);
  const auto view = [](const auto& data, Index r, Index c, bool turned) {
    return turned ? vha::row_major_view(data.data(), c, r, r).transposed()
                  : vha::row_major_view(data.data(), r, c, c);
  };
  const auto a_view = view(a, rows, depth, a_turned);
  const auto b_view = view(b, depth, cols, b_turned);
  vha::ProductWorkspace<T> workspace;
  const Index stride = cols + 3;
  std::vector<vha::Compute<T>> c(static_cast<std::size_t>(rows * stride), 1);
  const auto multiply = [&](bool accumulate) {
    vha::multiply<T>(a_view, b_view, c.data(), stride, accumulate, workspace);
  };
  const double limit = 4.0 * static_cast<double>(depth) *
                       static_cast<double>(std::numeric_limits<vha::Compute<T>>::epsilon());
  for (const double times : {1.0, 2.0}) {
    multiply(times == 2);
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < stride; ++j) {
        double expected = 1;
        if (j < cols) {
          expected = 0;
          for (Index k = 0; k < depth; ++k)
            expected += times * wide(a_view(i, k)) * wide(b_view(k, j));
        }
        ASSERT_NEAR(wide(c[static_cast<std::size_t>(i * stride + j)]), expected, limit)
            << i << ' ' << j;
      }
    }
  }
}

TYPED_TEST(Kernel, ProductIsTheSumOfProducts) {
  using T = TypeParam;
  for (const Index rows : {1, 2, 3, 8, 14, 15, 33}) {
    for (const Index depth : {1, 2, 7, 32, 65, 300}) {
      for (const Index cols : {1, 5, 16, 31, 64, 150, 288}) {
        check_product<T, T, T>(rows, depth, cols, false, false);
        check_product<T, T, T>(rows, depth, cols, false, true);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
  for (const Index rows : {0, 1, 16, 17}) {
    for (const Index depth : {96, 544, 1056}) {
      check_product<T, T, T>(rows, depth, 70, false, false);
      check_product<T, T, T>(rows, depth, 70, false, true);
    }
  }
  check_product<T, T, T>(600, 70, 40, true, false);
  check_product<T, T, T>(30, 1100, 2100, false, true);
  for (const bool turned : {false, true}) {
    for (const Index rows : {2, 20}) {
      check_product<T, float, bfloat16>(rows, 66, 70, false, turned);
      check_product<T, bfloat16, float>(rows, 66, 70, false, turned);
      check_product<T, vha::half, double>(rows, 66, 70, false, turned);
    }
  }
}

// Whichever tiles hold it, and wherever in them it stands.
TYPED_TEST(Kernel, ARowHasTheSameBitsAmongAnyOthers) {
  using T = TypeParam;
  constexpr Index rows = 40, cols = 70;
  for (const Index depth : {33, 96, 544}) {
    for (const bool turned : {false, true}) {
      const auto a = numbers<float>(rows * depth, 1);
      const auto b = numbers<bfloat16>(depth * cols, 2);
      const auto b_view = turned ? vha::row_major_view(b.data(), cols, depth, depth).transposed()
                                 : vha::row_major_view(b.data(), depth, cols, cols);
      const auto product = [&](Index first, Index count) {
        vha::ProductWorkspace<T> workspace;
        std::vector<vha::Compute<T>> c(static_cast<std::size_t>(count * cols));
        const auto all = vha::row_major_view(a.data(), rows, depth, depth);
        vha::multiply<T>(all.block(first, 0, count, depth), b_view, c.data(), cols, false,
                         workspace);
        return c;
      };
      const auto whole = product(0, rows);
      for (const Index first : {0, 5, 20}) {
        for (const Index count : {1, 2, 15, 16, 17, 20}) {
          const auto from = whole.begin() + first * cols;
          EXPECT_EQ(product(first, count),
                    (std::vector<vha::Compute<T>>(from, from + count * cols)))
              << depth << ' ' << turned << ' ' << first << ' ' << count;
        }
      }
    }
  }
}

/// Attention of one group with its keys and values in `S`, and what it should be.
template <class S>
struct Problem {
  Index tokens, keys, group_size, head_dim, value_dim, window;
  std::vector<S> query, key, value;
  std::vector<Position> query_positions, key_positions;

  Problem(Index query_count, Index key_count, Index heads, Index channels, Index value_channels,
          Index window_size)
      : tokens(query_count),
        keys(key_count),
        group_size(heads),
        head_dim(channels),
        value_dim(value_channels),
        window(window_size),
        query(numbers<S>(tokens * group_size * head_dim, 3)),
        key(numbers<S>(keys * head_dim, 4)),
        value(numbers<S>(keys * value_dim, 5)),
        query_positions(static_cast<std::size_t>(tokens)),
        key_positions(static_cast<std::size_t>(keys)) {
    std::iota(key_positions.begin(), key_positions.end(), Position(0));
    std::iota(query_positions.begin(), query_positions.end(), Position(keys - tokens));
  }

  double scale() const { return 2 / std::sqrt(static_cast<double>(head_dim)); }

  template <class T>
  std::vector<vha::Compute<T>> run() const {
    std::vector<vha::Compute<T>> out(static_cast<std::size_t>(tokens * group_size * value_dim));
    vha::CausalAttentionWorkspace<T> workspace;
    vha::causal_attention(vha::token_major_heads(query.data(), tokens, 1, group_size, head_dim),
                          vha::token_major_heads(key.data(), keys, 1, 1, head_dim),
                          vha::token_major_heads(value.data(), keys, 1, 1, value_dim),
                          std::span<const Position>(query_positions),
                          std::span<const Position>(key_positions), {scale(), {window}},
                          vha::token_major_heads(out.data(), tokens, 1, group_size, value_dim),
                          workspace);
    return out;
  }

  /// In loops; `Sum` holds the sums and `round` is applied to each weight.
  template <class Sum, class Round>
  std::vector<Sum> in_loops(Round round) const {
    std::vector<Sum> out;
    for (Index row = 0; row < tokens * group_size; ++row) {
      std::vector<Sum> logits;
      std::vector<Index> seen;
      for (Index k = 0; k < keys; ++k) {
        const Position distance = query_positions[static_cast<std::size_t>(row / group_size)] -
                                  key_positions[static_cast<std::size_t>(k)];
        if (distance < 0 || (window != 0 && distance >= window)) continue;
        Sum logit = 0;
        for (Index c = 0; c < head_dim; ++c) {
          logit += vha::convert<Sum>(query[static_cast<std::size_t>(row * head_dim + c)]) *
                   vha::convert<Sum>(key[static_cast<std::size_t>(k * head_dim + c)]);
        }
        logits.push_back(logit * static_cast<Sum>(scale()));
        seen.push_back(k);
      }
      const Sum largest = *std::ranges::max_element(logits);
      Sum sum = 0;
      std::vector<Sum> values(static_cast<std::size_t>(value_dim));
      for (std::size_t i = 0; i < seen.size(); ++i) {
        const Sum weight = std::exp(logits[i] - largest);
        sum += weight;
        for (std::size_t c = 0; c < values.size(); ++c) {
          values[c] += round(weight) *
                       vha::convert<Sum>(value[static_cast<std::size_t>(seen[i] * value_dim) + c]);
        }
      }
      for (const Sum v : values) out.push_back(v / sum);
    }
    return out;
  }
};

template <class A, class B>
double root_mean_square(const std::vector<A>& actual, const std::vector<B>& expected) {
  double sum = 0;
  for (std::size_t k = 0; k < expected.size(); ++k) {
    const double error = wide(actual[k]) - wide(expected[k]);
    sum += error * error;
  }
  return std::sqrt(sum / static_cast<double>(expected.size()));
}

TYPED_TEST(Kernel, CoreIsTheSoftmaxOfTheProducts) {
  using T = TypeParam;
  const double limit = std::same_as<T, double> ? 1e-14 : std::same_as<T, float> ? 2e-6 : 4e-3;
  const auto check = [&](const Problem<bfloat16>& problem) {
    const auto expected = problem.in_loops<double>([](double weight) { return weight; });
    EXPECT_LE(root_mean_square(problem.run<T>(), expected), limit)
        << problem.tokens << ' ' << problem.keys << ' ' << problem.group_size << ' '
        << problem.head_dim << ' ' << problem.value_dim << ' ' << problem.window;
  };
  for (const Index group_size : {1, 2, 3, 5, 8, 17, 40}) {
    for (const Index window : {0, 3, 150}) {
      check({1, 1, group_size, 6, 4, window});
      check({1, 131, group_size, 16, 32, window});
      check({37, 300, group_size, 7, 33, window});
      check({3, 1203, group_size, 64, 64, window});
    }
  }
  check({300, 2300, 2, 32, 64, 0});
}

TYPED_TEST(Kernel, DecodeHasTheBitsOfPrefill) {
  using T = TypeParam;
  for (const Index group_size : {1, 8, 17}) {
    for (const Index window : {0, 50}) {
      for (const Index channels : {7, 33, 64}) {
        const Index keys = 210;
        const Problem<bfloat16> prefill(keys, keys, group_size, channels, channels, window);
        const auto all = prefill.template run<T>();
        const Index row = group_size * channels;
        for (const Index token : {0, 15, 16, 31, 32, 145, 209}) {
          Problem<bfloat16> decode(1, token + 1, group_size, channels, channels, window);
          const auto query = prefill.query.begin() + token * row;
          decode.query.assign(query, query + row);
          const auto expected = all.begin() + token * row;
          EXPECT_EQ(decode.template run<T>(),
                    (std::vector<vha::Compute<T>>(expected, expected + row)))
              << group_size << ' ' << window << ' ' << channels << ' ' << token;
        }
      }
    }
  }
}

TYPED_TEST(Kernel, HiddenKeysTouchNoBitWereTheyNaN) {
  using T = TypeParam;
  const auto nan = vha::convert<bfloat16>(std::numeric_limits<float>::quiet_NaN());
  for (const Index group_size : {1, 8, 17}) {
    const Index tokens = 70, row = group_size * 33;
    const Problem<bfloat16> clean(tokens, tokens, group_size, 33, 33, 0);
    const auto expected = clean.template run<T>();
    for (const Index hidden_from : {1, 2, 16, 17, 32, 33, 50, 69}) {
      Problem<bfloat16> problem = clean;
      std::fill(problem.key.begin() + hidden_from * 33, problem.key.end(), nan);
      std::fill(problem.value.begin() + hidden_from * 33, problem.value.end(), nan);
      const auto actual = problem.template run<T>();
      EXPECT_TRUE(std::equal(actual.begin(), actual.begin() + hidden_from * row, expected.begin()))
          << group_size << ' ' << hidden_from;
    }
  }
}

/// `values` as `To`, once by way of bfloat16.
template <class To>
std::vector<To> rounded(const std::vector<double>& values, bool by_way_of_bfloat16) {
  std::vector<To> result;
  for (const double value : values) {
    result.push_back(by_way_of_bfloat16 ? vha::convert<To>(vha::convert<bfloat16>(value))
                                        : vha::convert<To>(value));
  }
  return result;
}

template <class S>
class InBFloat16 : public testing::Test {};
using Wider = testing::Types<double, float>;
TYPED_TEST_SUITE(InBFloat16, Wider);

TYPED_TEST(InBFloat16, OperandsAreRoundedBeforeTheyAreMultiplied) {
  using S = TypeParam;
  std::vector<double> values;
  for (int k = 0; k < 40 * 40; ++k) values.push_back(std::sin(1 + k));
  const auto exact = rounded<S>(values, false), round = rounded<S>(values, true);
  const auto narrow = rounded<bfloat16>(values, false);
  const auto run = [](const auto& data) {
    vha::ProductWorkspace<bfloat16> workspace;
    std::vector<float> c;
    for (const Index rows : {3, 40}) {
      for (const bool turned : {false, true}) {
        std::vector<float> out(static_cast<std::size_t>(rows * 40));
        const auto all = vha::row_major_view(data.data(), 40, 40, 40);
        vha::multiply(all.block(0, 0, rows, 40), turned ? all.transposed() : all, out.data(), 40,
                      false, workspace);
        c.insert(c.end(), out.begin(), out.end());
      }
    }
    return c;
  };
  EXPECT_EQ(run(exact), run(round));
  EXPECT_EQ(run(exact), run(narrow));

  const auto attend = [](const auto& data, auto element) {
    using Element = decltype(element);
    Problem<Element> problem(5, 50, 8, 16, 32, 0);
    problem.key.assign(data.begin(), data.begin() + 50 * 16);
    problem.value.assign(data.begin(), data.begin() + 50 * 32);
    problem.query.assign(data.begin(), data.begin() + 5 * 8 * 16);
    return problem.template run<bfloat16>();
  };
  EXPECT_EQ(attend(exact, S()), attend(round, S()));
  EXPECT_EQ(attend(exact, S()), attend(narrow, bfloat16()));
}

// The reference: logits and sums in float, weights rounded to bfloat16 before they meet the values.
TEST(KernelInBFloat16, IsAsGoodAsTheNaiveComputation) {
  for (const Index tokens : {1, 64}) {
    const Problem<bfloat16> problem(tokens, 1500, 8, 128, 128, 0);
    const auto exact = problem.in_loops<double>([](double weight) { return weight; });
    const auto naive = problem.in_loops<float>(
        [](float weight) { return vha::convert<float>(vha::convert<bfloat16>(weight)); });
    EXPECT_LE(root_mean_square(problem.run<bfloat16>(), exact), 2 * root_mean_square(naive, exact));
  }
}

}  // namespace
