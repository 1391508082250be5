// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#include <vha/core/executor.hpp>

namespace vha {

/// A thread pool device whose threads stay awake between calls, for decode: a step takes some hundred
/// microseconds, and to wake a thread that slept takes tens of them, on a virtual machine milliseconds.
///
///     vha::AwakeThreads awake(device);
///     workspace.executor = awake;
///
/// A thread that has done its part looks out for the next for as long as `patience`; then the pool has it
/// back. So other work of the pool may have to wait that long, and for that long the threads keep their
/// cores busy after the last call, but for a core that another thread asks for.
///
/// A view: the device must live longer, and what is made from this, an Executor, not as long. Any number of
/// threads may make calls with it at once.
template <ThreadPoolLike Device>
class AwakeThreads {
 public:
  using Duration = std::chrono::microseconds;
  static constexpr Duration default_patience{1000};

  explicit AwakeThreads(const Device& device, Duration patience = default_patience)
      : device_(device),
        lookout_(std::make_shared<Lookout>(patience, std::max(1, device.numThreads() - 1))) {}
  explicit AwakeThreads(const Device&&, Duration = default_patience) = delete;
  AwakeThreads(const AwakeThreads&) = delete;
  AwakeThreads& operator=(const AwakeThreads&) = delete;
  /// The pool has its threads back at once.
  ~AwakeThreads() { lookout_->end(); }

  // A ThreadPoolLike device, its own pool.
  int numThreads() const { return device_.numThreads(); }
  int currentThreadId() const { return device_.currentThreadId(); }
  const AwakeThreads* getPool() const { return this; }

  /// Has `work` done by one of the pool's threads, or by this one if the pool takes none. It must not
  /// throw.
  void Schedule(std::function<void()> work) const {
    if (!lookout_->needs_a_thread_for(std::move(work))) return;
    try {
      device_.getPool()->Schedule([lookout = lookout_] { lookout->look_out(); });
    } catch (...) {
      lookout_->do_all();
    }
  }

 private:
  // Shared with the pool's threads, which may come to it late.
  class Lookout {
   public:
    Lookout(Duration patience, int threads)
        : patience_(patience), threads_(static_cast<std::size_t>(threads)) {
      given_.reserve(threads_);
    }

    /// Takes `work`; whether one more thread must come for it.
    bool needs_a_thread_for(std::function<void()> work) {
      const std::scoped_lock lock(mutex_);
      given_.push_back(std::move(work));
      ++waiting_;
      // A thread that has done its work will take this, if it does not look out yet.
      if (++unfinished_ <= awake_ || awake_ == threads_) return false;
      ++awake_;
      return true;
    }
    void look_out() {
      for (auto end = Clock::now() + patience_;;) {
        if (do_one()) {
          end = Clock::now() + patience_;
        } else if (!ended_ && Clock::now() < end) {
          std::this_thread::yield();
        } else if (leaves()) {
          return;
        }
      }
    }
    void do_all() {
      do {
        while (do_one()) {
        }
      } while (!leaves());
    }
    void end() { ended_ = true; }

   private:
    using Clock = std::chrono::steady_clock;

    /// Does what was given first, where there is anything.
    bool do_one() {
      if (waiting_ == 0) return false;  // without the lock, which others need
      std::function<void()> work;
      {
        const std::scoped_lock lock(mutex_);
        if (given_.empty()) return false;
        work = std::move(given_.front());
        given_.erase(given_.begin());
        --waiting_;
      }
      work();
      --unfinished_;
      return true;
    }
    bool leaves() {
      const std::scoped_lock lock(mutex_);
      if (!given_.empty()) return false;
      --awake_;
      return true;
    }

    const Duration patience_;
    const std::size_t threads_;
    std::mutex mutex_;
    std::vector<std::function<void()>> given_;  // and not begun
    std::atomic<std::size_t> waiting_ = 0;      // given_.size()
    std::atomic<std::size_t> unfinished_ = 0;
    std::size_t awake_ = 0;  // threads that look out, or are on their way to it
    std::atomic<bool> ended_ = false;
  };

  const Device& device_;
  const std::shared_ptr<Lookout> lookout_;
};

}  // namespace vha
