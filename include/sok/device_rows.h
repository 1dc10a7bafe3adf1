// Where a kernel finds rows, records of a table, in slabs, or one matrix; and where it notes which of them it writes.
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

// Where a kernel that writes rows says so, for a save of what has changed: one byte a row, by plain stores. A row has one
// writer in a launch, and all write the same.
struct RowNotes {
  uint8_t* marks = nullptr;  // [num_rows] on the device; null: nobody wants to know
  uint8_t mark = 0;          // grows from save to save

  SOK_HOST_DEVICE void Note(int64_t row) const {
    if (marks != nullptr) marks[row] = mark;
  }
};

// Which rows a list is of.
struct RowFilter {
  const uint8_t* marks = nullptr;  // as of RowNotes; null: all rows
  uint8_t above = 0;               // those with a higher mark

  SOK_HOST_DEVICE bool Has(int64_t row) const { return marks == nullptr || marks[row] > above; }
};

// A matrix that kernels only read may be const to its owner.
inline DeviceRows MatrixRows(const float* matrix, int64_t stride) {
  DeviceRows rows;
  rows.matrix = const_cast<float*>(matrix);
  rows.stride = stride;
  return rows;
}

}  // namespace sok
