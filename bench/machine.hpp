// SPDX-License-Identifier: Apache-2.0
// What the machine can do at most, measured: the peaks that the benchmarks' shares are of.
#pragma once

#include <cstddef>
#include <string>

namespace bench {

/// What the multiply-adds are of. bf16 products are summed in float.
enum class Element { float64, float32, bf16 };

const char* to_string(Element element);
std::size_t size_of(Element element);

/// Logical processors.
int hardware_threads();

/// Multiply-adds from registers, on `threads` threads, in FLOP/s; of bf16 by its dot products where
/// the library uses them, else as float32. Takes some 25 ms: it is measured anew each time.
double peak_flops(Element element, int threads);

/// Reading `bytes` of memory again and again, on `threads` threads with a part each, in bytes/s.
double read_bandwidth(std::size_t bytes, int threads);

/// The processor's name, threads, vector width and compiler, in one line.
std::string machine_name();

}  // namespace bench
