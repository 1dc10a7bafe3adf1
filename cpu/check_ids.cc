#include "sok/check_ids.h"

#include <algorithm>

#include "row_kernels.h"

namespace sok {

int64_t FirstOutside(const int64_t* ids, int64_t n, int64_t num_rows) {
  const uint64_t limit = static_cast<uint64_t>(num_rows);
  if (ChosenRowKernels().all_below(reinterpret_cast<const uint64_t*>(ids), n, limit)) return n;
  return std::find_if(ids, ids + n, [&](int64_t id) { return static_cast<uint64_t>(id) >= limit; }) - ids;
}

int64_t FirstFall(const int64_t* row_splits, int64_t num_splits) {
  if (ChosenRowKernels().never_falls(row_splits, num_splits)) return num_splits;
  return std::is_sorted_until(row_splits, row_splits + num_splits) - row_splits;
}

}  // namespace sok
