// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>
#include <vha/attention/query_block.hpp>
#include <vha/core/executor.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/mask.hpp>
#include <vha/ops/softmax_state.hpp>

namespace vha {

/// What the core computes besides its operands.
struct CausalAttentionOptions {
  double scale = 1;      ///< factor of the logits, as a rule 1 / √head_dim
  CausalMask mask = {};  ///< which keys a query sees
};

/// The threads and the buffers of `causal_attention`.
template <Operand T>
struct CausalAttentionWorkspace {
  Executor executor;
  std::vector<detail::QueryBlockMemory<T>> thread_memory;
  Buffer<Compute<T>> span_values;
  std::vector<SoftmaxState<Compute<T>>> span_states;
};

namespace detail {

/// The core for one call. Keys are seen in spans of `key_span`, each by itself, and what was seen is
/// merged from left to right: so decode can give spans to different threads and still does the same
/// arithmetic as prefill.
template <int HeadDim, int GroupSize, Operand T, class Q, class K, class V, class O>
class CausalAttention {
 public:
  using Sum = Compute<T>;
  using Block = QueryBlock<T>;

  const HeadsView<const Q>& query;
  const HeadsView<const K>& key;
  const HeadsView<const V>& value;
  std::span<const Position> query_positions;
  std::span<const Position> key_positions;
  const CausalAttentionOptions& options;
  const HeadsView<O>& out;
  CausalAttentionWorkspace<T>& workspace;
  const HeadsView<Sum>& softmax;

  void run() const {
    if (query.tokens == 0 || query.groups == 0) return;
    const Executor executor = workspace.executor.for_work_of(
        query.tokens * query.groups * group_size() * key.tokens * (head_dim() + value.head_dim));
    const Index tokens_per_block = std::max<Index>(1, rows_per_block / group_size());
    const Index block_rows = std::min(query.tokens, tokens_per_block) * group_size();
    // Room for all threads and for spans of keys, needed or not: a decode step that is the first to
    // need them allocates nothing.
    const auto threads = static_cast<std::size_t>(workspace.executor.threads());
    if (workspace.thread_memory.size() < threads) workspace.thread_memory.resize(threads);
    for (auto& memory : workspace.thread_memory) {
      memory.reserve(block_rows, head_dim(), value.head_dim);
    }
    const Index slot_rows = query.groups * (group_spans() + 1) * Block::panel_rows;
    workspace.span_values.reserve(slot_rows * value.head_dim);
    workspace.span_states.resize(static_cast<std::size_t>(slot_rows));
    if (query.tokens * group_size() <= Block::panel_rows && key.tokens > key_span) {
      return run_spans(executor);
    }
    const Index blocks = pieces(query.tokens, tokens_per_block);
    executor.for_each(blocks * query.groups, [&](Index task, Index thread) {
      // The last queries see the most keys: begun first, they do not end last.
      const Index first = (blocks - 1 - task / query.groups) * tokens_per_block;
      const Index tokens = std::min(query.tokens - first, tokens_per_block);
      run_block(task % query.groups, first, tokens,
                workspace.thread_memory[static_cast<std::size_t>(thread)]);
    });
  }

 private:
  static constexpr Index key_span = 1024;
  static constexpr Index rows_per_block = 256;
  static constexpr Index spans_at_once = 32;

  Index head_dim() const { return HeadDim == Eigen::Dynamic ? query.head_dim : HeadDim; }
  Index group_size() const { return GroupSize == Eigen::Dynamic ? query.group_size : GroupSize; }

  /// Spans of a group that are seen before they are merged.
  Index group_spans() const { return std::max<Index>(1, spans_at_once / query.groups); }

  Block load_block(Index group, Index first, Index tokens, QueryBlockMemory<T>& memory,
                   const RegistersFor<T>& registers) const {
    Block block(part(query_positions, first, tokens), group_size(), head_dim(), value.head_dim,
                options.mask, options.scale, memory, registers);
    block.load_queries(query.slice(first, tokens), group);
    return block;
  }

  void attend_span(Block& block, Index group, Index first) const {
    const auto keys = key.group_matrix(group);
    const auto values = value.group_matrix(group);
    const Index end = std::min(key.tokens, first + key_span);
    for (; first < end; first += Block::key_block) {
      block.attend(keys, values, key_positions, first, std::min(Block::key_block, end - first));
    }
  }

  void run_block(Index group, Index first, Index tokens, QueryBlockMemory<T>& memory) const {
    const RegistersFor<T> registers;
    Block block = load_block(group, first, tokens, memory, registers);
    attend_span(block, group, 0);
    if (key.tokens <= key_span) return store(block.attended(), group, first, tokens);
    const Index values = block.rows() * value.head_dim;
    memory.earlier_states = memory.states;
    const AttendedRows<Sum> earlier{memory.earlier_states.data(), memory.earlier_values.data()};
    std::copy_n(block.attended().values, values, earlier.values);
    for (Index span = key_span; span < key.tokens; span += key_span) {
      block.forget();
      attend_span(block, group, span);
      earlier.merge(block.attended(), block.rows(), value.head_dim);
    }
    store(earlier, group, first, tokens);
  }

  /// A few queries, as in decode: threads share the keys.
  void run_spans(const Executor& executor) const {
    const Index rows = query.tokens * group_size();
    const Index spans_each = group_spans();
    const Index spans = pieces(key.tokens, key_span);
    const Index slot_values = rows * value.head_dim;
    Sum* const values = workspace.span_values.data();
    const auto slot = [&](Index group, Index k) {
      const Index at = group * (spans_each + 1) + k;
      return AttendedRows<Sum>{workspace.span_states.data() + at * rows, values + at * slot_values};
    };
    for (Index first = 0; first < spans; first += spans_each) {
      const Index count = std::min(spans_each, spans - first);
      executor.for_each(query.groups * count, [&](Index task, Index thread) {
        const Index group = task % query.groups, k = task / query.groups;
        const RegistersFor<T> registers;
        Block block =
            load_block(group, 0, query.tokens,
                       workspace.thread_memory[static_cast<std::size_t>(thread)], registers);
        attend_span(block, group, (first + k) * key_span);
        const auto result = slot(group, first == 0 ? k : k + 1);
        std::copy_n(block.attended().states, rows, result.states);
        std::copy_n(block.attended().values, slot_values, result.values);
      });
      for (Index group = 0; group < query.groups; ++group) {
        for (Index k = 1; k < count + (first == 0 ? 0 : 1); ++k) {
          slot(group, 0).merge(slot(group, k), rows, value.head_dim);
        }
      }
    }
    for (Index group = 0; group < query.groups; ++group) {
      store(slot(group, 0), group, 0, query.tokens);
    }
  }

  void store(const AttendedRows<Sum>& rows, Index group, Index first, Index tokens) const {
    const Sum* source = rows.values;
    Index row = 0;
    for (Index token = 0; token < tokens; ++token) {
      for (Index member = 0; member < group_size(); ++member) {
        const SoftmaxState<Sum>& state = rows.states[row++];
        if (softmax.data != nullptr) {
          Sum* const saved = softmax.head(first + token, group, member);
          saved[0] = state.max;
          saved[1] = state.sum;
        }
        const Sum normalizer = state.normalizer();
        O* const head = out.head(first + token, group, member);
        for (Index c = 0; c < value.head_dim; ++c) head[c] = convert<O>(*source++ * normalizer);
      }
    }
  }
};

}  // namespace detail

/// The attention core, the only one in the library: for each query head,
///
///     out = softmax(scale · q·kᵀ) · V     over the keys that the mask lets the query see,
///
/// with an online softmax (FlashAttention, arXiv 2205.14135), for one sequence.
///
/// | operand | shape |
/// |---|---|
/// | query | `[tokens, kv_heads, group_size, head_dim]` |
/// | key | `[keys, kv_heads, 1, head_dim]` |
/// | value | `[keys, kv_heads, 1, value_dim]` |
/// | query_positions, key_positions | `[tokens]`, `[keys]` |
/// | out | `[tokens, kv_heads, group_size, value_dim]` |
/// | softmax | `[tokens, kv_heads, group_size, 2]`, or none: each row's largest logit and the sum of the exponentials relative to it, 0 where it saw no key |
///
/// Query and key counts may differ, positions may come in any order. A query that sees no key gives
/// zeros; a logit below half the lowest number of the arithmetic weighs nothing. Operands and
/// result may be of any storage scalars; what is multiplied is rounded to `T`, products are summed and
/// the softmax is taken in `Compute<T>`. The result is the same to the last bit on any number of
/// threads, and for a query whatever other queries there are. `HeadDim` and `GroupSize` may be given
/// where they are known. Precondition: the scale is positive; the shapes fit, HeadDim and GroupSize
/// too; `out` does not overlap the operands.
template <int HeadDim = Eigen::Dynamic, int GroupSize = Eigen::Dynamic, Operand T, class Q, class K,
          class V, class O>
void causal_attention(const HeadsView<const Q>& query, const HeadsView<const K>& key,
                      const HeadsView<const V>& value, std::span<const Position> query_positions,
                      std::span<const Position> key_positions,
                      const CausalAttentionOptions& options, const HeadsView<O>& out,
                      CausalAttentionWorkspace<T>& workspace,
                      const HeadsView<Compute<T>>& softmax = {}) {
  detail::CausalAttention<HeadDim, GroupSize, T, Q, K, V, O>{
      query, key, value, query_positions, key_positions, options, out, workspace, softmax}
      .run();
}

}  // namespace vha
