#include "sok/segment_sum.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "sok/error.h"

namespace sok {

void SortById(Scratch* scratch, const int64_t* ids, int64_t n, int64_t num_segments, const uint32_t** offsets,
              const uint32_t** positions) {
  // Sizes whose bytes no address can count: found here, where they would overflow.
  if (num_segments > (INT64_MAX >> 4)) throw OutOfMemory("no memory for " + std::to_string(num_segments) + " segments");
  uint32_t* begin = scratch->Get<uint32_t>(num_segments + 2);
  std::memset(begin, 0, static_cast<size_t>(num_segments + 2) * sizeof(uint32_t));
  // Counts are kept two places up, so that after the scatter begin[] has moved on to be the offsets themselves.
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] >= 0) ++begin[ids[i] + 2];
  for (int64_t s = 2; s < num_segments + 2; ++s) begin[s] += begin[s - 1];
  uint32_t* where = scratch->Get<uint32_t>(n);
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] >= 0) where[begin[ids[i] + 1]++] = static_cast<uint32_t>(i);
  *offsets = begin;
  *positions = where;
}

template <class T>
void UnsortedSegmentSum(const Cpu& cpu, Scratch* scratch, const T* data, const int64_t* ids, int64_t n, int64_t dim,
                        int64_t num_segments, T* sums) {
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] >= num_segments) {
      throw InvalidArgument("segment_ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) +
                            " must be below num_segments = " + std::to_string(num_segments) + ".");
    }
  }
  const uint32_t* offsets;
  const uint32_t* positions;
  SortById(scratch, ids, n, num_segments, &offsets, &positions);
  const int64_t cost = 20 + 2 * dim * (num_segments > 0 ? n / num_segments + 1 : 1);
  cpu.executor.For(num_segments, cost, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      T* sum = sums + s * dim;
      std::fill(sum, sum + dim, T(0));
      for (uint32_t i = offsets[s]; i < offsets[s + 1]; ++i) {
        const T* row = data + int64_t{positions[i]} * dim;
        for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
      }
    }
  });
}

template void UnsortedSegmentSum<float>(const Cpu&, Scratch*, const float*, const int64_t*, int64_t, int64_t, int64_t,
                                        float*);
template void UnsortedSegmentSum<double>(const Cpu&, Scratch*, const double*, const int64_t*, int64_t, int64_t, int64_t,
                                         double*);

}  // namespace sok
