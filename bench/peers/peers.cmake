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
