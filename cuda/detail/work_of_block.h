// Launches that serve many pieces of work: each has a stretch of blocks, which look up whose they are.
#pragma once

#include <cstdint>

#include "launch.h"

namespace sok {

// The last of `work` whose first_block is at most `block`.
template <class Work>
__device__ __forceinline__ const Work& WorkOfBlock(const Work* work, int64_t count, int64_t block) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (work[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return work[low];
}

}  // namespace sok
