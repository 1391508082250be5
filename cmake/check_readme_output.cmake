# SPDX-License-Identifier: Apache-2.0
# cmake -DREADME=... -DPROGRAM=... -DARGUMENTS="..." -P check_readme_output.cmake
# The README must have, byte for byte and in one piece, the table that the program prints: its lines that
# begin with "|".
cmake_minimum_required(VERSION 3.22)

separate_arguments(arguments UNIX_COMMAND "${ARGUMENTS}")
execute_process(COMMAND "${PROGRAM}" ${arguments} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "(\\|[^\n]*\n)+" table "${output}")
file(READ "${README}" readme)
string(FIND "${readme}" "\n${table}" position)
if(table STREQUAL "" OR position EQUAL -1)
  message(FATAL_ERROR "${README} lacks what ${PROGRAM} ${ARGUMENTS} prints:\n${output}")
endif()
