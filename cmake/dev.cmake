# SPDX-License-Identifier: Apache-2.0
# What vha's own tests, benchmarks and examples compile with; consumers get none of it.

# What needs these two is left out where they are absent; nothing else in vha uses them.
find_package(nlohmann_json 3 QUIET)
if(NOT TARGET nlohmann_json::nlohmann_json)
  message(STATUS "vha: no nlohmann_json (Debian: nlohmann-json3-dev), so leaving out the checkpoint "
                 "headers' tests, the case tests and vha_check")
endif()
if(VHA_BUILD_EXAMPLES)
  find_package(CLI11 QUIET)
  if(NOT TARGET CLI11::CLI11)
    message(STATUS "vha: no CLI11 (Debian: libcli11-dev), so leaving out vha_check")
  endif()
endif()
# What runs on several ranks. Not under the sanitizers: MPI's own leaks would be reported.
if(NOT VHA_SANITIZE)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS CXX)
  if(NOT MPI_CXX_FOUND)
    message(STATUS "vha: no MPI (Debian: libopenmpi-dev), so leaving out vha_parallel and what else runs "
                   "on several ranks")
  endif()
endif()

add_library(vha_dev_any_processor INTERFACE)
target_link_libraries(vha_dev_any_processor INTERFACE vha::vha)
add_library(vha_dev INTERFACE)
target_link_libraries(vha_dev INTERFACE vha_dev_any_processor)
if(NOT MSVC)
  target_compile_options(
    vha_dev_any_processor INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
                      $<$<BOOL:${VHA_WERROR}>:-Werror>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of its own AVX-512 intrinsics, wherever one is inlined (GCC bug 105593).
  target_compile_options(vha_dev_any_processor INTERFACE -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

if(VHA_NATIVE)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native VHA_HAVE_MARCH_NATIVE)
  if(VHA_HAVE_MARCH_NATIVE)
    target_compile_options(vha_dev INTERFACE -march=native)
  endif()
endif()

if(VHA_SANITIZE)
  target_compile_options(vha_dev_any_processor INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all
                                           -fno-omit-frame-pointer)
  target_link_options(vha_dev_any_processor INTERFACE -fsanitize=address,undefined)
endif()
