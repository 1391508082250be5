// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>
#include <unsupported/Eigen/CXX11/Tensor>
#include <utility>
#include <vha/core/scalar.hpp>

namespace vha {

/// What Eigen::ThreadPoolDevice offers (seen where EIGEN_USE_THREADS is defined), and any device
/// like it.
template <class D>
concept ThreadPoolLike = requires(const D& device, std::function<void()> work) {
  { device.numThreads() } -> std::convertible_to<int>;
  { device.currentThreadId() } -> std::convertible_to<int>;
  device.getPool()->Schedule(work);
};

/// The threads that a computation may use: the caller's own, as in `tensor.device(d) = …`. Made from
/// an Eigen::DefaultDevice, which is the calling thread alone, or an Eigen::ThreadPoolDevice, whose
/// `numThreads()` counts the calling thread. A view: the device must live as long.
///
/// Which thread does what never changes a result.
class Executor {
 public:
  /// The calling thread alone.
  Executor() = default;
  Executor(const Eigen::DefaultDevice&) {}
  template <ThreadPoolLike Device>
  Executor(const Device& device)
      : device_(&device), threads_(std::max<Index>(1, device.numThreads())) {
    is_pool_thread_ = [](const void* any) {
      return static_cast<const Device*>(any)->currentThreadId() >= 0;
    };
    schedule_ = [](const void* any, std::function<void()> work) {
      static_cast<const Device*>(any)->getPool()->Schedule(std::move(work));
    };
  }
  template <ThreadPoolLike Device>
  Executor(const Device&&) = delete;  // a temporary device would be gone when it is used

  Index threads() const { return threads_; }

  /// This, or the calling thread alone for work of so few multiply-adds that it would be done before
  /// another thread is awake.
  Executor for_work_of(Index multiply_adds) const {
    static constexpr Index worth_waking = Index(1) << 20;
    return multiply_adds < worth_waking ? Executor() : *this;
  }

  /// Calls `body(task, thread)` for each task in [0, tasks), once all are done returns. `thread`, in
  /// [0, threads()), is one thread's at a time, for memory that each needs for itself. Tasks are
  /// taken in their order. Throws what the first of the failing
  /// tasks throws, after the others have ended. On a thread of the
  /// pool itself all is done there, since waiting for the pool could then last for ever.
  template <class Body>
  void for_each(Index tasks, Body&& body) const {
    const Index runners = std::min(threads_, tasks);
    if (runners <= 1 || is_pool_thread_(device_)) {
      for (Index task = 0; task < tasks; ++task) body(task, Index(0));
      return;
    }
    Run<std::remove_reference_t<Body>> run(body, tasks, runners - 1);
    for (Index thread = 1; thread < runners; ++thread) {
      try {
        // Two words, which std::function holds without an allocation.
        schedule_(device_, [at = &run, thread] { at->help(thread); });
      } catch (...) {  // the others do its tasks
        run.do_without(runners - thread);
        break;
      }
    }
    run.work(0);
    run.wait();
  }

 private:
  template <class Body>
  class Run {
   public:
    Run(Body& body, Index tasks, Index helpers) : body_(body), tasks_(tasks), helpers_(helpers) {}

    void work(Index thread) {
      Index task = 0;
      try {
        for (task = next_++; task < tasks_; task = next_++) body_(task, thread);
      } catch (...) {
        next_ = tasks_;
        const std::scoped_lock lock(mutex_);
        if (error_ && failed_task_ < task) return;
        error_ = std::current_exception();
        failed_task_ = task;
      }
    }
    void help(Index thread) {
      work(thread);
      const std::scoped_lock lock(mutex_);  // held to the end: the waiting thread destroys this
      if (--helpers_ == 0) ended_.notify_one();
    }
    void do_without(Index helpers) {
      const std::scoped_lock lock(mutex_);
      helpers_ -= helpers;
    }
    void wait() {
      // The others end at nearly the same time: to sleep and to be woken would take longer.
      static constexpr int worth_a_look = 1000;
      for (int look = 0; look < worth_a_look && helpers_ != 0; ++look) std::this_thread::yield();
      std::unique_lock lock(mutex_);
      ended_.wait(lock, [&] { return helpers_ == 0; });
      if (error_) std::rethrow_exception(error_);
    }

   private:
    Body& body_;
    const Index tasks_;
    std::atomic<Index> next_ = 0;
    std::mutex mutex_;
    std::condition_variable ended_;
    std::atomic<Index> helpers_;
    std::exception_ptr error_;
    Index failed_task_ = 0;
  };

  const void* device_ = nullptr;
  Index threads_ = 1;
  bool (*is_pool_thread_)(const void*) = nullptr;
  void (*schedule_)(const void*, std::function<void()>) = nullptr;
};

}  // namespace vha
