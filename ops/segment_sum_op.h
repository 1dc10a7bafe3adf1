// What segment sums check, on every device.
#pragma once

#include <cstdint>
#include <string>

#include "op.h"

namespace sok {

// The shape of the sums; `dim`: elements of one. Throws InvalidArgument.
inline TensorShape SegmentSumShape(const Tensor& data, const Tensor& ids, int64_t segments, int64_t* dim) {
  if (segments < 0) {
    throw InvalidArgument("`num_segments` must not be negative. Received: " + std::to_string(segments) + ".");
  }
  if (!tensorflow::TensorShapeUtils::StartsWith(data.shape(), ids.shape())) {
    throw InvalidArgument("`data` must have a shape that starts with that of `segment_ids`. Received: data " +
                          data.shape().DebugString() + ", segment_ids " + ids.shape().DebugString() + ".");
  }
  TensorShape shape = CheckedShape({segments});
  *dim = 1;
  for (int d = ids.dims(); d < data.dims(); ++d) {
    Check(shape.AddDimWithStatus(data.dim_size(d)));
    *dim *= data.dim_size(d);
  }
  CheckedShape({segments, *dim});
  return shape;
}

}  // namespace sok
