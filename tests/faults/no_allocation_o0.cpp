// SPDX-License-Identifier: Apache-2.0
// A forward that was given a workspace and a cache allocates nothing but the first time. Counted
// are the calls of operator new, and Eigen's allocations, which do without it: with
// EIGEN_RUNTIME_NO_MALLOC Eigen asserts that they are allowed.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

namespace {

std::atomic<long> allocations = 0;

void count_or_throw(std::string_view failed_assertion) {
  if (!failed_assertion.starts_with("is_malloc_allowed()")) {
    throw std::logic_error(std::string(failed_assertion));
  }
  ++allocations;
}

}  // namespace

#define EIGEN_RUNTIME_NO_MALLOC
#define eigen_assert(condition) ((condition) ? void() : count_or_throw(#condition))

#include "dynamic_head_layers.hpp"
#include "fixtures.hpp"
#include "run.hpp"

namespace {

void* counted_allocation(std::size_t size, std::size_t alignment) {
  ++allocations;
  const std::size_t padded =
      (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, padded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t size) {
  return counted_allocation(size, alignof(std::max_align_t));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return counted_allocation(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace laws {
namespace {

template <class Body>
long allocations_in(Body&& body) {
  const long before = allocations;
  Eigen::internal::set_is_malloc_allowed(false);
  body();
  Eigen::internal::set_is_malloc_allowed(true);
  return allocations - before;
}

template <class Kind>
class NoAllocation : public testing::Test {};
TYPED_TEST_SUITE(NoAllocation, Kinds);

TYPED_TEST(NoAllocation, InASecondForward) {
  using S = typename TypeParam::S;
  using T = typename TypeParam::T;
  const auto law = [](const auto& layer, const auto& x) {
    auto out = poisoned_like(x);
    vha::AttentionWorkspace<T> workspace;
    layer.forward_into(x, out, workspace);
    EXPECT_EQ(allocations_in([&] { layer.forward_into(x, out, workspace); }), 0);

    vha::KvCache<S> cache(layer.config(), 1, x.rows());
    const auto prefill_and_decode = [&] {
      const Eigen::Index half = x.rows() / 2;
      cache.reset();
      layer.forward_into(x.topRows(half), cache, out.topRows(half), workspace);
      for (Eigen::Index t = half; t < x.rows(); ++t) {
        layer.forward_into(x.middleRows(t, 1), cache, out.middleRows(t, 1), workspace);
      }
    };
    EXPECT_EQ(allocations_in(prefill_and_decode), 0);
  };
  Random random(1);
  for_each_shape<TypeParam>([&](const LayerShape& shape, naive::Index tokens) {
    const auto twin = random_gated_layer<S>(shape, random);
    const auto x = matrix_of<T>(random_tokens<T>(tokens, twin, random), tokens);
    const auto layer = library_layer<typename TypeParam::Vha>(twin);
    law(layer, x);
    law(vha::fold_vha(layer), x);
    law(library_layer<typename TypeParam::Gated>(twin), x);
  });
}

// Their logits stand in memory, and a cache that fills up makes them no longer.
TEST(NoAllocation, WhileACacheOfDynamicHeadsFills) {
  Random random(1);
  for (const auto& [name, twin] : random_dynamic_heads(random)) {
    SCOPED_TRACE(name);
    const auto layer = library_layer(twin);
    const auto x = matrix_of<double>(random_tokens<double>(81, twin, random), 81);
    auto out = poisoned_like(x);
    vha::DynamicHeadsWorkspace<double> workspace;
    vha::KvCache<double> cache(layer.cache_shape(1, 81));
    const auto decode = [&](vha::Index first, vha::Index end) {
      for (vha::Index t = first; t < end; ++t) {
        layer.forward_into(x.middleRows(t, 1), cache, out.middleRows(t, 1), workspace);
      }
    };
    decode(0, 1);
    EXPECT_EQ(allocations_in([&] { decode(1, 81); }), 0);
  }
}

TEST(NoAllocation, IsNoticedWhereThereIsOne) {
  EXPECT_EQ(allocations_in([] { std::vector<int> vector(3); }), 1);
  EXPECT_EQ(allocations_in([] { Eigen::VectorXd vector(3); }), 1);
}

}  // namespace
}  // namespace laws
