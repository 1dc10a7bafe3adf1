// Where a kernel finds rows: records of a table, in slabs, or one matrix.
#pragma once

#include <cstdint>

#include "sok/philox.h"

namespace sok {

// Trivially copyable, passed by value. Offsets are 64 bits wide: a table may have more than 2^32 bytes.
struct DeviceRows {
  float* const* slabs = nullptr;  // of a table, on the device; null: one matrix
  float* matrix = nullptr;
  int shift = 0;       // row r lies in slab r >> shift
  int64_t mask = 0;    // and there it is number r & mask
  int64_t stride = 0;  // floats from row to row

  SOK_HOST_DEVICE float* At(int64_t row) const {
    return slabs == nullptr ? matrix + row * stride : slabs[row >> shift] + (row & mask) * stride;
  }
};

// A matrix that kernels only read may be const to its owner.
inline DeviceRows MatrixRows(const float* matrix, int64_t stride) {
  DeviceRows rows;
  rows.matrix = const_cast<float*>(matrix);
  rows.stride = stride;
  return rows;
}

}  // namespace sok
