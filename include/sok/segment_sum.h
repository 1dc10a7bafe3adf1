// Grouped sum, as tf.math.unsorted_segment_sum.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/first_bad.h"
#include "sok/float_type.h"
#include "sok/scratch.h"

namespace sok {

// sums[s] = sum of data[i] with ids[i] == s; negative ids are dropped. T: float or double;
// ops/ widens 16-bit types. Repeats bit for bit: a segment is summed in order by one thread.
// Throws InvalidArgument for an id >= num_segments.
template <class T, class Id>
void UnsortedSegmentSum(const Cpu& cpu, Scratch* scratch,
                        const T* data,  // [n, dim]
                        const Id* ids,  // [n], int32_t or int64_t
                        int64_t n, int64_t dim, int64_t num_segments,
                        T* sums);  // [num_segments, dim]

// Where in the input the rows of each segment lie: a stable counting sort of ids in [0, num_segments).
// offsets [num_segments + 1], positions [n]; negative ids are left out.
void SortById(Scratch* scratch, const int64_t* ids, int64_t n, int64_t num_segments, const uint32_t** offsets,
              const uint32_t** positions);

// How a device sums.
enum class SumOrder {
  kFixed,  // repeats bit for bit: sorted by id, then summed in pieces of 32 rows, and these likewise
  kAny     // whichever row comes first, by atomic additions; faster where no segment has many rows
};

// The same on a device, of 16-bit data too, in float32. A segment of up to 32 rows that lies in one piece is summed in
// order, as on the CPU. An id >= num_segments is left out, and its position reported. Nothing waits.
// kFixed takes 16 n bytes of scratch and 8 (dim + 1) for every 32 rows.
// Throws InvalidArgument for 2^31 rows or segments and more.
template <class Id>
void UnsortedSegmentSum(const Cuda& cuda, DeviceScratch* scratch,
                        const void* data,  // [n, dim] of `type`
                        FloatType type,
                        const Id* ids,  // [n], int32_t or int64_t
                        int64_t n, int64_t dim, int64_t num_segments, SumOrder order,
                        float* sums,           // [num_segments, dim]
                        uint64_t* first_bad);  // [1] or null

// The same of float64, always kFixed and the bits of the CPU: one thread sums a column of a segment in order, which takes long
// where a segment is. 16 n bytes of scratch.
template <class Id>
void UnsortedSegmentSum(const Cuda& cuda, DeviceScratch* scratch,
                        const double* data,  // [n, dim]
                        const Id* ids,       // [n], int32_t or int64_t
                        int64_t n, int64_t dim, int64_t num_segments,
                        double* sums,          // [num_segments, dim]
                        uint64_t* first_bad);  // [1] or null

}  // namespace sok
