// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that are threads of one process, for testing what ranks do without MPI.

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>
#include <vha/core/scalar.hpp>

namespace support {

/// Where the threads meet. Once one has failed, the others throw in place of waiting for it.
class RankMeeting {
 public:
  explicit RankMeeting(vha::Index size) : memory(static_cast<std::size_t>(size)), size_(size) {}

  vha::Index size() const { return size_; }

  void wait() {
    std::unique_lock lock(mutex_);
    const auto round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return round_ != round || failed_; });
    if (round_ == round) throw std::runtime_error("another rank failed");
  }

  void fail() {
    const std::scoped_lock lock(mutex_);
    failed_ = true;
    all_here_.notify_all();
  }

  std::vector<std::vector<double>> memory;  ///< what each rank gives; double holds float exactly

 private:
  vha::Index size_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  vha::Index arrived_ = 0;
  unsigned long round_ = 0;
  bool failed_ = false;
};

/// A model of vha::Communicator. Sums are taken in the order of the ranks.
class RankThread {
 public:
  RankThread(RankMeeting& meeting, vha::Index rank) : meeting_(&meeting), rank_(rank) {}

  vha::Index rank() const { return rank_; }
  vha::Index size() const { return meeting_->size(); }

  template <vha::ComputeScalar T>
  void sum(std::span<T> values) {
    meeting_->memory[static_cast<std::size_t>(rank_)].assign(values.begin(), values.end());
    meeting_->wait();
    for (const auto& given : meeting_->memory) {
      if (given.size() != values.size()) throw std::runtime_error("ranks sum different sizes");
    }
    for (std::size_t k = 0; k < values.size(); ++k) {
      T sum = 0;
      for (const auto& given : meeting_->memory) sum += static_cast<T>(given[k]);
      values[k] = sum;
    }
    meeting_->wait();
  }

 private:
  RankMeeting* meeting_;
  vha::Index rank_;
};

/// Calls `body(communicator)` on `size` threads. Throws what the first that failed threw.
template <class Body>
void run_on_ranks(vha::Index size, const Body& body) {
  RankMeeting meeting(size);
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (vha::Index rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        RankThread communicator(meeting, rank);
        body(communicator);
      } catch (...) {
        {
          const std::scoped_lock lock(mutex);
          if (!error) error = std::current_exception();
        }
        meeting.fail();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace support
