// Bound by memory: what counts is how many bytes are under way. A row is read by as many lanes as it has groups of four
// floats, 16 bytes each, and every lane asks for the rows of four positions before it uses the first.
#include "sok/combine.h"

#include <algorithm>
#include <string>
#include <vector>

#include "detail/feature_rows.h"
#include "detail/launch.h"
#include "detail/segments.h"
#include "detail/upload.h"
#include "detail/vector4.h"
#include "detail/work_of_block.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kAhead = 4;

// A feature, and which blocks it has.
struct CombineWork {
  DeviceFeature feature;
  uint64_t* first_bad;
  int64_t first_block;
  int64_t segments_per_block;
  int lane_bits;
};

// Segments begin, begin + step, ... below end: one row each, no weights.
template <class T, bool kFresh>
__device__ __forceinline__ void Gather(const CombineWork& work, int64_t begin, int64_t step, int64_t end,
                                       int64_t lane) {
  const DeviceFeature& f = work.feature;
  const int64_t lanes = int64_t{1} << work.lane_bits;
  T* output = static_cast<T*>(f.output);
  for (int64_t s = begin; s < end; s += kAhead * step) {
    FeatureRow row[kAhead] = {};
    SOK_UNROLL
    for (int64_t a = 0; a < kAhead; ++a)
      if (s + a * step < end) row[a] = RowAt<kFresh>(f, s + a * step, lane == 0 ? work.first_bad : nullptr);
    for (int64_t column = 4 * lane; column < f.dim; column += 4 * lanes) {
      const int count = ColumnsLeft(f.dim, column);
      Vector4 value[kAhead] = {};
      SOK_UNROLL
      for (int64_t a = 0; a < kAhead; ++a)
        if (row[a].at != nullptr) value[a] = Load4(row[a].at + column, count);
      SOK_UNROLL
      for (int64_t a = 0; kFresh && a < kAhead; ++a)
        if (row[a].is_fresh) value[a] = FreshColumns(f, f.fresh.keys.At(s + a * step), column);
      SOK_UNROLL
      for (int64_t a = 0; a < kAhead; ++a)
        if (s + a * step < end) Store4(output + (s + a * step) * f.output_stride + column, value[a], count);
    }
  }
}

template <class T, bool kFresh>
__device__ __forceinline__ void Pool(const CombineWork& work, int64_t s, int64_t lane) {
  const DeviceFeature& f = work.feature;
  const int64_t lanes = int64_t{1} << work.lane_bits;
  int64_t first, last;
  f.segments.Bounds(s, &first, &last);
  if (first < 0 && lane == 0) ReportBad(work.first_bad, f.segments.n + s);
  const float scale =
      first < 0 ? 1.0f : SegmentScale(f.combiner, f.weights == nullptr ? nullptr : f.weights + first, last - first);
  for (int64_t column = 4 * lane; column < f.dim; column += 4 * lanes) {
    const int count = ColumnsLeft(f.dim, column);
    Vector4 sum = {};
    for (int64_t i = first; i < last; i += kAhead) {
      Vector4 value[kAhead] = {};
      float weight[kAhead];
      SOK_UNROLL
      for (int64_t a = 0; a < kAhead; ++a) {
        weight[a] = 1.0f;
        if (i + a >= last) continue;
        const FeatureRow row = RowAt<kFresh>(f, i + a, column == 0 ? work.first_bad : nullptr);
        if (row.at != nullptr) value[a] = Load4(row.at + column, count);
        if (kFresh && row.is_fresh) value[a] = FreshColumns(f, f.fresh.keys.At(i + a), column);
        if (f.weights != nullptr) weight[a] = f.weights[i + a];
      }
      SOK_UNROLL
      for (int64_t a = 0; a < kAhead; ++a)
        if (i + a < last)
          for (int j = 0; j < 4; ++j) sum.x[j] += weight[a] * value[a].x[j];
    }
    if (scale != 1.0f)
      for (int j = 0; j < 4; ++j) sum.x[j] *= scale;
    Store4(static_cast<T*>(f.output) + s * f.output_stride + column, sum, count);
  }
}

// kFresh: positions without a row may read fresh ones. To make those takes registers, which who has rows for all can do without.
template <class T, bool kFresh>
__global__ void CombineKernel(const CombineWork* all, int64_t num_features, int64_t num_blocks) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const CombineWork& work = WorkOfBlock(all, num_features, block);
    const DeviceFeature& f = work.feature;
    const int64_t tile = threadIdx.x >> work.lane_bits, tiles = blockDim.x >> work.lane_bits;
    const int64_t lane = threadIdx.x & ((1 << work.lane_bits) - 1);
    const int64_t begin = (block - work.first_block) * work.segments_per_block;
    const int64_t end =
        begin + work.segments_per_block < f.segments.segments ? begin + work.segments_per_block : f.segments.segments;
    if (f.segments.row_splits == nullptr && f.segments.hotness == 1 && f.weights == nullptr) {
      Gather<T, kFresh>(work, begin + tile, tiles, end, lane);
    } else {
      for (int64_t s = begin + tile; s < end; s += tiles) Pool<T, kFresh>(work, s, lane);
    }
  }
}

void Check(const DeviceFeature& f, int64_t number) {
  auto refuse = [number](const std::string& what) {
    throw InvalidArgument("feature " + std::to_string(number) + ": " + what + ".");
  };
  const DeviceSegments& s = f.segments;
  if (f.dim < 1) refuse("dim must be at least 1. Received: " + std::to_string(f.dim));
  if (s.segments < 0 || s.n < 0 || s.hotness < 0) {
    refuse("sizes must not be negative. Received: " + std::to_string(s.segments) + " segments, " + std::to_string(s.n) +
           " positions, hotness " + std::to_string(s.hotness));
  }
  // hotness * segments may not fit 64 bits.
  if (s.row_splits == nullptr && s.hotness > 0 && (s.n % s.hotness != 0 || s.n / s.hotness != s.segments)) {
    refuse("without row_splits there must be " + std::to_string(s.hotness) + " positions for each of " +
           std::to_string(s.segments) + " segments. Received: " + std::to_string(s.n));
  }
  if (f.output_stride < f.dim) {
    refuse("output_stride must be at least dim = " + std::to_string(f.dim) +
           ". Received: " + std::to_string(f.output_stride));
  }
}

__global__ void SegmentScalesKernel(DeviceSegments segments, const float* weights, Combiner combiner,
                                    float* scales) {  // [segments]
  for (int64_t s = GlobalThread(); s < segments.segments; s += GlobalThreads()) {
    int64_t first, last;
    segments.Bounds(s, &first, &last);
    scales[s] = first < 0 ? 0.0f : SegmentScale(combiner, weights == nullptr ? nullptr : weights + first, last - first);
  }
}

__global__ void ExpandKernel(DeviceSegments segments, const float* weights, const float* scales, uint32_t* segment_of,
                             float* factor) {
  for (int64_t i = GlobalThread(); i < segments.n; i += GlobalThreads()) {
    const int64_t s = SegmentOf(segments, i);
    segment_of[i] = s < 0 ? 0 : static_cast<uint32_t>(s);
    factor[i] = s < 0 ? 0.0f : weights == nullptr ? scales[s] : scales[s] * weights[i];
  }
}

}  // namespace

void CombineGroup(const Cuda& cuda, DeviceScratch* scratch, const DeviceFeature* features, int64_t num_features,
                  FloatType output_type, uint64_t* first_bad) {
  std::vector<CombineWork> work;
  int64_t blocks = 0;
  bool has_fresh = false;
  for (int64_t k = 0; k < num_features; ++k) {
    Check(features[k], k);
    if (features[k].segments.segments == 0) continue;
    CombineWork one = {features[k], first_bad == nullptr ? nullptr : first_bad + k, blocks, 0,
                       LaneBits(features[k].dim)};
    one.segments_per_block = (kThreads >> one.lane_bits) * kAhead;
    blocks += (features[k].segments.segments + one.segments_per_block - 1) / one.segments_per_block;
    work.push_back(one);
    has_fresh = has_fresh || features[k].fresh.is_on();
  }
  if (work.empty()) return;
  const int64_t count = static_cast<int64_t>(work.size());
  const CombineWork* on_device = Upload(cuda, scratch, work.data(), count);
  WithFloatType(output_type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Launch(has_fresh ? CombineKernel<T, true> : CombineKernel<T, false>, GridFor(blocks, 1), kThreads, 0, cuda,
           on_device, count, blocks);
  });
}

void SegmentScales(const Cuda& cuda, const DeviceSegments& segments, const float* weights, Combiner combiner,
                   float* scales) {
  Launch(SegmentScalesKernel, GridFor(segments.segments, kThreads), kThreads, 0, cuda, segments, weights, combiner,
         scales);
}

void ExpandSegments(const Cuda& cuda, DeviceScratch* scratch, const DeviceSegments& segments, const float* weights,
                    Combiner combiner, uint32_t* segment_of, float* factor) {
  float* scales = scratch->Get<float>(segments.segments);
  SegmentScales(cuda, segments, weights, combiner, scales);
  Launch(ExpandKernel, GridFor(segments.n, kThreads), kThreads, 0, cuda, segments, weights, scales, segment_of, factor);
}

}  // namespace sok
