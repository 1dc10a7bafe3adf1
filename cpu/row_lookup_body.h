// Rows to the answers of a lookup.
// Included by row_kernels_body.h, which says how.
#pragma once

#include <cmath>
#include <cstdint>

#include "row_vectors.h"

namespace sok {
namespace {

template <int64_t kDim>
SOK_INLINE void AskRecord(const float* record) {
  for (int64_t at = 0; at < kDim; at += 16) Ask(record + at);
  if (kDim % 16 != 0) Ask(record + kDim - 1);
}

// How many rows ahead the memory is asked: enough to hide its latency, not more lines than it can bring at once.
template <int64_t kDim>
constexpr int64_t kAheadRows = kDim <= 16   ? kAheadLines
                               : kDim <= 32 ? kAheadLines * 2 / 3
                                            : kAheadLines / 3;

// Stands for rows that are still to be made: no row that may change meanwhile.
alignas(64) const float kNoRecord[128] = {};

template <int64_t kDim>
void GatherFixed(const RowView view, const uint32_t* rows, int64_t n, bool stream, float* to) {
  using Vec = typename Wide<kDim>::Vec;
  constexpr int64_t kWidth = Wide<kDim>::kWidth, kVectors = Wide<kDim>::kVectors, kAhead = kAheadRows<kDim>;
  stream = stream && kDim % kLanes == 0 && reinterpret_cast<uintptr_t>(to) % kAlign == 0;
  static_assert(sizeof(kNoRecord) >= kDim * sizeof(float));
  auto record = [&](int64_t i) { return rows[i] == 0xFFFFFFFFu ? kNoRecord : RecordAt(view, rows[i]); };
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) AskRecord<kDim>(record(i + kAhead));
    const float* from = record(i);
    if (stream) {
      for (int64_t v = 0; v < kVectors; ++v) StreamVector(to + i * kDim + v * kWidth, from + v * kWidth);
    } else {
      for (int64_t v = 0; v < kVectors; ++v) {
        *reinterpret_cast<Vec*>(to + i * kDim + v * kWidth) = *reinterpret_cast<const Vec*>(from + v * kWidth);
      }
    }
  }
}

template <int64_t kDim, class Row>
void PoolFixed(const RowView view, const Row* rows, const int64_t* row_splits, int64_t first, int64_t last,
               Combiner combiner, float* out) {
  using Vec = typename Wide<kDim>::Vec;
  constexpr int64_t kWidth = Wide<kDim>::kWidth, kVectors = Wide<kDim>::kVectors, kAhead = kAheadRows<kDim>;
  const int64_t base = row_splits[first], n = row_splits[last] - base;
  auto record = [&](int64_t i) { return RecordAt(view, static_cast<uint32_t>(rows[i])); };
  for (int64_t i = 0; i < (n < kAhead ? n : kAhead); ++i) AskRecord<kDim>(record(i));
  int64_t i = 0;
  for (int64_t s = first; s < last; ++s) {
    const int64_t end = row_splits[s + 1] - base, count = end - i;
    Vec sum[kVectors] = {};
    for (; i < end; ++i) {
      AskRecord<kDim>(record(i + kAhead < n ? i + kAhead : n - 1));
      const float* from = record(i);
      for (int64_t v = 0; v < kVectors; ++v) sum[v] += *reinterpret_cast<const Vec*>(from + v * kWidth);
    }
    if (combiner != Combiner::kSum && count > 1) {
      const float divisor = static_cast<float>(count);
      const float scale = 1.0f / (combiner == Combiner::kMean ? divisor : sqrtf(divisor));
      for (int64_t v = 0; v < kVectors; ++v) sum[v] *= scale;
    }
    for (int64_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(out + s * kDim + v * kWidth) = sum[v];
  }
}

bool Gather(const RowView& view, const uint32_t* rows, int64_t n, int64_t dim, bool stream, float* to) {
#define SOK_CALL(kDim) GatherFixed<kDim>(view, rows, n, stream, to)
  SOK_FOR_DIMS(SOK_CALL)
#undef SOK_CALL
}

bool Pool(const RowView& view, const uint32_t* rows, const int64_t* row_splits, int64_t first, int64_t last,
          Combiner combiner, int64_t dim, float* out) {
#define SOK_CALL(kDim) PoolFixed<kDim>(view, rows, row_splits, first, last, combiner, out)
  SOK_FOR_DIMS(SOK_CALL)
#undef SOK_CALL
}

bool PoolKeys(const RowView& view, const uint64_t* keys, const int64_t* row_splits, int64_t first, int64_t last,
              Combiner combiner, int64_t dim, float* out) {
#define SOK_CALL(kDim) PoolFixed<kDim>(view, keys, row_splits, first, last, combiner, out)
  SOK_FOR_DIMS(SOK_CALL)
#undef SOK_CALL
}

bool AllBelow(const uint64_t* keys, int64_t n, uint64_t limit) {
  uint64_t over = 0;
  for (int64_t i = 0; i < n; ++i) over |= keys[i] >= limit ? ~uint64_t{0} : 0;
  return over == 0;
}

bool NeverFalls(const int64_t* x, int64_t n) {
  uint64_t falls = 0;  // its highest bit
  for (int64_t i = 1; i < n; ++i) {
    falls |= (static_cast<uint64_t>(x[i]) - static_cast<uint64_t>(x[i - 1])) | static_cast<uint64_t>(x[i]);
  }
  return falls >> 63 == 0;
}

bool Narrow(const uint64_t* keys, int64_t n, uint64_t limit, uint32_t* rows) {
  uint64_t over = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t is_over = keys[i] >= limit ? ~uint64_t{0} : 0;
    over |= is_over;
    rows[i] = static_cast<uint32_t>(keys[i] | is_over);
  }
  return over != 0;
}

int64_t Widen(const uint32_t* rows, int64_t n, int64_t base, int64_t* row_ids) {
  int64_t missing = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool none = rows[i] == 0xFFFFFFFFu;
    missing += none;
    row_ids[i] = none ? -1 : base + static_cast<int64_t>(rows[i]);
  }
  return missing;
}

// Columns of the sum, kept in registers.
template <bool kWeighted, class Shape>
SOK_INLINE void AccumulateStrip(Shape, const float* const* rows, const float* weights, int64_t count, int64_t at,
                                bool fresh, float* out) {
  typename Shape::Vec sum[Shape::kVectors];
  for (int64_t v = 0; v < Shape::kVectors; ++v)
    sum[v] = fresh ? typename Shape::Vec{} : *Shape::At(out + at + v * Shape::kWidth);
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows[i] + at;
    for (int64_t v = 0; v < Shape::kVectors; ++v) {
      const typename Shape::Vec x = *Shape::At(row + v * Shape::kWidth);
      sum[v] += kWeighted ? weights[i] * x : x;
    }
  }
  for (int64_t v = 0; v < Shape::kVectors; ++v) *Shape::At(out + at + v * Shape::kWidth) = sum[v];
}

template <bool kWeighted>
SOK_INLINE void AccumulateAll(const float* const* rows, const float* weights, int64_t count, int64_t dim, bool fresh,
                              float* out) {
  int64_t at = ForStrips(dim, 8, [&](auto shape, int64_t from) {
    AccumulateStrip<kWeighted>(shape, rows, weights, count, from, fresh, out);
  });
  for (; at < dim; ++at) {
    float sum = fresh ? 0.0f : out[at];
    for (int64_t i = 0; i < count; ++i) sum += kWeighted ? weights[i] * rows[i][at] : rows[i][at];
    out[at] = sum;
  }
}

void Accumulate(const float* const* rows, const float* weights, int64_t count, int64_t dim, bool fresh, float* out) {
  if (weights == nullptr) {
    AccumulateAll<false>(rows, weights, count, dim, fresh, out);
  } else {
    AccumulateAll<true>(rows, weights, count, dim, fresh, out);
  }
}

void Fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void Scale(float factor, int64_t dim, float* x) {
  for (int64_t j = 0; j < dim; ++j) x[j] *= factor;
}

}  // namespace
}  // namespace sok
