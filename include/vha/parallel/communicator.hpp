// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <span>
#include <vha/core/scalar.hpp>

namespace vha {

/// One of `size()` processes, the ranks 0 to `size() - 1`, that work on one thing together. The one
/// thing that they do with each other is to add up:
///
///     void sum(std::span<T> values);  // T is float or double
///
/// makes `values` of every rank the sums, element by element, over all ranks. All ranks call it equally
/// often, in the same order, with as many values. It waits for all ranks; every rank gets the same bits, and
/// gets them again where all is repeated. Where there is one rank alone it does nothing.
///
/// A rank that leaves this order, as by an error of its own, must end the others: they would wait for ever.
template <class C>
concept Communicator = requires(C& communicator, const C& constant, std::span<float> floats,
                                std::span<double> doubles) {
  { constant.rank() } -> std::convertible_to<Index>;
  { constant.size() } -> std::convertible_to<Index>;
  communicator.sum(floats);
  communicator.sum(doubles);
};

/// A process that works alone.
class SingleProcess {
 public:
  Index rank() const { return 0; }
  Index size() const { return 1; }
  template <ComputeScalar T>
  void sum(std::span<T>) {}
};

/// A communicator that counts what goes through it.
template <Communicator C>
class CountedCommunicator {
 public:
  /// `communicator` must live as long.
  explicit CountedCommunicator(C& communicator) : communicator_(&communicator) {}

  Index rank() const { return communicator_->rank(); }
  Index size() const { return communicator_->size(); }
  template <ComputeScalar T>
  void sum(std::span<T> values) {
    communicator_->sum(values);
    if (size() == 1) return;
    bytes_ += static_cast<Index>(values.size_bytes());
    ++sums_;
  }

  /// Bytes of values that this rank gave to sums with other ranks: 0 of a rank alone. What then runs over
  /// a wire depends on how the sum is done: of a ring of n ranks, each sends 2·(n - 1)/n of them.
  Index bytes() const { return bytes_; }
  /// How many sums that were.
  Index sums() const { return sums_; }
  void reset() { bytes_ = sums_ = 0; }

 private:
  C* communicator_;
  Index bytes_ = 0;
  Index sums_ = 0;
};

}  // namespace vha
