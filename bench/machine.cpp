// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <fstream>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>
#include <vha/ops/lanes.hpp>
#include <vha/ops/matrix_tiles.hpp>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace bench {

namespace {

using Clock = std::chrono::steady_clock;
using Eigen::Index;

template <class T>
using Packet = typename Eigen::internal::packet_traits<T>::type;
template <class T>
constexpr Index lanes = Eigen::internal::unpacket_traits<Packet<T>>::size;

/// Keeps `value`, and so what it was computed from, from being optimised away.
template <class T>
void keep(const T& value) {
  [[maybe_unused]] static thread_local volatile T sink;
  sink = value;
}

template <std::size_t Count, class Body>
void unrolled(Body&& body) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (body(std::integral_constant<std::size_t, I>{}), ...);
  }
  (std::make_index_sequence<Count>{});
}

// Independent sums: as many as hide the latency of two multiply-adds a cycle, fewer than the 16
// registers of AVX2.
constexpr std::size_t chains = 12;
constexpr int repeats = 4096;

/// One pass of multiply-adds; returns its FLOPs.
template <class T>
double multiply_add_pass() {
  namespace packet = Eigen::internal;
  Packet<T> sums[chains];
  unrolled<chains>([&](auto i) { sums[i] = packet::pset1<Packet<T>>(static_cast<T>(i())); });
  const auto factor = packet::pset1<Packet<T>>(T(0.75));
  const auto term = packet::pset1<Packet<T>>(T(0.25));
  for (int k = 0; k < repeats; ++k) {
    unrolled<chains>([&](auto i) { sums[i] = packet::pmadd(sums[i], factor, term); });
  }
  unrolled<chains>([&](auto i) { keep(packet::pfirst(sums[i])); });
  return 2.0 * chains * repeats * lanes<T>;
}

#ifdef __AVX512BF16__
double bf16_dot_pass() {
  __m512 sums[chains];
  unrolled<chains>([&](auto i) { sums[i] = _mm512_set1_ps(static_cast<float>(i())); });
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5F), _mm512_set1_ps(-0.5F));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.25F), _mm512_set1_ps(0.25F));
  for (int k = 0; k < repeats; ++k) {
    unrolled<chains>([&](auto i) { sums[i] = _mm512_dpbf16_ps(sums[i], a, b); });
  }
  unrolled<chains>([&](auto i) { keep(_mm512_cvtss_f32(sums[i])); });
  return 2.0 * 2 * chains * repeats * 16;
}
#endif

bool uses_matrix_tiles() {
  return vha::detail::has_matrix_tiles && vha::detail::may_use_matrix_tiles();
}

double matrix_tile_pass() {
  const vha::detail::TileRegisters registers;
  vha::detail::HardwareTiles tiles;
  for (int k = 0; k < repeats; ++k) {
    tiles.multiply_add<0, 4, 6>();
    tiles.multiply_add<1, 4, 7>();
    tiles.multiply_add<2, 5, 6>();
    tiles.multiply_add<3, 5, 7>();
  }
  return 2.0 * 4 * repeats * 16 * 16 * 32;
}

double pass(Element element) {
  if (element == Element::float64) return multiply_add_pass<double>();
  if (element == Element::bf16 && uses_matrix_tiles()) return matrix_tile_pass();
#ifdef __AVX512BF16__
  if (element == Element::bf16 && vha::detail::has_bfloat16_dot) return bf16_dot_pass();
#endif
  return multiply_add_pass<float>();
}

/// In windows of `milliseconds` every thread calls `body(thread)`, which returns how much it did, for
/// that long: the median of all threads' units per second together. Threads start on one core and
/// take a while to part, so the first windows do not count.
template <class Body>
double rate(int threads, int milliseconds, Body body) {
  constexpr int windows = 8, first = 3;
  std::vector<std::vector<double>> rates(windows);
  for (auto& window : rates) window.resize(static_cast<std::size_t>(threads));
  std::barrier start(threads);
  const auto run = [&](int thread) {
    for (auto& window : rates) {
      start.arrive_and_wait();
      const auto begin = Clock::now();
      std::chrono::duration<double> elapsed{};
      double done = 0;
      do {
        done += body(thread);
        elapsed = Clock::now() - begin;
      } while (elapsed < std::chrono::milliseconds(milliseconds));
      window[static_cast<std::size_t>(thread)] = done / elapsed.count();
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (auto& other : others) other.join();
  std::vector<double> sums;
  for (int w = first; w < windows; ++w) {
    const auto& window = rates[static_cast<std::size_t>(w)];
    sums.push_back(std::accumulate(window.begin(), window.end(), 0.0));
  }
  const auto middle = sums.begin() + static_cast<std::ptrdiff_t>(sums.size() / 2);
  std::nth_element(sums.begin(), middle, sums.end());
  return *middle;
}

/// Adds up `count` floats, so that they are read and nothing else takes time.
double read_pass(const float* data, Index count) {
  namespace packet = Eigen::internal;
  constexpr Index step = lanes<float> * static_cast<Index>(chains);
  Packet<float> sums[chains];
  unrolled<chains>([&](auto i) { sums[i] = packet::pset1<Packet<float>>(0.0F); });
  for (Index at = 0; at + step <= count; at += step) {
    unrolled<chains>([&](auto i) {
      const float* const address = data + at + static_cast<Index>(i()) * lanes<float>;
      sums[i] = packet::padd(sums[i], packet::ploadu<Packet<float>>(address));
    });
  }
  unrolled<chains>([&](auto i) { keep(packet::pfirst(sums[i])); });
  return static_cast<double>(count) * sizeof(float);
}

}  // namespace

const char* to_string(Element element) {
  switch (element) {
    case Element::float64:
      return "float64";
    case Element::float32:
      return "float32";
    case Element::bf16:
      break;
  }
  return "bf16";
}

std::size_t size_of(Element element) {
  return element == Element::float64 ? 8 : element == Element::float32 ? 4 : 2;
}

int hardware_threads() {
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

double peak_flops(Element element, int threads) {
  return rate(threads, 4, [=](int) { return pass(element); });
}

double read_bandwidth(std::size_t bytes, int threads) {
  static Eigen::VectorXf memory;  // touched once: fresh pages are dear
  const auto count = static_cast<Index>(bytes / sizeof(float));
  if (memory.size() < count) memory = Eigen::VectorXf::Ones(count);
  const Index part = count / threads;
  return rate(threads, 10, [=](int thread) { return read_pass(&memory[part * thread], part); });
}

std::string machine_name() {
  std::string processor = "unknown processor";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (!line.starts_with("model name")) continue;
    processor = line.substr(line.find(':') + 2);
    break;
  }
  const auto width = std::to_string(sizeof(Packet<float>) * 8);
  std::string text = processor + ", " + std::to_string(hardware_threads()) +
                     " threads, packets of " + width + " bits";
  if (vha::detail::has_bfloat16_dot) text += ", bf16 dot products";
  if (uses_matrix_tiles()) text += ", bf16 matrix tiles";
#ifdef __VERSION__
  text += ", compiler " __VERSION__;
#endif
  return text;
}

}  // namespace bench
