// The asker's side of the way home: answers become outputs, and gradients of outputs become what goes back.
#include <algorithm>

#include "row_kernels.h"
#include "sok/exchange.h"

namespace sok {
namespace {

// Calls body(feature, first segment, last segment) so that all segments of all features are covered, in parallel.
template <class Body>
void ForSegments(const Cpu& cpu, const PooledFeature* features, int num_features, const Body& body) {
  int64_t segments = 0, work = 0;
  for (int f = 0; f < num_features; ++f) {
    segments += features[f].segments;
    work += features[f].segments * 30 + features[f].n * (10 + 2 * features[f].dim);
  }
  if (segments == 0) return;
  cpu.executor.For(segments, work / segments + 1, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (int f = 0; f < num_features && before < end; ++f) {
      const int64_t first = std::max<int64_t>(begin - before, 0), last = std::min(end - before, features[f].segments);
      if (first < last) body(f, first, last);
      before += features[f].segments;
    }
  });
}

struct RowSegment {
  int64_t first, last;
};

inline RowSegment SegmentOf(const PooledFeature& feature, int64_t s) {
  return feature.row_splits == nullptr ? RowSegment{s, s + 1}
                                       : RowSegment{feature.row_splits[s], feature.row_splits[s + 1]};
}

inline float ScaleOf(const PooledFeature& feature, const RowSegment& segment) {
  return SegmentScale(feature.combiner, feature.weights == nullptr ? nullptr : feature.weights + segment.first,
                      segment.last - segment.first);
}

// Answers as records one float apart, so that a place is a row number; its top bit chooses between two equal slabs.
class RowsOfAnswers {
 public:
  explicit RowsOfAnswers(const float* answers) : slabs_{const_cast<float*>(answers), const_cast<float*>(answers)} {}
  RowView view() const { return {slabs_, 31, kPlaceMask, 1}; }

 private:
  float* slabs_[2];  // only read
};

// For widths without a loop of their own, and with weights.
void CombineSegments(const RowKernels& kernels, const float* answers, const PooledFeature& feature, int64_t begin,
                     int64_t end, float* output) {
  constexpr int64_t kAhead = 16, kBlock = 64;
  const float* rows[kBlock];
  for (int64_t s = begin; s < end; ++s) {
    const RowSegment segment = SegmentOf(feature, s);
    float* out = output + s * feature.dim;
    int64_t at = segment.first;
    do {
      const int64_t count = std::min(kBlock, segment.last - at);
      for (int64_t i = 0; i < count; ++i) {
        if (at + i + kAhead < feature.n) __builtin_prefetch(answers + (feature.index[at + i + kAhead] & kPlaceMask));
        rows[i] = answers + (feature.index[at + i] & kPlaceMask);
      }
      const float* weights = feature.weights == nullptr ? nullptr : feature.weights + at;
      kernels.accumulate(rows, weights, count, feature.dim, at == segment.first, out);
      at += count;
    } while (at < segment.last);
    const float scale = ScaleOf(feature, segment);
    if (scale != 1.0f) kernels.scale(scale, feature.dim, out);
  }
}

// For widths without a loop of their own, and with weights: what falls into places [begin, end).
void ScatterSegments(const PooledFeature& feature, const float* grad, int64_t begin, int64_t end, float* packed) {
  const int64_t dim = feature.dim;
  constexpr int64_t kAhead = 16;
  for (int64_t s = 0; s < feature.segments; ++s) {
    const RowSegment segment = SegmentOf(feature, s);
    const float scale = ScaleOf(feature, segment);
    const float* g = grad + s * dim;
    for (int64_t i = segment.first; i < segment.last; ++i) {
      if (i + kAhead < feature.n) __builtin_prefetch(packed + (feature.index[i + kAhead] & kPlaceMask), 1);
      const int32_t place = feature.index[i] & kPlaceMask;
      if (place < begin || place >= end) continue;
      const float factor = feature.weights == nullptr ? scale : scale * feature.weights[i];
      float* to = packed + place;
      if (feature.index[i] < 0) {
        for (int64_t j = 0; j < dim; ++j) to[j] = factor * g[j];
      } else {
        for (int64_t j = 0; j < dim; ++j) to[j] += factor * g[j];
      }
    }
  }
}

}  // namespace

bool PlacesFit(const PooledFeature& feature, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < feature.n; ++i) largest = std::max(largest, feature.index[i] & kPlaceMask);
  return feature.n == 0 || largest + feature.dim <= size;
}

void CombineAnswers(const Cpu& cpu, const float* answers, const PooledFeature* features, int num_features,
                    float* const* outputs) {
  const RowKernels& kernels = ChosenRowKernels();
  const RowsOfAnswers rows(answers);
  ForSegments(cpu, features, num_features, [&](int f, int64_t begin, int64_t end) {
    const PooledFeature& feature = features[f];
    if (feature.weights == nullptr) {
      const uint32_t* index = reinterpret_cast<const uint32_t*>(feature.index);
      const int64_t* splits = feature.row_splits;
      const bool done = splits == nullptr ? kernels.gather(rows.view(), index + begin, end - begin, feature.dim, false,
                                                           outputs[f] + begin * feature.dim)
                                          : kernels.pool(rows.view(), index + splits[begin], splits, begin, end,
                                                         feature.combiner, feature.dim, outputs[f]);
      if (done) return;
    }
    CombineSegments(kernels, answers, feature, begin, end, outputs[f]);
  });
}

void CombineAnswersGrad(const Cpu& cpu, const PooledFeature* features, int num_features, const float* const* grads,
                        int64_t size, float* packed) {
  const RowKernels& kernels = ChosenRowKernels();
  // Each slice of the places is one thread's: it reads all features and sums what falls into its slice, in order.
  const int64_t slices = std::max<int64_t>(1, std::min<int64_t>(cpu.executor.num_threads(), size / 4096));
  int64_t work = 0;
  for (int f = 0; f < num_features; ++f) work += features[f].n * (10 + 2 * features[f].dim);
  cpu.executor.For(slices, work / slices + 1, [&](int64_t begin, int64_t end) {
    // The order of WriteRoute, so that a place is first named where the index says so.
    for (const bool free : {false, true}) {
      for (int f = 0; f < num_features; ++f) {
        if ((features[f].row_splits != nullptr && features[f].weights == nullptr) != free) continue;
        const PooledFeature& feature = features[f];
        const int64_t first = size * begin / slices, last = size * end / slices;
        if (feature.weights != nullptr ||
            !kernels.scatter(feature.index, feature.row_splits, feature.segments, feature.combiner, grads[f],
                             feature.dim, first, last, packed)) {
          ScatterSegments(feature, grads[f], first, last, packed);
        }
      }
    }
  });
}

void CombineAnswersGradWeights(const Cpu& cpu, const float* answers, const PooledFeature& feature, const float* grad,
                               float* grad_weights) {
  const int64_t dim = feature.dim;
  ForSegments(cpu, &feature, 1, [&](int, int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const RowSegment segment = SegmentOf(feature, s);
      const float scale = ScaleOf(feature, segment);
      const float* g = grad + s * dim;
      float out_dot = 0.0f;  // output . g
      for (int64_t i = segment.first; i < segment.last; ++i) {
        const float* row = answers + (feature.index[i] & kPlaceMask);
        float dot = 0.0f;
        for (int64_t j = 0; j < dim; ++j) dot += row[j] * g[j];
        grad_weights[i] = dot * scale;
        out_dot += feature.weights[i] * dot * scale;
      }
      // d scale / d w_i: -1 / (sum w)^2 for mean, -w_i / (sum w^2)^{3/2} for sqrtn.
      if (feature.combiner == Combiner::kSum) continue;
      for (int64_t i = segment.first; i < segment.last; ++i) {
        grad_weights[i] -=
            feature.combiner == Combiner::kMean ? out_dot * scale : out_dot * feature.weights[i] * scale * scale;
      }
    }
  });
}

}  // namespace sok
