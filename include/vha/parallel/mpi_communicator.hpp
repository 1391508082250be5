// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <span>
#include <string>
#include <vha/core/error.hpp>
#include <vha/core/scalar.hpp>
#include <vha/parallel/communicator.hpp>

// Not part of vha.hpp: whoever includes this has MPI's headers and links its library.

namespace vha {

namespace detail {

/// Throws Error with MPI's own words.
inline void require_mpi(const char* call, int code) {
  if (code == MPI_SUCCESS) return;
  std::string message(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, message.data(), &length) != MPI_SUCCESS) length = 0;
  message.resize(static_cast<std::size_t>(length));
  raise(call, "success", message.empty() ? text("error ", code) : message);
}

}  // namespace detail

/// MPI for as long as this lives: one in a program, made first in `main`, unless the program calls
/// MPI_Init and MPI_Finalize itself. Where an exception leaves its scope it ends all ranks by MPI_Abort, for
/// those that wait for this one would wait for ever; catch inside of it what must not have that effect.
class MpiSession {
 public:
  /// Throws Error where MPI cannot start, or was started before.
  MpiSession() {
    int started = 0;
    detail::require_mpi("MPI_Initialized", MPI_Initialized(&started));
    if (started != 0) raise("MpiSession", "MPI not yet started", "MPI started before");
    // Other threads than this one only compute.
    int provided = MPI_THREAD_SINGLE;
    detail::require_mpi("MPI_Init_thread",
                        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
    if (provided >= MPI_THREAD_FUNNELED) return;
    MPI_Finalize();
    raise("MPI", "MPI_THREAD_FUNNELED", text("level ", provided));
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  ~MpiSession() {
    if (std::uncaught_exceptions() > exceptions_) MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Finalize();
  }

 private:
  int exceptions_ = std::uncaught_exceptions();
};

/// The ranks of an MPI communicator, as a Communicator. They add up by MPI_Allreduce, in the memory that
/// the sum is asked for in.
///
/// That every rank gets the same bits, and gets them again, is what the MPI standard asks implementations
/// to see to ("advice to implementors" of MPI_REDUCE) and what Open MPI and MPICH do among the same ranks on
/// the same machines.
///
/// Its calls are on the calling thread, which must be the one that started MPI. A rank that dies is
/// mpirun's to notice, which then ends the others.
class MpiCommunicator {
 public:
  /// Takes a duplicate of `ranks`, so that nothing of the caller's own is mixed with it; all of its ranks
  /// make one at once. Throws Error where MPI is not running or refuses.
  explicit MpiCommunicator(MPI_Comm ranks = MPI_COMM_WORLD) {
    require_running();
    if (ranks == MPI_COMM_NULL) raise("ranks", "a communicator of MPI", "MPI_COMM_NULL");
    detail::require_mpi("MPI_Comm_dup", MPI_Comm_dup(ranks, &ranks_));
    detail::require_mpi("MPI_Comm_set_errhandler",
                        MPI_Comm_set_errhandler(ranks_, MPI_ERRORS_RETURN));
    detail::require_mpi("MPI_Comm_rank", MPI_Comm_rank(ranks_, &rank_));
    detail::require_mpi("MPI_Comm_size", MPI_Comm_size(ranks_, &size_));
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  ~MpiCommunicator() {
    int ended = 0;
    // Ranks free it together, which one that leaves by an exception must not wait for.
    if (std::uncaught_exceptions() <= exceptions_ && MPI_Finalized(&ended) == MPI_SUCCESS &&
        ended == 0) {
      MPI_Comm_free(&ranks_);
    }
  }

  Index rank() const { return rank_; }
  Index size() const { return size_; }
  MPI_Comm mpi() const { return ranks_; }

  /// See Communicator. Throws Error where MPI reports one, after which the ranks are no longer in step.
  template <ComputeScalar T>
  void sum(std::span<T> values) {
    if (size_ == 1) return;
    constexpr std::size_t most_at_once = std::size_t{1} << 30U;  // MPI counts in int
    while (!values.empty()) {
      const auto part = values.first(std::min(values.size(), most_at_once));
      detail::require_mpi(
          "MPI_Allreduce",
          MPI_Allreduce(MPI_IN_PLACE, part.data(), static_cast<int>(part.size()),
                        std::same_as<T, float> ? MPI_FLOAT : MPI_DOUBLE, MPI_SUM, ranks_));
      values = values.subspan(part.size());
    }
  }

 private:
  static void require_running() {
    int started = 0, ended = 0;
    detail::require_mpi("MPI_Initialized", MPI_Initialized(&started));
    detail::require_mpi("MPI_Finalized", MPI_Finalized(&ended));
    if (started == 0) raise("MPI", "to have been started, as by an MpiSession", "not so");
    if (ended != 0) raise("MPI", "to be running", "finalized");
  }

  MPI_Comm ranks_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  int exceptions_ = std::uncaught_exceptions();
};

static_assert(Communicator<MpiCommunicator>);

}  // namespace vha
