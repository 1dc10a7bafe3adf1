// The rows of a feature, as kernels that pool it meet them.
#pragma once

#include <cstdint>

#include "sok/combine.h"
#include "sok/initializer.h"
#include "vector4.h"

namespace sok {

struct FeatureRow {
  const float* at;  // null: a row of zeros, or a fresh one
  bool is_fresh;
};

// The row at a position. first_bad: null, or where an index that is too large is reported.
template <bool kFresh>
__device__ __forceinline__ FeatureRow RowAt(const DeviceFeature& feature, int64_t position, uint64_t* first_bad) {
  int64_t index = feature.index == nullptr ? position : feature.index[position];
  if (index < 0) {
    return {nullptr, kFresh && feature.fresh.is_on() && feature.fresh.Has(feature.fresh.keys.At(position))};
  }
  if (feature.rows.slabs != nullptr) index &= 0xFFFFFFFFll;  // a row id (DeviceTable)
  if (index >= feature.num_rows) {
    ReportBad(first_bad, position);
    return {nullptr, false};
  }
  return {feature.rows.At(index), false};
}

// Columns column .. column + 3, a multiple of four, of the fresh row of a key; those at dim and behind are not to be used.
// A function of its own: it is long, and seldom called.
SOK_OUT_OF_LINE __device__ inline Vector4 FreshColumns(const DeviceFeature& feature, uint64_t key, int64_t column) {
  Vector4 value;
  FreshElements(feature.fresh.initializer, key, feature.dim, column / 4, value.x);
  return value;
}

}  // namespace sok
