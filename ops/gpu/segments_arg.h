// Row splits on a GPU, as kernels take them.
#pragma once

#include <cstdint>

#include "../op.h"
#include "sok/combine.h"
#include "sok/error.h"

namespace sok {

// n positions in the segments of row_splits [S + 1]. What they hold is on the device, where the kernels look at it: segments
// that make no sense are empty.
inline DeviceSegments SegmentsArg(const Tensor& row_splits, int64_t n) {
  CheckRank(row_splits, 1, "row_splits");
  if (row_splits.NumElements() == 0)
    throw InvalidArgument("`row_splits` must start with 0. Received: an empty tensor.");
  DeviceSegments segments;
  segments.row_splits = Int64(row_splits);
  segments.segments = row_splits.NumElements() - 1;
  segments.n = n;
  return segments;
}

}  // namespace sok
