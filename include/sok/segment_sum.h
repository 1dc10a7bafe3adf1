// Grouped sum, as tf.math.unsorted_segment_sum.
#pragma once

#include <cstdint>

#include "sok/device.h"
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

}  // namespace sok
