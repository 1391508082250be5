// SPDX-License-Identifier: Apache-2.0
// The processes that a tool runs in: those of mpirun, where it was built with MPI, or one alone.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vha/core/error.hpp>
#include <vha/parallel/communicator.hpp>

#include "tool.hpp"
#ifdef VHA_WITH_MPI
#include <vha/parallel/mpi_communicator.hpp>
#endif

/// How many processes mpirun or srun has started, as Open MPI, MPICH or Slurm says it.
inline int launched_processes() {
  for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    if (const char* const size = std::getenv(name)) return std::atoi(size);
  }
  return 1;
}

/// What went wrong on one rank at least, thrown on all of them.
class SharedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

#ifdef VHA_WITH_MPI

/// A Communicator. MPI is started where there is more than one process.
class Ranks {
 public:
  Ranks() {
    if (launched_processes() < 2) return;
    session_.emplace();
    communicator_.emplace();
  }

  /// Another MPI's mpirun starts processes that do not know of each other: each would do all the work.
  void require_launched() const {
    const int launched = launched_processes();
    if (size() == launched) return;
    vha::raise("mpirun",
               vha::text("that of the MPI which this was built with, and so ", launched, " ranks"),
               vha::text(size()));
  }

  vha::Index rank() const { return communicator_ ? communicator_->rank() : 0; }
  vha::Index size() const { return communicator_ ? communicator_->size() : 1; }
  template <vha::ComputeScalar T>
  void sum(std::span<T> values) {
    if (communicator_) communicator_->sum(values);
  }

  /// Rank `root`'s text, on all ranks.
  std::string broadcast(std::string text, vha::Index root = 0) {
    if (!communicator_) return text;
    const auto from = static_cast<int>(root);
    auto size = static_cast<unsigned long>(text.size());
    broadcast(&size, 1, MPI_UNSIGNED_LONG, from);
    text.resize(size);
    broadcast(text.data(), static_cast<int>(size), MPI_CHAR, from);
    return text;
  }

  /// Calls `body` and waits for the other ranks to have done so. Where it throws on any of them, all throw
  /// what the first of those threw.
  template <class Body>
  void together(const Body& body) {
    std::string error;
    int failed = static_cast<int>(size());
    try {
      body();
    } catch (const std::exception& thrown) {
      error = thrown.what();
      failed = static_cast<int>(rank());
    }
    int first = failed;
    if (communicator_) {
      vha::detail::require_mpi("MPI_Allreduce", MPI_Allreduce(&failed, &first, 1, MPI_INT, MPI_MIN,
                                                              communicator_->mpi()));
    }
    if (first == size()) return;
    error = broadcast(error, first);
    throw SharedError(first == 0 ? error : vha::text("rank ", first, ": ", error));
  }

 private:
  void broadcast(void* values, int count, MPI_Datatype type, int root) const {
    vha::detail::require_mpi("MPI_Bcast",
                             MPI_Bcast(values, count, type, root, communicator_->mpi()));
  }

  std::optional<vha::MpiSession> session_;
  std::optional<vha::MpiCommunicator> communicator_;
};

#else

class Ranks : public vha::SingleProcess {
 public:
  static void require_launched() {
    if (launched_processes() > 1) {
      vha::raise("mpirun", "a program that was built with MPI", "one that was not");
    }
  }
  std::string broadcast(std::string text) { return text; }
  template <class Body>
  void together(const Body& body) {
    body();
  }
};

#endif

/// run_tool on the ranks of mpirun: `run(ranks)` is called on each, and what it throws is printed once. What
/// one rank alone throws, not in `together`, ends all at once.
template <class Run>
int run_tool_on_ranks(CLI::App& app, const char* name, int argc, char** argv, const Run& run) {
  const auto print = [&](const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
  };
  try {
    Ranks ranks;
    int status = 1;
    try {
      ranks.require_launched();
      status = 2;  // of bad arguments
      bool has_help = false;
      ranks.together([&] {
        try {
          app.parse(argc, argv);
        } catch (const CLI::ParseError& error) {
          if (error.get_exit_code() != 0) throw;
          has_help = true;
          if (ranks.rank() == 0) app.exit(error);
        }
      });
      if (has_help) return 0;
      status = 1;
      run(ranks);
      return 0;
    } catch (const std::exception& error) {
      const bool is_shared = dynamic_cast<const SharedError*>(&error) != nullptr;
      if (ranks.rank() == 0 || !is_shared) print(error);
      if (ranks.size() > 1 && !is_shared) throw;  // out of the ranks, which ends them
      return status;
    }
  } catch (const std::exception& error) {
    print(error);
    return 1;
  }
}
