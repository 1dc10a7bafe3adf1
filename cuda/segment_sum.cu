#include "sok/segment_sum.h"

#include <string>

#include "detail/launch.h"
#include "detail/sort_positions.h"
#include "detail/sum_sorted.h"
#include "detail/vector4.h"
#include "sok/error.h"

namespace sok {
namespace {

template <class Id>
__global__ void NarrowIdsKernel(const Id* ids, int64_t n, int64_t num_segments,
                                uint32_t* segments,  // [n]; num_segments: dropped
                                uint64_t* first_bad) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    const int64_t id = ids[i];
    if (id >= num_segments) ReportBad(first_bad, i);
    segments[i] = static_cast<uint32_t>(id < 0 || id >= num_segments ? num_segments : id);
  }
}

template <class T>
__global__ void AddRowsKernel(const T* data, const uint32_t* segments, int64_t n, int64_t dim, int64_t num_segments,
                              int lane_bits, float* sums) {
  const int64_t lanes = int64_t{1} << lane_bits, lane = GlobalThread() & (lanes - 1);
  for (int64_t i = GlobalThread() >> lane_bits; i < n; i += GlobalThreads() >> lane_bits) {
    const uint32_t segment = segments[i];
    if (segment == num_segments) continue;
    for (int64_t column = 4 * lane; column < dim; column += 4 * lanes) {
      const int count = ColumnsLeft(dim, column);
      const Vector4 row = Load4(data + i * dim + column, count);
      float* to = sums + int64_t{segment} * dim + column;
      for (int j = 0; j < 4; ++j)
        if (j < count) atomicAdd(to + j, row.x[j]);
    }
  }
}

// The first of [0, n) whose number is at least `wanted`.
__device__ __forceinline__ int64_t LowerBound(const uint32_t* sorted, int64_t n, uint32_t wanted) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (sorted[middle] < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void SumDoublesKernel(const double* data, const uint32_t* sorted, const uint32_t* positions, int64_t n,
                                 int64_t dim, int64_t num_segments, double* sums) {
  for (int64_t k = GlobalThread(); k < num_segments * dim; k += GlobalThreads()) {
    const uint32_t segment = static_cast<uint32_t>(k / dim);
    double sum = 0;
    for (int64_t i = LowerBound(sorted, n, segment); i < n && sorted[i] == segment; ++i)
      sum += data[int64_t{positions[i]} * dim + k % dim];
    sums[k] = sum;
  }
}

void CheckSizes(int64_t n, int64_t num_segments) {
  if (n < kNoSegment && num_segments < kNoSegment) return;
  throw InvalidArgument("a segment sum takes fewer than 2^31 - 1 rows and segments in one call. Received: " +
                        std::to_string(n) + " rows, " + std::to_string(num_segments) + " segments.");
}

}  // namespace

template <class Id>
void UnsortedSegmentSum(const Cuda& cuda, DeviceScratch* scratch, const double* data, const Id* ids, int64_t n,
                        int64_t dim, int64_t num_segments, double* sums, uint64_t* first_bad) {
  CheckSizes(n, num_segments);
  uint32_t* segments = scratch->Get<uint32_t>(n);
  Launch(NarrowIdsKernel<Id>, GridFor(n, kThreads), kThreads, 0, cuda, ids, n, num_segments, segments, first_bad);
  const uint32_t* sorted;
  const uint32_t* positions;
  SortPositions(cuda, scratch, segments, n, static_cast<uint32_t>(num_segments), &sorted, &positions);
  Launch(SumDoublesKernel, GridFor(num_segments * dim, kThreads), kThreads, 0, cuda, data, sorted, positions, n, dim,
         num_segments, sums);
}

template <class Id>
void UnsortedSegmentSum(const Cuda& cuda, DeviceScratch* scratch, const void* data, FloatType type, const Id* ids,
                        int64_t n, int64_t dim, int64_t num_segments, SumOrder order, float* sums,
                        uint64_t* first_bad) {
  CheckSizes(n, num_segments);
  if (num_segments * dim > 0) {
    SOK_CUDA(cudaMemsetAsync(sums, 0, static_cast<size_t>(num_segments * dim) * sizeof(float), cuda.stream));
  }
  if (n == 0) return;
  uint32_t* segments = scratch->Get<uint32_t>(n);
  Launch(NarrowIdsKernel<Id>, GridFor(n, kThreads), kThreads, 0, cuda, ids, n, num_segments, segments, first_bad);
  if (order == SumOrder::kAny) {
    const int lane_bits = LaneBits(dim);
    WithFloatType(type, [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      Launch(AddRowsKernel<T>, GridFor(n << lane_bits, kThreads), kThreads, 0, cuda, static_cast<const T*>(data),
             segments, n, dim, num_segments, lane_bits, sums);
    });
    return;
  }
  const uint32_t* sorted;
  const uint32_t* positions;
  SortPositions(cuda, scratch, segments, n, static_cast<uint32_t>(num_segments), &sorted, &positions);
  WithFloatType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    SumSorted(cuda, scratch, MatrixAddends<T>{static_cast<const T*>(data), dim}, sorted,
              static_cast<uint32_t>(num_segments), positions, n, dim, sums, dim);
  });
}

template void UnsortedSegmentSum(const Cuda&, DeviceScratch*, const void*, FloatType, const int32_t*, int64_t, int64_t,
                                 int64_t, SumOrder, float*, uint64_t*);
template void UnsortedSegmentSum(const Cuda&, DeviceScratch*, const void*, FloatType, const int64_t*, int64_t, int64_t,
                                 int64_t, SumOrder, float*, uint64_t*);
template void UnsortedSegmentSum(const Cuda&, DeviceScratch*, const double*, const int32_t*, int64_t, int64_t, int64_t,
                                 double*, uint64_t*);
template void UnsortedSegmentSum(const Cuda&, DeviceScratch*, const double*, const int64_t*, int64_t, int64_t, int64_t,
                                 double*, uint64_t*);

}  // namespace sok
