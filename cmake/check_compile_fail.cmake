# SPDX-License-Identifier: Apache-2.0
# cmake -DCOMPILER=... -DFLAGS=... -DSOURCE=... -DMUST_FAIL=... -P check_compile_fail.cmake
# SOURCE must compile as it stands. With VHA_COMPILE_FAIL defined it must not, and the compiler's
# messages must match each of its lines "// expect: <CMake regex>".
cmake_minimum_required(VERSION 3.22)

set(ENV{LC_ALL} C) # plain quotes and English in the messages
if(MUST_FAIL)
  list(APPEND FLAGS -DVHA_COMPILE_FAIL)
endif()
execute_process(
  COMMAND "${COMPILER}" ${FLAGS} -fsyntax-only "${SOURCE}"
  RESULT_VARIABLE result
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output)

if(NOT MUST_FAIL)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${SOURCE} must compile, but does not:\n${output}")
  endif()
  return()
endif()

# 1 is a compiler's word that the source is wrong; a crash, or no compiler, is something else.
if(NOT result EQUAL 1)
  message(FATAL_ERROR "${SOURCE} must be rejected, but the compiler's result is ${result}:\n${output}")
endif()
file(STRINGS "${SOURCE}" expectations REGEX "^// expect: ")
if(NOT expectations)
  message(FATAL_ERROR "${SOURCE} has no line \"// expect: <regex>\"")
endif()
foreach(expectation IN LISTS expectations)
  string(REGEX REPLACE "^// expect: " "" expectation "${expectation}")
  if(NOT output MATCHES "${expectation}")
    message(FATAL_ERROR "${SOURCE}: no compiler message matches \"${expectation}\":\n${output}")
  endif()
endforeach()
