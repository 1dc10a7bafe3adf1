#include "sok/segment_sum.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "row_kernels.h"
#include "sok/error.h"
#include "tasks.h"

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

namespace {

void AddRows(const float* const* source, float* const* to, const uint8_t* fresh, int64_t n, int64_t dim) {
  ChosenRowKernels().add_rows(source, to, fresh, n, dim);
}

void AddRows(const double* const* source, double* const* to, const uint8_t* fresh, int64_t n, int64_t dim) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < dim; ++j) to[i][j] = (fresh[i] ? 0.0 : to[i][j]) + source[i][j];
}

}  // namespace

// Segments are dealt to parts, one per thread, and each part picks its own in one pass over the data: no position is
// moved, and every sum is taken in order of position, whatever the number of threads. The data is then read almost in
// sequence, and only the sums are met at random, which asking ahead hides.
template <class T, class Id>
void UnsortedSegmentSum(const Cpu& cpu, Scratch* scratch, const T* data, const Id* ids, int64_t n, int64_t dim,
                        int64_t num_segments, T* sums) {
  // Sizes whose bytes no address can count: found here, where they would overflow.
  if (num_segments > (INT64_MAX >> 4)) throw OutOfMemory("no memory for " + std::to_string(num_segments) + " segments");
  std::atomic<bool> high{false};
  cpu.executor.For(n, 1, [&](int64_t begin, int64_t end) {
    bool any = false;
    for (int64_t i = begin; i < end; ++i) any |= ids[i] >= num_segments;
    if (any) high.store(true);
  });
  for (int64_t i = 0; high.load() && i < n; ++i) {
    if (ids[i] < num_segments) continue;
    throw InvalidArgument("segment_ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) +
                          " must be below num_segments = " + std::to_string(num_segments) + ".");
  }
  constexpr int kMaxPartBits = 6;
  constexpr int64_t kMinRowsPerPart = 256, kBlock = 1024;
  int bits = 0;
  while (bits < kMaxPartBits && (1 << bits) < cpu.executor.num_threads() && (kMinRowsPerPart << bits) < n) ++bits;
  const int64_t parts = int64_t{1} << bits;
  // One byte per segment, part after part: whether it has been set.
  const int64_t per_part = (num_segments + parts - 1) / parts;
  uint8_t* set = scratch->Get<uint8_t>(parts * per_part);
  ForTasks(cpu, parts, n * (4 + (20 + dim) / parts) + num_segments, [&](int64_t, int64_t p) {
    // Neighbours go to different parts: often the first segments are the large ones.
    const Id low_bits = static_cast<Id>(parts - 1), mine = static_cast<Id>(p);
    int32_t own[kBlock + 1];
    const T* source[kBlock];
    T* to[kBlock];
    uint8_t fresh[kBlock];
    uint8_t* seen = set + p * per_part;
    std::memset(seen, 0, static_cast<size_t>(per_part));
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int32_t size = static_cast<int32_t>(std::min(kBlock, n - begin));
      int32_t m = 0;
      for (int32_t i = 0; i < size; ++i) {
        own[m] = i;
        m += (ids[begin + i] & low_bits) == mine && ids[begin + i] >= 0;
      }
      for (int32_t k = 0; k < m; ++k) {
        const int64_t id = ids[begin + own[k]];
        source[k] = data + (begin + own[k]) * dim;
        to[k] = sums + id * dim;
        fresh[k] = seen[id >> bits] == 0;
        seen[id >> bits] = 1;
      }
      AddRows(source, to, fresh, m, dim);
    }
    for (int64_t k = 0; k < per_part; ++k) {
      const int64_t id = (k << bits) + p;
      if (seen[k] == 0 && id < num_segments) std::fill_n(sums + id * dim, dim, T(0));
    }
  });
}

template void UnsortedSegmentSum(const Cpu&, Scratch*, const float*, const int64_t*, int64_t, int64_t, int64_t, float*);
template void UnsortedSegmentSum(const Cpu&, Scratch*, const float*, const int32_t*, int64_t, int64_t, int64_t, float*);
template void UnsortedSegmentSum(const Cpu&, Scratch*, const double*, const int64_t*, int64_t, int64_t, int64_t,
                                 double*);
template void UnsortedSegmentSum(const Cpu&, Scratch*, const double*, const int32_t*, int64_t, int64_t, int64_t,
                                 double*);

}  // namespace sok
