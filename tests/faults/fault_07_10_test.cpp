// SPDX-License-Identifier: Apache-2.0
#include "fault_07_softmax.hpp"
#include "fault_10_unwritten_cache.hpp"
