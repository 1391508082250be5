# SPDX-License-Identifier: Apache-2.0
# Other libraries that the benchmarks compare with, each where it is found. Their headers are system
# headers: what they warn of is not ours.

# vha_bench_add_peer(name): compiles peers/<name>.cpp into the benchmarks.
function(vha_bench_add_peer name)
  string(TOUPPER ${name} upper)
  target_sources(vha_bench PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.cpp")
  target_compile_definitions(vha_bench PRIVATE VHA_BENCH_${upper})
  message(STATUS "vha: benchmarks compare with ${name}")
endfunction()

function(vha_bench_miss_peer name package)
  message(STATUS "vha: no ${name} (Debian: ${package}), so benchmarks do not compare with it")
endfunction()

vha_bench_add_peer(eigen)

find_path(VHA_OPENBLAS_INCLUDE openblas_config.h PATH_SUFFIXES openblas-pthread openblas)
find_library(VHA_OPENBLAS openblas)
if(VHA_OPENBLAS AND VHA_OPENBLAS_INCLUDE)
  target_include_directories(vha_bench SYSTEM PRIVATE "${VHA_OPENBLAS_INCLUDE}")
  target_link_libraries(vha_bench PRIVATE "${VHA_OPENBLAS}")
  vha_bench_add_peer(openblas)
else()
  vha_bench_miss_peer(openblas libopenblas-dev)
endif()

# The OpenMP of both libraries, which they take their threads from.
find_library(VHA_GOMP NAMES gomp libgomp.so.1 HINTS ${CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES})

# Neither by its own package file: Debian's ask for libraries that using these two does not need.
find_path(VHA_ONEDNN_INCLUDE oneapi/dnnl/dnnl.hpp)
find_library(VHA_ONEDNN dnnl)
if(VHA_ONEDNN AND VHA_ONEDNN_INCLUDE AND VHA_GOMP)
  target_include_directories(vha_bench SYSTEM PRIVATE "${VHA_ONEDNN_INCLUDE}")
  target_link_libraries(vha_bench PRIVATE "${VHA_ONEDNN}" "${VHA_GOMP}")
  vha_bench_add_peer(onednn)
else()
  vha_bench_miss_peer(onednn "libdnnl-dev, and libgomp")
endif()

find_path(VHA_TORCH_INCLUDE ATen/ATen.h)
find_path(VHA_TORCH_API torch/version.h PATH_SUFFIXES torch/csrc/api/include)
find_library(VHA_TORCH_CPU torch_cpu)
find_library(VHA_TORCH_C10 c10)
if(VHA_TORCH_INCLUDE)
  # Torch 1.13's headers are not C++20 to every compiler (clang 14).
  include(CheckCXXSourceCompiles)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # to compile, not to link
  set(CMAKE_CXX_STANDARD 20)
  set(CMAKE_REQUIRED_INCLUDES "${VHA_TORCH_INCLUDE}")
  check_cxx_source_compiles("#include <ATen/ATen.h>\nint main() {}" VHA_TORCH_COMPILES)
  unset(CMAKE_REQUIRED_INCLUDES)
  unset(CMAKE_CXX_STANDARD)
  unset(CMAKE_TRY_COMPILE_TARGET_TYPE)
endif()
if(VHA_TORCH_COMPILES AND VHA_TORCH_API AND VHA_TORCH_CPU AND VHA_TORCH_C10 AND VHA_GOMP)
  target_include_directories(vha_bench SYSTEM PRIVATE "${VHA_TORCH_INCLUDE}" "${VHA_TORCH_API}")
  target_link_libraries(vha_bench PRIVATE "${VHA_TORCH_CPU}" "${VHA_TORCH_C10}" "${VHA_GOMP}"
                                          ${CMAKE_DL_LIBS})
  vha_bench_add_peer(libtorch)
else()
  vha_bench_miss_peer(libtorch "libtorch-dev, and libgomp; needs g++")
endif()

if(VHA_BENCH_GGML_DIR)
  if(NOT EXISTS "${VHA_BENCH_GGML_DIR}/include/ggml-cpu.h")
    message(FATAL_ERROR "vha: VHA_BENCH_GGML_DIR=${VHA_BENCH_GGML_DIR} is not a checkout of ggml")
  endif()
  set(BUILD_SHARED_LIBS OFF)
  add_subdirectory("${VHA_BENCH_GGML_DIR}" "${CMAKE_CURRENT_BINARY_DIR}/ggml" EXCLUDE_FROM_ALL)
  target_include_directories(vha_bench SYSTEM PRIVATE "${VHA_BENCH_GGML_DIR}/include")
  target_link_libraries(vha_bench PRIVATE ggml)
  vha_bench_add_peer(ggml)
endif()
