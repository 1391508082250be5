# SPDX-License-Identifier: Apache-2.0
# cmake -DPROGRAM=... -DARGUMENTS="..." -DKEY="a|0|b" -DVALUE=REGEX -P check_json.cmake
# Runs the program; what it prints must be JSON whose value at KEY begins like VALUE.
cmake_minimum_required(VERSION 3.22)

separate_arguments(arguments UNIX_COMMAND "${ARGUMENTS}")
execute_process(
  COMMAND "${PROGRAM}" ${arguments}
  RESULT_VARIABLE status
  OUTPUT_VARIABLE output
  ERROR_VARIABLE errors)
string(REPLACE "|" ";" path "${KEY}")
string(JSON value ERROR_VARIABLE error GET "${output}" ${path})
if(NOT status EQUAL 0 OR error OR NOT value MATCHES "^${VALUE}")
  message(FATAL_ERROR "exit status ${status}, ${KEY}: \"${value}\", expected \"${VALUE}\" (${error}):\n${output}${errors}")
endif()
