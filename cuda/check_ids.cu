#include "sok/check_ids.h"

#include "detail/launch.h"
#include "detail/vector4.h"

namespace sok {
namespace {

__global__ void CheckIdsKernel(const int64_t* ids, int64_t n, int64_t num_rows, uint64_t* first_bad) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    if (ids[i] < 0 || ids[i] >= num_rows) ReportBad(first_bad, i);
}

__global__ void CheckSplitsKernel(const int64_t* row_splits, int64_t num_splits, int64_t n, uint64_t* first_bad) {
  for (int64_t s = GlobalThread(); s < num_splits; s += GlobalThreads()) {
    const bool fits = s == 0 ? row_splits[0] == 0 : row_splits[s] >= row_splits[s - 1];
    if (!fits || (s == num_splits - 1 && row_splits[s] != n)) ReportBad(first_bad, n + s);
  }
}

}  // namespace

void CheckIds(const Cuda& cuda, const int64_t* ids, int64_t n, int64_t num_rows, const int64_t* row_splits,
              int64_t num_splits, uint64_t* first_bad) {
  Launch(CheckIdsKernel, GridFor(n, kThreads), kThreads, 0, cuda, ids, n, num_rows, first_bad);
  Launch(CheckSplitsKernel, GridFor(num_splits, kThreads), kThreads, 0, cuda, row_splits, num_splits, n, first_bad);
}

}  // namespace sok
