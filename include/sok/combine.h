// Gather and pool: many rows per segment become one vector, by tf.nn.embedding_lookup_sparse's rules.
//
//   sum    sum_i w_i e_i
//   mean   sum_i w_i e_i / sum_i w_i
//   sqrtn  sum_i w_i e_i / sqrt(sum_i w_i^2)
//
// Without weights w_i = 1. An empty segment, or one whose divisor is zero, gives zeros. Results repeat bit for bit:
// each segment is summed in order by one thread.
#pragma once

#include <cstdint>
#include <string>

#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

enum class Combiner { kSum, kMean, kSqrtn };

// Throws InvalidArgument for anything but "sum", "mean", "sqrtn".
Combiner ParseCombiner(const std::string& name);

// What each row of a segment is multiplied with is w_i * SegmentScale(...).
float SegmentScale(Combiner combiner,
                   const float* weights,  // [count] or null
                   int64_t count);

void Combine(const Cpu& cpu,
             const float* rows,          // [num_rows, dim]
             const int64_t* index,       // [n], each in [0, num_rows)
             const int64_t* row_splits,  // [segments + 1]
             const float* weights,       // [n] or null
             int64_t segments, int64_t dim, Combiner combiner,
             float* output);  // [segments, dim]

// Gradient of Combine in rows: dense [num_rows, dim], initialised here.
void CombineGradRows(const Cpu& cpu, Scratch* scratch,
                     const float* grad,          // [segments, dim]
                     const int64_t* index,       // [n]
                     const int64_t* row_splits,  // [segments + 1]
                     const float* weights,       // [n] or null
                     int64_t n, int64_t segments, int64_t num_rows, int64_t dim, Combiner combiner,
                     float* grad_rows);  // [num_rows, dim]

// Gradient of Combine in weights.
void CombineGradWeights(const Cpu& cpu,
                        const float* grad,          // [segments, dim]
                        const float* rows,          // [num_rows, dim]
                        const int64_t* index,       // [n]
                        const int64_t* row_splits,  // [segments + 1]
                        const float* weights,       // [n]
                        int64_t segments, int64_t dim, Combiner combiner,
                        float* grad_weights);  // [n]

// For each of n positions, the segment that holds it and the factor its row was multiplied with.
void ExpandSegments(const Cpu& cpu,
                    const int64_t* row_splits,  // [segments + 1]
                    const float* weights,       // [n] or null
                    int64_t segments, Combiner combiner,
                    uint32_t* segment_of,  // [n]
                    float* factor);        // [n]

}  // namespace sok
