# SPDX-License-Identifier: Apache-2.0
# What each CMake consumer does once it has vha::vha.

# Of vha's settings for itself, nothing may reach a consumer.
foreach(option VHA_BUILD_TESTS VHA_BUILD_BENCH VHA_BUILD_EXAMPLES VHA_INSTALL VHA_NATIVE)
  if(${option})
    message(FATAL_ERROR "${option} is on in a consumer")
  endif()
endforeach()
foreach(target vha_dev check exactness fold_exactness GTest::gtest benchmark::benchmark
               nlohmann_json::nlohmann_json CLI11::CLI11)
  if(TARGET ${target})
    message(FATAL_ERROR "A consumer has vha's target ${target}")
  endif()
endforeach()
foreach(property INTERFACE_COMPILE_OPTIONS INTERFACE_COMPILE_DEFINITIONS INTERFACE_LINK_OPTIONS)
  get_target_property(value vha::vha ${property})
  if(value)
    message(FATAL_ERROR "vha::vha gives a consumer ${property} ${value}")
  endif()
endforeach()
if(CMAKE_BUILD_TYPE)
  message(FATAL_ERROR "vha chose a consumer's build type: ${CMAKE_BUILD_TYPE}")
endif()

add_executable(consumer "${CMAKE_CURRENT_LIST_DIR}/main.cpp")
target_link_libraries(consumer PRIVATE vha::vha)
