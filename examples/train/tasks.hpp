// SPDX-License-Identifier: Apache-2.0
// What a model can be trained on: recall, made on the fly, or the bytes of a text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model.hpp"
#include "random.hpp"

namespace train {

/// One sequence to be filled in, as SequencesView has them.
struct Sequence {
  std::span<std::int32_t> inputs, targets;
};

class Task {
 public:
  virtual ~Task() = default;
  virtual Index vocabulary() const = 0;
  /// A sequence to train on, a function of `random` alone.
  virtual void make(Random random, const Sequence& sequence) const = 0;
  /// How many sequences are held out.
  virtual Index held_out(Index tokens) const = 0;
  virtual void make_held_out(Index number, const Sequence& sequence) const = 0;
};

/// Sequences in one piece of memory.
class Sequences {
 public:
  Sequences(Index sequences, Index tokens)
      : tokens_(tokens),
        inputs_(static_cast<std::size_t>(vha::checked_product("tokens", {sequences, tokens}))),
        targets_(inputs_.size()) {}

  Sequence sequence(Index number) {
    return {vha::part(std::span(inputs_), number * tokens_, tokens_),
            vha::part(std::span(targets_), number * tokens_, tokens_)};
  }
  /// The `count` sequences from `first` on.
  SequencesView view(Index first, Index count) const {
    return {tokens_, vha::part(std::span(inputs_), first * tokens_, count * tokens_),
            vha::part(std::span(targets_), first * tokens_, count * tokens_)};
  }
  Index sequences() const { return static_cast<Index>(inputs_.size()) / tokens_; }
  /// The number of targets.
  Index asked() const {
    return std::ranges::count_if(targets_, [](std::int32_t target) { return target >= 0; });
  }

 private:
  Index tokens_;
  std::vector<std::int32_t> inputs_, targets_;
};

/// The sequences of a step.
inline void make_batch(const Task& task, std::uint64_t seed, Index step, Sequences& batch) {
  for (Index k = 0; k < batch.sequences(); ++k) {
    task.make({seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(k)},
              batch.sequence(k));
  }
}

inline Sequences held_out(const Task& task, Index tokens) {
  Sequences sequences(task.held_out(tokens), tokens);
  for (Index k = 0; k < sequences.sequences(); ++k) task.make_held_out(k, sequences.sequence(k));
  return sequences;
}

/// Multi-query associative recall (Arora et al., Zoology, arXiv 2312.04927): pairs of a key and a
/// value, then keys again; asked is the value of each.
///
///     k1 v1 k2 v2 k3 v3 k2 k3 k3 k1 k2        targets: v2 v3 v3 v1 v2 at the last five
///
/// Keys are of the first half of the vocabulary, values of the second. Every place behind the pairs
/// asks, where the paper's sequences ask for each key once, with other tokens between: a sequence
/// teaches more so, and what is learnt is the same.
class Recall : public Task {
 public:
  Recall(Index pairs, Index vocabulary, Index tokens) : pairs_(pairs), vocabulary_(vocabulary) {
    vha::require_positive("pairs", pairs);
    if (tokens <= 2 * pairs) {
      vha::raise("tokens", vha::text("more than the ", 2 * pairs, " of ", pairs, " pairs"),
                 vha::text(tokens));
    }
    if (vocabulary / 2 < pairs) {
      vha::raise("vocabulary", vha::text("at least ", 2 * pairs, " for ", pairs, " pairs"),
                 vha::text(vocabulary));
    }
  }

  Index vocabulary() const override { return vocabulary_; }

  void make(Random random, const Sequence& sequence) const override {
    const auto keys = random.different(pairs_, 0, vocabulary_ / 2);
    const auto values = random.different(pairs_, vocabulary_ / 2, vocabulary_);
    const auto put = [&](std::size_t at, Index input, Index target) {
      sequence.inputs[at] = static_cast<std::int32_t>(input);
      sequence.targets[at] = static_cast<std::int32_t>(target);
    };
    std::size_t at = 0;
    for (std::size_t k = 0; k < keys.size(); ++k) {
      put(at++, keys[k], -1);
      put(at++, values[k], -1);
    }
    for (; at < sequence.inputs.size(); ++at) {
      const auto k = static_cast<std::size_t>(random.below(pairs_));
      put(at, keys[k], values[k]);
    }
  }

  Index held_out(Index) const override { return 256; }
  /// The same for every seed, so that runs can be compared.
  void make_held_out(Index number, const Sequence& sequence) const override {
    make({0x68656C64206F7574U, ~std::uint64_t(0), static_cast<std::uint64_t>(number)}, sequence);
  }

 private:
  Index pairs_, vocabulary_;
};

/// The next byte of a text, whose last tenth is held out.
class Text : public Task {
 public:
  Text(const std::string& label, std::string bytes, Index tokens)
      : bytes_(std::move(bytes)), trained_(size() - size() / 10) {
    if (size() - trained_ <= tokens) {
      vha::raise(label, vha::text("a tenth that is longer than ", tokens, " tokens"),
                 vha::text(size(), " bytes"));
    }
    if (size() > std::numeric_limits<std::uint32_t>::max()) {
      vha::raise(label, "less than 4 GiB", vha::text(size(), " bytes"));
    }
  }

  Index vocabulary() const override { return 256; }

  void make(Random random, const Sequence& sequence) const override {
    fill(random.below(trained_ - static_cast<Index>(sequence.inputs.size())), sequence);
  }

  Index held_out(Index tokens) const override {
    return std::min<Index>(256, (size() - trained_ - 1) / tokens);
  }
  /// Spread evenly over what is held out.
  void make_held_out(Index number, const Sequence& sequence) const override {
    const auto tokens = static_cast<Index>(sequence.inputs.size());
    fill(trained_ + number * (size() - trained_ - 1) / held_out(tokens), sequence);
  }

 private:
  Index size() const { return static_cast<Index>(bytes_.size()); }
  std::int32_t byte(Index at) const {
    return static_cast<unsigned char>(bytes_[static_cast<std::size_t>(at)]);
  }
  void fill(Index first, const Sequence& sequence) const {
    for (std::size_t k = 0; k < sequence.inputs.size(); ++k) {
      sequence.inputs[k] = byte(first + static_cast<Index>(k));
      sequence.targets[k] = byte(first + static_cast<Index>(k) + 1);
    }
  }

  std::string bytes_;
  Index trained_;
};

}  // namespace train
