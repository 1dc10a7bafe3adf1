// Row ids are small integers, so sorting them costs fewer bytes than hashing and gives what a repeatable sum needs anyway:
// addends of a row side by side, in order of position. Tables of a group share one sort, for launches are what a group of
// many small tables would pay for.
#include "sok/sum_rows.h"

#include <string>
#include <vector>

#include "detail/launch.h"
#include "detail/primitives.h"
#include "detail/segments.h"
#include "detail/sort_positions.h"
#include "detail/sum_sorted.h"
#include "detail/upload.h"
#include "detail/vector4.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int kThreads = 256;

struct Work {
  DeviceAddends addends;
  const float* scales;  // [segments], where there are weights
  uint64_t* first_bad;
  int64_t first;     // of its addends among all
  int64_t base;      // of its table's row ids
  int64_t num_rows;  // of its table
};

__device__ __forceinline__ int64_t RowNumber(int64_t row_id) { return row_id < 0 ? -1 : row_id & 0xFFFFFFFFll; }

// The last of [0, count) whose `first` is at most i.
template <class First>
__device__ __forceinline__ int64_t Find(int64_t count, int64_t i, const First& first) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first(middle) <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
__global__ void ListAddendsKernel(const Work* all, int64_t num_work, int64_t n, uint32_t dropped,
                                  uint32_t* ids,     // [n]
                                  const T** source,  // [n]
                                  float* factor) {   // [n] or null
  for (int64_t k = GlobalThread(); k < n; k += GlobalThreads()) {
    const Work& work = all[Find(num_work, k, [&](int64_t w) { return all[w].first; })];
    const DeviceAddends& a = work.addends;
    const int64_t i = k - work.first, row = RowNumber(a.row_ids[i]);
    uint32_t id = dropped;
    if (row >= work.num_rows) ReportBad(work.first_bad, i);
    if (row >= 0 && row < work.num_rows) {
      const int64_t s = SegmentOf(a.segments, i);
      if (s >= 0) {
        id = static_cast<uint32_t>(work.base + row);
        source[k] = static_cast<const T*>(a.values) + s * a.values_stride;
        if (factor != nullptr) {
          int64_t first, last;
          a.segments.Bounds(s, &first, &last);
          factor[k] =
              a.weights != nullptr ? work.scales[s] * a.weights[i] : SegmentScale(a.combiner, nullptr, last - first);
        }
      }
    }
    ids[k] = id;
  }
}

__global__ void CheckSplitsKernel(DeviceSegments segments, uint64_t* first_bad) {
  for (int64_t s = GlobalThread(); s < segments.segments; s += GlobalThreads()) {
    int64_t first, last;
    segments.Bounds(s, &first, &last);
    if (first < 0) ReportBad(first_bad, segments.n + s);
  }
}

__global__ void HeadsKernel(const uint32_t* sorted, int64_t n, uint32_t dropped,
                            uint32_t* is_head) {  // [n]
  for (int64_t k = GlobalThread(); k < n; k += GlobalThreads()) {
    is_head[k] = sorted[k] < dropped && (k == 0 || sorted[k] != sorted[k - 1]) ? 1 : 0;
  }
}

__global__ void NumberRowsKernel(const Work* all, int64_t num_work, const uint32_t* sorted, const uint32_t* positions,
                                 int64_t n, uint32_t dropped, const uint32_t* is_head, const uint32_t* before,
                                 uint32_t* segments,  // [n]; n: dropped
                                 int64_t* row_ids, int32_t* tables, int64_t* num_sums) {
  for (int64_t k = GlobalThread(); k < n; k += GlobalThreads()) {
    const uint32_t number = before[k] + is_head[k];
    segments[k] = sorted[k] < dropped ? number - 1 : static_cast<uint32_t>(n);
    if (is_head[k] != 0) {
      // The row's first addend has its id whole.
      const int64_t position = positions[k];
      const Work& work = all[Find(num_work, position, [&](int64_t w) { return all[w].first; })];
      row_ids[before[k]] = work.addends.row_ids[position - work.first];
      if (tables != nullptr) tables[before[k]] = static_cast<int32_t>(work.addends.table);
    }
    if (k == n - 1) *num_sums = number;
  }
}

}  // namespace

void SumRows(const Cuda& cuda, DeviceScratch* scratch, const DeviceAddends* addends, int64_t num_addends,
             const int64_t* table_rows, int64_t num_tables, int64_t dim, FloatType type, int64_t* row_ids,
             int32_t* tables, float* sums, int64_t* num_sums, uint64_t* first_bad) {
  if (dim < 1) throw InvalidArgument("dim must be at least 1. Received: " + std::to_string(dim) + ".");
  std::vector<int64_t> bases;
  int64_t all_rows = 0, n = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    bases.push_back(all_rows);
    // A sum of two numbers below 2^32 and the check of each step: nothing overflows.
    if (table_rows[t] < 0 || table_rows[t] >= INT64_C(0xFFFFFFFF) - all_rows) {
      throw InvalidArgument("the tables of one group must have fewer than 2^32 - 1 rows together; table " +
                            std::to_string(t) + " with " + std::to_string(table_rows[t]) +
                            " does not fit. Give them in two calls.");
    }
    all_rows += table_rows[t];
  }
  std::vector<Work> work;
  bool scaled = false;
  for (int64_t k = 0; k < num_addends; ++k) {
    const DeviceAddends& a = addends[k];
    if (a.table < 0 || a.table >= num_tables) {
      throw InvalidArgument("addends " + std::to_string(k) + ": table " + std::to_string(a.table) +
                            " is not one of the " + std::to_string(num_tables) + " of the group.");
    }
    if (a.segments.n < 0 || a.segments.n >= kNoSegment - n) {
      throw InvalidArgument("at most 2^31 - 2 gradient rows in one call; addends " + std::to_string(k) + " with " +
                            std::to_string(a.segments.n) + " do not fit.");
    }
    float* scales = a.weights == nullptr ? nullptr : scratch->Get<float>(a.segments.segments);
    if (scales != nullptr) SegmentScales(cuda, a.segments, a.weights, a.combiner, scales);
    uint64_t* bad = first_bad == nullptr ? nullptr : first_bad + k;
    if (bad != nullptr && a.segments.row_splits != nullptr) {
      Launch(CheckSplitsKernel, GridFor(a.segments.segments, kThreads), kThreads, 0, cuda, a.segments, bad);
    }
    const size_t table = static_cast<size_t>(a.table);
    if (a.segments.n > 0) work.push_back({a, scales, bad, n, bases[table], table_rows[a.table]});
    scaled = scaled || a.weights != nullptr || a.combiner != Combiner::kSum;
    n += a.segments.n;
  }
  if (n == 0) {
    SOK_CUDA(cudaMemsetAsync(num_sums, 0, sizeof(int64_t), cuda.stream));
    return;
  }
  const int64_t num_work = static_cast<int64_t>(work.size());
  const uint32_t dropped = static_cast<uint32_t>(all_rows);
  const Work* device_work = Upload(cuda, scratch, work.data(), num_work);
  uint32_t* ids = scratch->Get<uint32_t>(n);
  float* factor = scaled ? scratch->Get<float>(n) : nullptr;
  WithFloatType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T** source = scratch->Get<const T*>(n);
    const int64_t grid = GridFor(n, kThreads);
    Launch(ListAddendsKernel<T>, grid, kThreads, 0, cuda, device_work, num_work, n, dropped, ids, source, factor);
    const uint32_t* sorted;
    const uint32_t* positions;
    SortPositions(cuda, scratch, ids, n, dropped, &sorted, &positions);
    uint32_t* is_head = scratch->Get<uint32_t>(n);
    uint32_t* before = scratch->Get<uint32_t>(n);
    uint32_t* segments = scratch->Get<uint32_t>(n);
    Launch(HeadsKernel, grid, kThreads, 0, cuda, sorted, n, dropped, is_head);
    ExclusiveSum(cuda, scratch, is_head, before, n);
    Launch(NumberRowsKernel, grid, kThreads, 0, cuda, device_work, num_work, sorted, positions, n, dropped, is_head,
           before, segments, row_ids, tables, num_sums);
    SumSorted(cuda, scratch, ScatteredAddends<T>{source, factor}, segments, static_cast<uint32_t>(n), positions, n, dim,
              sums, dim);
  });
}

}  // namespace sok
