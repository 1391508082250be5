# SPDX-License-Identifier: Apache-2.0
# Compiles SOURCE to PROGRAM, with -I for each of INCLUDES or with what pkg-config says of the vha
# in PKG_CONFIG_DIR, and runs it.
cmake_minimum_required(VERSION 3.22)

if(PKG_CONFIG)
  set(ENV{PKG_CONFIG_PATH} "${PKG_CONFIG_DIR}")
  execute_process(COMMAND "${PKG_CONFIG}" --modversion vha OUTPUT_VARIABLE version
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT version STREQUAL VHA_VERSION)
    message(FATAL_ERROR "pkg-config's version of vha is ${version}, not ${VHA_VERSION}")
  endif()
  execute_process(COMMAND "${PKG_CONFIG}" --cflags vha OUTPUT_VARIABLE flags
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags NATIVE_COMMAND "${flags}")
else()
  list(TRANSFORM INCLUDES PREPEND -I OUTPUT_VARIABLE flags)
endif()

execute_process(COMMAND "${COMPILER}" ${STANDARD} ${flags} "${SOURCE}" -o "${PROGRAM}"
                COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
