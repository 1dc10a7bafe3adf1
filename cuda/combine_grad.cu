// The gradient in weights is a dot product a position, each by a tile of lanes that reads its row 16 bytes a lane, and a pass
// over segments. That in rows is a sum by row: sorted, as all sums that repeat.
#include "sok/combine_grad.h"

#include <string>

#include "detail/feature_rows.h"
#include "detail/launch.h"
#include "detail/segments.h"
#include "detail/sort_positions.h"
#include "detail/sum_sorted.h"
#include "detail/vector4.h"
#include "sok/error.h"

namespace sok {
namespace {

// dots[i] = row of position i . gradient of its segment.
template <bool kFresh>
__global__ void DotsKernel(DeviceFeature feature, const float* grad, float* dots, uint64_t* first_bad) {
  const Tile<kRowLanes> tile;
  for (int64_t i = GlobalThread() / kRowLanes; i < feature.segments.n; i += GlobalThreads() / kRowLanes) {
    const int64_t s = SegmentOf(feature.segments, i);
    const FeatureRow row = RowAt<kFresh>(feature, i, tile.lane == 0 ? first_bad : nullptr);
    float dot = 0.0f;
    if (s >= 0 && (row.at != nullptr || row.is_fresh)) {
      const float* g = grad + s * feature.dim;
      for (int64_t column = 4 * tile.lane; column < feature.dim; column += 4 * kRowLanes) {
        const int count = ColumnsLeft(feature.dim, column);
        const Vector4 b = Load4(g + column, count);
        Vector4 a;
        if (!kFresh || row.at != nullptr) {
          a = Load4(row.at + column, count);
        } else {
          a = FreshColumns(feature, feature.fresh.keys.At(i), column);
        }
        for (int j = 0; j < 4; ++j) dot += a.x[j] * b.x[j];
      }
    }
    for (int step = kRowLanes / 2; step > 0; step /= 2) dot += tile.Shuffle(dot, tile.lane ^ step);
    if (tile.lane == 0) dots[i] = dot;
  }
}

// From dots to gradients. The scale depends on the weights too: its derivative in w_i is -scale^2 for mean, and
// -w_i scale^3 for sqrtn.
__global__ void GradWeightsKernel(DeviceFeature feature, float* grad_weights, uint64_t* first_bad) {
  const float* weights = feature.weights;
  for (int64_t s = GlobalThread(); s < feature.segments.segments; s += GlobalThreads()) {
    int64_t first, last;
    feature.segments.Bounds(s, &first, &last);
    if (first < 0) {
      ReportBad(first_bad, feature.segments.n + s);
      continue;
    }
    if (feature.combiner == Combiner::kSum) continue;
    const float scale = SegmentScale(feature.combiner, weights + first, last - first);
    float out_dot = 0.0f;  // output . gradient
    for (int64_t i = first; i < last; ++i) {
      out_dot += weights[i] * grad_weights[i] * scale;
      grad_weights[i] *= scale;
    }
    for (int64_t i = first; i < last; ++i) {
      grad_weights[i] -= feature.combiner == Combiner::kMean ? out_dot * scale : out_dot * weights[i] * scale * scale;
    }
  }
}

__global__ void AddendsOfRowsKernel(const float* grad, const int64_t* index, DeviceSegments segments,
                                    const float* weights, const float* scales, int64_t num_rows, int64_t dim,
                                    uint32_t* rows,        // [n]; num_rows: dropped
                                    const float** source,  // [n]
                                    float* factor,         // [n]
                                    uint64_t* first_bad) {
  for (int64_t i = GlobalThread(); i < segments.n; i += GlobalThreads()) {
    const int64_t row = index[i], s = SegmentOf(segments, i);
    const bool is_row = row >= 0 && row < num_rows;
    if (!is_row) ReportBad(first_bad, i);
    rows[i] = static_cast<uint32_t>(is_row && s >= 0 ? row : num_rows);
    if (!is_row || s < 0) continue;
    source[i] = grad + s * dim;
    factor[i] = weights == nullptr ? scales[s] : scales[s] * weights[i];
  }
}

}  // namespace

void CombineGradWeights(const Cuda& cuda, const DeviceFeature& feature, const float* grad, float* grad_weights,
                        uint64_t* first_bad) {
  if (feature.weights == nullptr) throw InvalidArgument("a feature without weights has no gradient in them.");
  Launch(feature.fresh.is_on() ? DotsKernel<true> : DotsKernel<false>,
         GridFor(feature.segments.n * kRowLanes, kThreads), kThreads, 0, cuda, feature, grad, grad_weights, first_bad);
  Launch(GradWeightsKernel, GridFor(feature.segments.segments, kThreads), kThreads, 0, cuda, feature, grad_weights,
         first_bad);
}

void CombineGradRows(const Cuda& cuda, DeviceScratch* scratch, const float* grad, const int64_t* index,
                     const DeviceSegments& segments, const float* weights, int64_t num_rows, int64_t dim,
                     Combiner combiner, float* grad_rows, uint64_t* first_bad) {
  const int64_t n = segments.n;
  if (n >= kNoSegment || num_rows >= kNoSegment) {
    throw InvalidArgument("the gradient of pooling takes fewer than 2^31 - 1 positions and rows. Received: " +
                          std::to_string(n) + " positions, " + std::to_string(num_rows) + " rows.");
  }
  if (num_rows * dim > 0) {
    SOK_CUDA(cudaMemsetAsync(grad_rows, 0, static_cast<size_t>(num_rows * dim) * sizeof(float), cuda.stream));
  }
  if (n == 0) return;
  float* scales = scratch->Get<float>(segments.segments);
  SegmentScales(cuda, segments, weights, combiner, scales);
  uint32_t* rows = scratch->Get<uint32_t>(n);
  const float** source = scratch->Get<const float*>(n);
  float* factor = scratch->Get<float>(n);
  Launch(AddendsOfRowsKernel, GridFor(n, kThreads), kThreads, 0, cuda, grad, index, segments, weights, scales, num_rows,
         dim, rows, source, factor, first_bad);
  const uint32_t* sorted;
  const uint32_t* positions;
  SortPositions(cuda, scratch, rows, n, static_cast<uint32_t>(num_rows), &sorted, &positions);
  SumSorted(cuda, scratch, ScatteredAddends<float>{source, factor}, sorted, static_cast<uint32_t>(num_rows), positions,
            n, dim, grad_rows, dim);
}

}  // namespace sok
