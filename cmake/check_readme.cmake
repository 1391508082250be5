# SPDX-License-Identifier: Apache-2.0
# cmake -DREADME=... -DSOURCE=... -P check_readme.cmake
# The README's first C++ block must be, byte for byte, SOURCE without its leading comment lines.
cmake_minimum_required(VERSION 3.22)

file(READ "${README}" readme)
string(FIND "${readme}" "\n```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "${README} has no C++ block")
endif()
math(EXPR begin "${begin} + 8")
string(SUBSTRING "${readme}" ${begin} -1 block)
string(FIND "${block}" "```" length)
string(SUBSTRING "${block}" 0 ${length} block)

file(READ "${SOURCE}" source)
while(source MATCHES "^(//[^\n]*)?\n")
  string(LENGTH "${CMAKE_MATCH_0}" length)
  string(SUBSTRING "${source}" ${length} -1 source)
endwhile()

if(NOT block STREQUAL source)
  message(FATAL_ERROR "The first C++ block of ${README} is not the code of ${SOURCE}:\n${block}")
endif()
