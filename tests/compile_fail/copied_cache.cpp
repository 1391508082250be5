// SPDX-License-Identifier: Apache-2.0
// expect: KvCache.*(private|deleted)
#include <vha/attention/kv_cache.hpp>

vha::KvCache<float> fork(const vha::KvCache<float>& cache) {
#ifdef VHA_COMPILE_FAIL
  return cache;
#else
  return cache.copy();
#endif
}
