// A stable sort of small numbers that says where each came from.
#pragma once

#include <cstdint>

#include "launch.h"
#include "primitives.h"

namespace sok {

template <class T>  // a template only so that it may stand in a header
__global__ void PositionsKernel(T* positions, int64_t n) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) positions[i] = static_cast<T>(i);
}

// sorted[k] = numbers[positions[k]], ascending, equal ones in order of position. Numbers are at most `largest`: the sort
// looks at so many bits and no more. n < 2^31. The results are scratch.
inline void SortPositions(const Cuda& cuda, DeviceScratch* scratch, const uint32_t* numbers, int64_t n,
                          uint32_t largest, const uint32_t** sorted, const uint32_t** positions) {
  uint32_t* sorted_numbers = scratch->Get<uint32_t>(n);
  uint32_t* given = scratch->Get<uint32_t>(n);
  uint32_t* moved = scratch->Get<uint32_t>(n);
  int bits = 1;  // CUB sorts by one bit at least
  while (bits < 32 && (largest >> bits) != 0) ++bits;
  Launch(PositionsKernel<uint32_t>, GridFor(n, 256), 256, 0, cuda, given, n);
  SortPairs(cuda, scratch, numbers, given, n, bits, sorted_numbers, moved);
  *sorted = sorted_numbers;
  *positions = moved;
}

}  // namespace sok
