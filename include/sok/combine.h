// Gather and pool: many rows per segment become one vector, by tf.nn.embedding_lookup_sparse's rules.
//
//   sum    sum_i w_i e_i
//   mean   sum_i w_i e_i / sum_i w_i
//   sqrtn  sum_i w_i e_i / sqrt(sum_i w_i^2)
//
// Without weights w_i = 1. An empty segment, or one whose divisor is zero, gives zeros. Results repeat bit for bit:
// each segment is summed in order by one thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "sok/device.h"
#include "sok/device_keys.h"
#include "sok/device_rows.h"
#include "sok/first_bad.h"
#include "sok/float_type.h"
#include "sok/initializer.h"
#include "sok/partition.h"
#include "sok/philox.h"
#include "sok/scratch.h"

namespace sok {

enum class Combiner { kSum, kMean, kSqrtn };

// Throws InvalidArgument for anything but "sum", "mean", "sqrtn".
Combiner ParseCombiner(const std::string& name);

// What each row of a segment is multiplied with is w_i * SegmentScale(...).
SOK_HOST_DEVICE float SegmentScale(Combiner combiner,
                                   const float* weights,  // [count] or null
                                   int64_t count) {
  if (combiner == Combiner::kSum || count == 0) return 1.0f;
  float divisor = 0.0f;
  if (weights == nullptr) {
    divisor = static_cast<float>(count);
  } else if (combiner == Combiner::kMean) {
    for (int64_t i = 0; i < count; ++i) divisor += weights[i];
  } else {
    for (int64_t i = 0; i < count; ++i) divisor += weights[i] * weights[i];
  }
  if (divisor == 0.0f) return 0.0f;  // weights that cancel: zeros, as tf.nn's division without NaN
  return 1.0f / (combiner == Combiner::kSqrtn ? sqrtf(divisor) : divisor);
}

void Combine(const Cpu& cpu,
             const float* rows,          // [num_rows, dim]
             const int64_t* index,       // [n], each in [0, num_rows)
             const int64_t* row_splits,  // [segments + 1]
             const float* weights,       // [n] or null
             int64_t segments, int64_t dim, Combiner combiner,
             float* output);  // [segments, dim]

// One feature of a group: without row_splits a plain gather.
struct HostFeature {
  const float* rows = nullptr;  // [num_rows, dim]; num_rows below 2^31
  int64_t dim = 0;
  const int64_t* index = nullptr;  // [n], each in [0, num_rows)
  int64_t n = 0;
  const int64_t* row_splits = nullptr;  // [segments + 1] or null
  int64_t segments = 0;                 // without row_splits n
  Combiner combiner = Combiner::kSum;
  float* output = nullptr;  // [segments, dim]
};

// Combine of any number of features, of any dims and matrices, in one parallel loop.
void CombineGroup(const Cpu& cpu,
                  const HostFeature* features,  // [num_features]
                  int64_t num_features);

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

// ---- On a device

// Which positions a segment has: those that row_splits says, or without it `hotness` each. Where row_splits falls or leaves
// [0, n], the segment has none.
struct DeviceSegments {
  const int64_t* row_splits = nullptr;  // [segments + 1] or null
  int64_t hotness = 1;
  int64_t segments = 0;
  int64_t n = 0;  // positions

  SOK_HOST_DEVICE void Bounds(int64_t segment, int64_t* first, int64_t* last) const {
    *first = row_splits == nullptr ? segment * hotness : row_splits[segment];
    *last = row_splits == nullptr ? *first + hotness : row_splits[segment + 1];
    if (*first < 0 || *last < *first || *last > n) *last = *first = -1;
  }
};

// What a position without a row reads, of a table's shard: the fresh row of its key, or zeros where the shard cannot hold that.
struct FreshRows {
  DeviceKeys keys;  // [n], of the positions; of no words: all such positions read zeros
  InitializerView initializer = {};
  Partition partition;
  int rank = 0;
  uint64_t num_legal = 0;  // keys in [0, num_legal) are legal; 0: every key is

  SOK_HOST_DEVICE bool is_on() const { return keys.words != nullptr; }
  SOK_HOST_DEVICE bool Has(uint64_t key) const {
    return (num_legal == 0 || key < num_legal) && partition.OwnerOf(key) == rank;
  }
};

// One feature of a group. Without row_splits and with hotness 1 a plain gather.
struct DeviceFeature {
  DeviceRows rows;
  int64_t num_rows = 0;
  int64_t dim = 0;
  // [n]; negative: a row of zeros, or what `fresh` says, counted all the same. Of a table (rows in slabs) row ids or row numbers: the upper half is
  // passed over. Null, for CombineGroup: position i reads row i.
  const int64_t* index = nullptr;
  DeviceSegments segments;
  const float* weights = nullptr;  // [n] or null
  Combiner combiner = Combiner::kSum;
  void* output = nullptr;     // segment s at output + s * output_stride, in elements
  int64_t output_stride = 0;  // at least dim: outputs may be columns of one matrix
  FreshRows fresh;
};

// Combine of any number of features, of any dims and tables, in one launch. `features` is host memory and read before the
// call returns. Summed in float32, in order of position, as on the CPU, then rounded to the output's type. Nothing waits.
// first_bad[f]: lowered to the position of an index >= num_rows, which then counts as negative, or to n + s for a segment
// s whose row_splits make no sense.
// Throws InvalidArgument for a feature with negative sizes, dim below 1, or an output_stride below dim.
void CombineGroup(const Cuda& cuda, DeviceScratch* scratch,
                  const DeviceFeature* features,  // [num_features]
                  int64_t num_features, FloatType output_type,
                  uint64_t* first_bad);  // [num_features] or null

// ExpandSegments on a device. Positions that no segment has (see first_bad above) get factor 0 and segment 0.
void ExpandSegments(const Cuda& cuda, DeviceScratch* scratch, const DeviceSegments& segments,
                    const float* weights,  // [n] or null
                    Combiner combiner,
                    uint32_t* segment_of,  // [n]
                    float* factor);        // [n]

}  // namespace sok
