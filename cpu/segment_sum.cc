#include "sok/segment_sum.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

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

// Segments are dealt to parts, one or two per thread; positions are scattered by part, in order, and each part is summed
// by one thread. So every sum is taken in order of position, whatever the number of threads. Few parts: then each walks
// through the data almost in sequence, which memory likes, and only the sums are met at random, which prefetching hides.
void SumInParts(const Cpu& cpu, Scratch* scratch, const float* data, const int64_t* ids, int64_t n, int64_t dim,
                int64_t num_segments, float* sums) {
  constexpr int64_t kRowsPerChunk = 16384;
  constexpr int kMaxPartBits = 7;
  if (num_segments > (INT64_MAX >> 4)) throw OutOfMemory("no memory for " + std::to_string(num_segments) + " segments");
  int bits = 0;
  while (bits < kMaxPartBits && (1 << bits) < 2 * cpu.executor.num_threads() && (int64_t{256} << bits) < n) ++bits;
  const int64_t parts = int64_t{1} << bits, chunks = std::max<int64_t>(1, n / kRowsPerChunk);
  auto chunk_begin = [&](int64_t c) { return n * c / chunks; };
  // Neighbours go to different parts: often the first segments are the large ones.
  auto part_of = [&](int64_t id) { return id & (parts - 1); };
  uint32_t* cursor = scratch->Get<uint32_t>(chunks * parts);
  std::memset(cursor, 0, static_cast<size_t>(chunks * parts) * sizeof(uint32_t));
  ForTasks(cpu, chunks, n * 2, [&](int64_t, int64_t c) {
    uint32_t* mine = cursor + c * parts;
    for (int64_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i)
      if (ids[i] >= 0) ++mine[part_of(ids[i])];
  });
  uint32_t* begin = scratch->Get<uint32_t>(parts + 1);
  uint32_t total = 0;
  for (int64_t p = 0; p < parts; ++p) {
    begin[p] = total;
    for (int64_t c = 0; c < chunks; ++c) {
      const uint32_t count = cursor[c * parts + p];
      cursor[c * parts + p] = total;
      total += count;
    }
  }
  begin[parts] = total;
  struct Item {
    uint32_t position, segment;
  };
  Item* items = scratch->Get<Item>(total);
  ForTasks(cpu, chunks, n * 4, [&](int64_t, int64_t c) {
    uint32_t* mine = cursor + c * parts;
    for (int64_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i)
      if (ids[i] >= 0) items[mine[part_of(ids[i])]++] = {static_cast<uint32_t>(i), static_cast<uint32_t>(ids[i])};
  });
  // One byte per segment, part after part: whether it has been set.
  const int64_t per_part = (num_segments + parts - 1) / parts;
  uint8_t* set = scratch->Get<uint8_t>(parts * per_part);
  const RowKernels& kernels = ChosenRowKernels();
  ForTasks(cpu, parts, n * (20 + dim) + num_segments, [&](int64_t, int64_t p) {
    constexpr int64_t kBlock = 256;
    const float* source[kBlock];
    float* to[kBlock];
    uint8_t fresh[kBlock];
    uint8_t* seen = set + p * per_part;
    std::memset(seen, 0, static_cast<size_t>(per_part));
    for (int64_t i = begin[p]; i < begin[p + 1]; i += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, begin[p + 1] - i);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t id = items[i + k].segment;
        source[k] = data + int64_t{items[i + k].position} * dim;
        to[k] = sums + id * dim;
        fresh[k] = seen[id >> bits] == 0;
        seen[id >> bits] = 1;
      }
      kernels.add_rows(source, to, fresh, count, dim);
    }
    for (int64_t k = 0; k < per_part; ++k) {
      const int64_t id = (k << bits) + p;
      if (seen[k] == 0 && id < num_segments) std::fill_n(sums + id * dim, dim, 0.0f);
    }
  });
}

}  // namespace

template <class T>
void UnsortedSegmentSum(const Cpu& cpu, Scratch* scratch, const T* data, const int64_t* ids, int64_t n, int64_t dim,
                        int64_t num_segments, T* sums) {
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] >= num_segments) {
      throw InvalidArgument("segment_ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) +
                            " must be below num_segments = " + std::to_string(num_segments) + ".");
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    if (num_segments < INT64_C(0xFFFFFFFF) && n < INT64_C(0xFFFFFFFF)) {
      return SumInParts(cpu, scratch, data, ids, n, dim, num_segments, sums);
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
