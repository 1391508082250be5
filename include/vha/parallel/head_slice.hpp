// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vha/core/config.hpp>
#include <vha/core/error.hpp>
#include <vha/core/sizes.hpp>

namespace vha {

/// The heads that one of `ranks` ranks has. As long as there are groups enough, each rank has as many
/// K/V heads with all their query heads; beyond, each K/V head is on `kv_copies` ranks, which share its
/// query heads:
///
///     G = 2, H' = 4             rank 0         rank 1         rank 2         rank 3
///     2 ranks                   K/V 0: 0123    K/V 1: 4567
///     4 ranks                   K/V 0: 01      K/V 0: 23      K/V 1: 45      K/V 1: 67
///
/// In both cases rank k has query heads k·Hv/n to (k+1)·Hv/n.
struct HeadSlice {
  Index rank = 0, ranks = 1;
  Index first_query_head = 0, query_heads = 0;
  Index first_kv_head = 0, kv_heads = 0;
  Index kv_copies = 1;  ///< ranks that have the same K/V heads
  Index first_member =
      0;  ///< of the query heads in a group, which are a VHA layer's physical heads
  Index members = 0;

  /// Precondition: `splits_evenly`.
  static constexpr HeadSlice of(Index query_heads, Index kv_heads, Index rank, Index ranks) {
    const Index copies = ranks > kv_heads ? ranks / kv_heads : 1;
    const Index members = query_heads / kv_heads / copies;
    const Index groups = ranks > kv_heads ? 1 : kv_heads / ranks;
    return {.rank = rank,
            .ranks = ranks,
            .first_query_head = rank * (query_heads / ranks),
            .query_heads = query_heads / ranks,
            .first_kv_head = rank / copies * groups,
            .kv_heads = groups,
            .kv_copies = copies,
            .first_member = rank % copies * members,
            .members = members};
  }

  /// A layer's configuration with these heads.
  AttentionConfig config_of(AttentionConfig whole) const {
    whole.query_heads = query_heads;
    whole.kv_heads = kv_heads;
    return whole;
  }
};

/// Whether every rank gets the same number of heads: `ranks` divides kv_heads, or is kv_heads times a
/// divisor of the query heads in a group. Precondition: all are positive, kv_heads divides query_heads.
constexpr bool splits_evenly(Index query_heads, Index kv_heads, Index ranks) {
  if (ranks <= kv_heads) return kv_heads % ranks == 0;
  return ranks % kv_heads == 0 && query_heads / kv_heads % (ranks / kv_heads) == 0;
}

/// Throws Error naming `argument` and the heads that `ranks` does not divide.
inline void require_even_split(std::string_view argument, Index query_heads, Index kv_heads,
                               Index ranks) {
  require_positive(argument, ranks);
  if (splits_evenly(query_heads, kv_heads, ranks)) return;
  const Index group_size = query_heads / kv_heads;
  if (ranks < kv_heads) raise(argument, text("a divisor of kv_heads = ", kv_heads), text(ranks));
  raise(argument,
        text("kv_heads = ", kv_heads, " times a divisor of the ", group_size,
             " query heads in each group"),
        text(ranks));
}

/// The heads of rank `rank`. Throws Error where there is no such rank or the heads do not split.
inline HeadSlice slice_heads(const AttentionConfig& config, Index rank, Index ranks) {
  config.validate();
  require_even_split("ranks", config.query_heads, config.kv_heads, ranks);
  if (rank < 0 || rank >= ranks) raise("rank", text("0 to ", ranks - 1), text(rank));
  return HeadSlice::of(config.query_heads, config.kv_heads, rank, ranks);
}

}  // namespace vha
