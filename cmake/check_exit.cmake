# SPDX-License-Identifier: Apache-2.0
# cmake -DPROGRAM=... -DARGUMENTS="..." -DSTATUS=N -DOUTPUT=REGEX -P check_exit.cmake
# Runs the program; its exit status must match STATUS, and what it prints must match OUTPUT.
cmake_minimum_required(VERSION 3.22)

separate_arguments(arguments UNIX_COMMAND "${ARGUMENTS}")
execute_process(
  COMMAND "${PROGRAM}" ${arguments}
  RESULT_VARIABLE status
  OUTPUT_VARIABLE output
  ERROR_VARIABLE errors)
if(NOT status MATCHES "^${STATUS}$")
  message(FATAL_ERROR "exit status ${status}, expected ${STATUS}:\n${output}${errors}")
endif()
if(NOT "${output}${errors}" MATCHES "${OUTPUT}")
  message(FATAL_ERROR "expected output like \"${OUTPUT}\", got:\n${output}${errors}")
endif()
