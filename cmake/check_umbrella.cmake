# SPDX-License-Identifier: Apache-2.0
# cmake -DINCLUDE_DIR=... -P check_umbrella.cmake
# vha.hpp must include every header except those that need more than Eigen: the checkpoint headers, for
# a JSON library, and the one for MPI. No other header may include them or what they need.
cmake_minimum_required(VERSION 3.22)

file(READ "${INCLUDE_DIR}/vha/vha.hpp" umbrella)
file(GLOB_RECURSE headers RELATIVE "${INCLUDE_DIR}" "${INCLUDE_DIR}/vha/*.hpp")
list(FILTER headers EXCLUDE REGEX "^vha/checkpoint/|/mpi_communicator.hpp$")
foreach(header IN LISTS headers)
  string(FIND "\n${umbrella}" "\n#include <${header}>" angled)
  string(FIND "\n${umbrella}" "\n#include \"${header}\"" quoted)
  if(angled EQUAL -1 AND quoted EQUAL -1 AND NOT header STREQUAL "vha/vha.hpp")
    message(SEND_ERROR "vha/vha.hpp does not include ${header}")
  endif()
  file(STRINGS "${INCLUDE_DIR}/${header}" optional REGEX "^#include.*(checkpoint/|nlohmann/|mpi_communicator|mpi\\.h)")
  if(optional)
    message(SEND_ERROR "${header} includes what needs more than Eigen: ${optional}")
  endif()
endforeach()
