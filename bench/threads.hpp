// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vha/core/awake_threads.hpp>
#include <vha/core/executor.hpp>

namespace bench {

/// `count` threads, the calling one among them. They stay awake between calls, as the peers' do.
class Threads {
 public:
  explicit Threads(int count) : pool_(std::max(1, count - 1)), device_(&pool_, count) {}
  vha::Executor executor() const { return awake_; }

 private:
  Eigen::ThreadPool pool_;
  Eigen::ThreadPoolDevice device_;
  vha::AwakeThreads<Eigen::ThreadPoolDevice> awake_{device_};
};

}  // namespace bench
