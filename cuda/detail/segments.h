// Segments as kernels meet them: from a position to the segment that has it.
#pragma once

#include <cstdint>

#include "launch.h"
#include "sok/combine.h"

namespace sok {

// The segment that holds position i, or -1 where none does. A position looks for its segment, and not the other way round,
// so that a long segment does not keep one thread busy.
__device__ __forceinline__ int64_t SegmentOf(const DeviceSegments& segments, int64_t i) {
  int64_t low = 0, high = segments.segments;
  if (segments.row_splits == nullptr) {
    low = segments.hotness == 0 ? 0 : i / segments.hotness;
  } else {
    while (high - low > 1) {  // the last segment that begins at i or before
      const int64_t middle = low + (high - low) / 2;
      if (segments.row_splits[middle] <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
  }
  if (low >= segments.segments) return -1;
  int64_t first, last;
  segments.Bounds(low, &first, &last);
  return first <= i && i < last ? low : -1;
}

// SegmentScale of every segment; 0 where row_splits make no sense.
void SegmentScales(const Cuda& cuda, const DeviceSegments& segments,
                   const float* weights,  // [n] or null
                   Combiner combiner,
                   float* scales);  // [segments]

}  // namespace sok
