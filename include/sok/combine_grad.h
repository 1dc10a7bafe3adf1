// Gradients of pooling on a device: in the rows of a matrix, and in the weights. (Those of tables' rows: sum_rows.h.)
#pragma once

#include <cstdint>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

// Of one feature as CombineGroup pools it (its `output` is not looked at). A position that no segment has gets zero; a negative
// index reads what it reads there. Repeats bit for bit. Nothing waits.
// first_bad: as CombineGroup's, of this feature alone.
// Throws InvalidArgument for a feature without weights.
void CombineGradWeights(const Cuda& cuda, const DeviceFeature& feature,
                        const float* grad,     // [segments, dim]
                        float* grad_weights,   // [n]
                        uint64_t* first_bad);  // [1] or null

// Dense [num_rows, dim], initialised here. Addends of an index outside [0, num_rows), and of positions that no segment has, are
// dropped. Summed as UnsortedSegmentSum's kFixed: repeats bit for bit, in order where a row has few addends. Nothing waits.
// first_bad: lowered to the position of an index outside [0, num_rows).
// Throws InvalidArgument for 2^31 - 1 positions or rows and more.
void CombineGradRows(const Cuda& cuda, DeviceScratch* scratch,
                     const float* grad,     // [segments, dim]
                     const int64_t* index,  // [n]
                     const DeviceSegments& segments,
                     const float* weights,  // [n] or null
                     int64_t num_rows, int64_t dim, Combiner combiner,
                     float* grad_rows,      // [num_rows, dim]
                     uint64_t* first_bad);  // [1] or null

}  // namespace sok
