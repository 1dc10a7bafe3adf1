// Whether ids are rows of a matrix and row splits fit them.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/first_bad.h"

namespace sok {

// The position of the first id outside [0, num_rows), or n.
int64_t FirstOutside(const int64_t* ids,  // [n]
                     int64_t n, int64_t num_rows);

// The first position whose number is below the one before it, or num_splits. The first number must not be negative.
int64_t FirstFall(const int64_t* row_splits,  // [num_splits]
                  int64_t num_splits);

// ---- On a device

// first_bad: lowered to the position of an id outside [0, num_rows), or to n + s where row_splits[s] is wrong: the first is not
// 0, one is below the one before it, or the last is not n. Nothing waits.
void CheckIds(const Cuda& cuda,
              const int64_t* ids,  // [n]
              int64_t n, int64_t num_rows,
              const int64_t* row_splits,  // [num_splits]
              int64_t num_splits,         // 0: not looked at
              uint64_t* first_bad);       // [1]

}  // namespace sok
