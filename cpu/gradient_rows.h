// What updates ask of row ids and gradients.
#pragma once

#include <cstdint>

namespace sok {

inline bool AllFinite(const float* x, int64_t n) {
  float sum = 0.0f;  // x * 0 is zero for a finite x, NaN for anything else
  for (int64_t i = 0; i < n; ++i) sum += x[i] * 0.0f;
  return sum == 0.0f;
}

inline uint32_t RowOf(int64_t row_id) { return static_cast<uint32_t>(row_id); }

}  // namespace sok
