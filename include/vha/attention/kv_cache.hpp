// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>
#include <vha/core/config.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>
#include <vha/core/view.hpp>
#include <vha/ops/rope.hpp>

namespace vha {

/// What a cache holds, and for how many tokens.
struct KvCacheShape {
  Index batch = 1;
  Index kv_heads = 0;
  Index head_dim = 0;
  Index value_dim = 0;  ///< channels of a value; 0: as many as head_dim
  Index capacity = 0;   ///< tokens per sequence
  /// The values are the keys' first `value_dim` channels, stored once.
  bool values_in_keys = false;

  static constexpr KvCacheShape of(const AttentionConfig& config, Index batch, Index capacity) {
    return {.batch = batch,
            .kv_heads = config.kv_heads,
            .head_dim = config.head_dim,
            .value_dim = config.head_dim,
            .capacity = capacity};
  }

  /// Whether a cache of this shape will do where `needed` is asked for.
  constexpr bool serves(const KvCacheShape& needed) const {
    return batch == needed.batch && kv_heads == needed.kv_heads && head_dim == needed.head_dim &&
           value_dim == needed.value_dim && capacity >= needed.capacity &&
           values_in_keys == needed.values_in_keys;
  }
};

/// The keys (normalised and rotated) and values of the tokens that were seen, for each sequence of
/// a batch, with the position of each. The capacity is fixed at construction; the sequences fill up
/// unevenly where their prompts are of different lengths. Stored as `S`,
/// `[batch, kv_heads, capacity, head_dim]`, each element rounded once.
///
/// A method that throws leaves the cache as it was. Not copied by accident: see `copy`.
template <StorageScalar S>
class KvCache {
 public:
  using Scalar = S;

  using Shape = KvCacheShape;

  /// Throws Error unless every size is positive and the storage can be addressed.
  explicit KvCache(Shape shape) : shape_(shape) {
    if (shape_.value_dim == 0) shape_.value_dim = shape_.head_dim;
    require_positive("batch", shape_.batch);
    require_positive("kv_heads", shape_.kv_heads);
    require_positive("head_dim", shape_.head_dim);
    require_positive("value_dim", shape_.value_dim);
    require_positive("capacity", shape_.capacity);
    if (shape_.values_in_keys && shape_.value_dim > shape_.head_dim) {
      raise("value_dim (values_in_keys)", text("head_dim = ", shape_.head_dim, " or less"),
            text(shape_.value_dim));
    }
    const Index tokens = checked_product("batch * capacity", {shape_.batch, shape_.capacity});
    checked_product("cache bytes", {tokens, bytes_per_token()});
    checked_product("position bytes", {tokens, sizeof(Position)});
    keys_.resize(static_cast<std::size_t>(tokens * shape_.kv_heads * shape_.head_dim));
    if (!shape_.values_in_keys) {
      values_.resize(static_cast<std::size_t>(tokens * shape_.kv_heads * shape_.value_dim));
    }
    positions_.resize(static_cast<std::size_t>(tokens));
    lengths_.resize(static_cast<std::size_t>(shape_.batch));
  }

  /// A cache for `batch` sequences of a layer with this configuration.
  KvCache(const AttentionConfig& config, Index batch, Index capacity)
      : KvCache(Shape::of(config, batch, capacity)) {}

  KvCache(KvCache&&) = default;
  KvCache& operator=(KvCache&&) = default;

  /// A second cache with the same contents.
  KvCache copy() const { return *this; }

  const Shape& shape() const { return shape_; }
  Index batch() const { return static_cast<Index>(lengths_.size()); }  // 0 once moved from
  Index capacity() const { return shape_.capacity; }
  /// Tokens in sequence `row`.
  Index length(Index row = 0) const { return lengths_[checked_row(row)]; }
  /// The position after the newest one in sequence `row`; 0 where there is none.
  Position next_position(Index row) const {
    return length(row) == 0 ? 0 : all_positions(row)[length(row) - 1] + 1;
  }

  /// Bytes of keys and values of one token; its position takes 8 more.
  Index bytes_per_token() const {
    checked_product("cache",
                    {shape_.kv_heads, 2, std::max(shape_.head_dim, shape_.value_dim), sizeof(S)});
    const Index value_dim = shape_.values_in_keys ? 0 : shape_.value_dim;
    return shape_.kv_heads * (shape_.head_dim + value_dim) * static_cast<Index>(sizeof(S));
  }
  /// Bytes of keys and values of the tokens in all sequences.
  Index bytes_used() const {
    Index tokens = 0;
    for (const Index length : lengths_) tokens += length;
    return tokens * bytes_per_token();
  }
  /// Bytes of keys and values at full length.
  Index bytes_capacity() const { return batch() * capacity() * bytes_per_token(); }

  /// Keys `[length, kv_heads, 1, head_dim]`, values and positions of sequence `row`, with the
  /// `uncommitted` tokens that were written behind them. Throws Error where there is no such row.
  /// Precondition: as many tokens were written.
  HeadsView<const S> keys(Index row, Index uncommitted = 0) const {
    require_room(row, uncommitted);
    return heads(keys_.data(), shape_.head_dim, row, 0, length(row) + uncommitted);
  }
  HeadsView<const S> values(Index row, Index uncommitted = 0) const {
    require_room(row, uncommitted);
    if (shape_.values_in_keys) {
      auto values = keys(row, uncommitted);
      values.head_dim = shape_.value_dim;
      return values;
    }
    return heads(values_.data(), shape_.value_dim, row, 0, length(row) + uncommitted);
  }
  std::span<const Position> positions(Index row, Index uncommitted = 0) const {
    require_room(row, uncommitted);
    return {all_positions(row), static_cast<std::size_t>(length(row) + uncommitted)};
  }

  /// Throws Error unless `tokens` more fit into sequence `row`.
  void require_room(Index row, Index tokens) const {
    if (tokens < 0) raise("tokens", "0 or more", text(tokens));
    if (tokens > capacity() - length(row)) {
      raise("kv_cache", text("at most ", capacity(), " tokens (its capacity)"),
            text(static_cast<std::uint64_t>(length(row)) + static_cast<std::uint64_t>(tokens),
                 " in sequence ", row));
    }
  }

  /// Puts tokens behind those of sequence `row`: keys `[tokens, kv_heads, 1, head_dim]`, values
  /// `[tokens, kv_heads, 1, value_dim]` and a position each. Values in the keys are those, whatever is
  /// given beside. Throws Error where they do not fit.
  template <StorageScalar K>
  void append(Index row, const HeadsView<const K>& keys, const HeadsView<const K>& values,
              std::span<const Position> positions) {
    require_size("keys.head_dim", shape_.head_dim, keys.head_dim);
    require_size("values.head_dim", shape_.value_dim, values.head_dim);
    require_size("values.tokens", keys.tokens, values.tokens);
    require_size("positions.size()", keys.tokens, static_cast<Index>(positions.size()));
    require_size("keys.groups (kv_heads)", shape_.kv_heads, keys.groups);
    require_size("values.groups (kv_heads)", shape_.kv_heads, values.groups);
    require_size("keys.group_size", 1, keys.group_size);
    require_size("values.group_size", 1, values.group_size);
    for (const Position position : positions) require_position("positions", position);
    require_room(row, keys.tokens);
    write(row, 0, keys, values, positions);
    commit(row, keys.tokens);
  }

  /// Writes tokens `offset` places behind the end of sequence `row` without counting them in, which
  /// `commit` does. Precondition: they fit, in number and in shape.
  template <StorageScalar K>
  void write(Index row, Index offset, const HeadsView<const K>& keys,
             const HeadsView<const K>& values, std::span<const Position> positions) {
    const Index first = length(row) + offset;
    copy_heads(keys, heads(keys_.data(), shape_.head_dim, row, first, keys.tokens));
    if (!shape_.values_in_keys) {
      copy_heads(values, heads(values_.data(), shape_.value_dim, row, first, keys.tokens));
    }
    std::copy(positions.begin(), positions.end(), positions_.data() + row * capacity() + first);
  }

  /// Counts `tokens` written tokens in.
  void commit(Index row, Index tokens) {
    require_room(row, tokens);
    lengths_[checked_row(row)] += tokens;
  }

  /// Forgets the tokens of sequence `row` from the `length`-th on.
  void truncate(Index row, Index length) {
    if (length < 0 || length > this->length(row)) {
      raise("length", text("0 to ", this->length(row)), text(length));
    }
    lengths_[checked_row(row)] = length;
  }

  /// Forgets all tokens.
  void reset() { std::fill(lengths_.begin(), lengths_.end(), Index(0)); }

 private:
  KvCache(const KvCache&) = default;

  std::size_t checked_row(Index row) const {
    if (row < 0 || row >= batch()) raise("row", text("0 to ", batch() - 1), text(row));
    return static_cast<std::size_t>(row);
  }

  const Position* all_positions(Index row) const { return positions_.data() + row * capacity(); }

  template <class T>
  HeadsView<T> heads(T* storage, Index width, Index row, Index first, Index tokens) const {
    const Index head_stride = capacity() * width;
    T* const start = storage + row * shape_.kv_heads * head_stride + first * width;
    return {.data = start,
            .tokens = tokens,
            .groups = shape_.kv_heads,
            .head_dim = width,
            .token_stride = width,
            .group_stride = head_stride,
            .head_stride = width};
  }

  template <StorageScalar K>
  static void copy_heads(const HeadsView<const K>& from, const HeadsView<S>& to) {
    for (Index token = 0; token < to.tokens; ++token) {
      for (Index group = 0; group < to.groups; ++group) {
        const K* const source = from.head(token, group, 0);
        S* const target = to.head(token, group, 0);
        for (Index c = 0; c < to.head_dim; ++c) target[c] = convert<S>(source[c]);
      }
    }
  }

  Shape shape_;
  std::vector<S> keys_;
  std::vector<S> values_;
  std::vector<Position> positions_;
  std::vector<Index> lengths_;
};

}  // namespace vha
