// Gradients to sums, one a row.
// Included by row_kernels_body.h, which says how.
#pragma once

#include <cmath>
#include <cstdint>

#include "row_vectors.h"

namespace sok {
namespace {

// What each of a segment's `count` keys adds: its gradient, times what pooling multiplied the rows with.
template <int64_t kDim>
inline void LoadAddend(const float* value, int64_t count, Combiner combiner, typename Wide<kDim>::Vec* add) {
  using Vec = typename Wide<kDim>::Vec;
  for (int64_t v = 0; v < Wide<kDim>::kVectors; ++v)
    add[v] = *reinterpret_cast<const Vec*>(value + v * Wide<kDim>::kWidth);
  if (combiner == Combiner::kSum || count <= 1) return;
  const float divisor = static_cast<float>(count);
  const float scale = 1.0f / (combiner == Combiner::kMean ? divisor : sqrtf(divisor));
  for (int64_t v = 0; v < Wide<kDim>::kVectors; ++v) add[v] = scale * add[v];
}

template <int64_t kDim>
void SumSegmentsFixed(const uint32_t* slot, const int64_t* row_splits, int64_t segments, Combiner combiner,
                      const float* values, uint32_t* next, float* sums) {
  using Vec = typename Wide<kDim>::Vec;
  constexpr int64_t kWidth = Wide<kDim>::kWidth, kVectors = Wide<kDim>::kVectors, kAhead = 16;
  const int64_t n = row_splits == nullptr ? segments : row_splits[segments];
  uint32_t seen = *next;
  int64_t i = 0;
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t end = row_splits == nullptr ? s + 1 : row_splits[s + 1], count = end - i;
    Vec add[kVectors];
    LoadAddend<kDim>(values + s * kDim, count, combiner, add);
    for (; i < end; ++i) {
      if (i + kAhead < n) {  // of a slot that is left out, too: its address is nobody's, and no pointer may lie there
        const uintptr_t ahead = reinterpret_cast<uintptr_t>(sums) + uintptr_t{slot[i + kAhead]} * kDim * sizeof(float);
        for (uintptr_t at = 0; at < kDim * sizeof(float); at += 64)
          __builtin_prefetch(reinterpret_cast<const void*>(ahead + at), 1);
      }
      if (slot[i] == 0xFFFFFFFFu) continue;
      float* to = sums + int64_t{slot[i]} * kDim;
      if (slot[i] == seen) {
        ++seen;
        for (int64_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(to + v * kWidth) = Vec{} + add[v];
      } else {
        for (int64_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(to + v * kWidth) += add[v];
      }
    }
  }
  *next = seen;
}

bool SumSegments(const uint32_t* slot, const int64_t* row_splits, int64_t segments, Combiner combiner,
                 const float* values, int64_t dim, uint32_t* next, float* sums) {
#define SOK_CALL(kDim) SumSegmentsFixed<kDim>(slot, row_splits, segments, combiner, values, next, sums)
  SOK_FOR_DIMS(SOK_CALL)
#undef SOK_CALL
}

template <int64_t kDim>
void ScatterFixed(const int32_t* index, const int64_t* row_splits, int64_t segments, Combiner combiner,
                  const float* values, int64_t first, int64_t last, float* to) {
  using Vec = typename Wide<kDim>::Vec;
  typedef int32_t Bits __attribute__((vector_size(sizeof(Vec)), aligned(4), may_alias));
  constexpr int64_t kWidth = Wide<kDim>::kWidth, kVectors = Wide<kDim>::kVectors, kAhead = kAheadRows<kDim>;
  const int64_t n = row_splits == nullptr ? segments : row_splits[segments];
  int64_t i = 0;
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t end = row_splits == nullptr ? s + 1 : row_splits[s + 1], count = end - i;
    Vec add[kVectors];
    LoadAddend<kDim>(values + s * kDim, count, combiner, add);
    for (; i < end; ++i) {
      if (i + kAhead < n) {
        const float* ahead = to + (index[i + kAhead] & 0x7fffffff);
        for (int64_t at = 0; at < kDim; at += 16) __builtin_prefetch(ahead + at, 1);
      }
      const int64_t place = index[i] & 0x7fffffff;
      if (place < first || place >= last) continue;
      // No branch: which keys are the first of their place nobody can foretell.
      const int32_t kept = ~(index[i] >> 31);
      for (int64_t v = 0; v < kVectors; ++v) {
        Vec* sum = reinterpret_cast<Vec*>(to + place + v * kWidth);
        const Bits old = *reinterpret_cast<const Bits*>(sum) & (Bits{} + kept);
        *sum = reinterpret_cast<Vec>(old) + add[v];
      }
    }
  }
}

bool Scatter(const int32_t* index, const int64_t* row_splits, int64_t segments, Combiner combiner, const float* values,
             int64_t dim, int64_t first, int64_t last, float* to) {
#define SOK_CALL(kDim) ScatterFixed<kDim>(index, row_splits, segments, combiner, values, first, last, to)
  SOK_FOR_DIMS(SOK_CALL)
#undef SOK_CALL
}

template <bool kScaled, class Shape>
SOK_INLINE void SumStrip(Shape, const float* const* source, const float* factor, const uint32_t* slot, int64_t n,
                         int64_t dim, int64_t at, float* sums) {
  using Vec = typename Shape::Vec;
  constexpr int64_t kAhead = 8, kColumns = Shape::kVectors * Shape::kWidth;
  uint32_t next = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      for (int64_t line = 0; line < kColumns; line += 16) {
        __builtin_prefetch(source[i + kAhead] + at + line);
        __builtin_prefetch(sums + int64_t{slot[i + kAhead]} * dim + at + line, 1);
      }
    }
    const float* from = source[i] + at;
    float* to = sums + int64_t{slot[i]} * dim + at;
    const bool first = slot[i] == next;
    next += first;
    for (int64_t v = 0; v < Shape::kVectors; ++v) {
      const Vec x = *Shape::At(from + v * Shape::kWidth), add = kScaled ? factor[i] * x : x;
      Vec* sum = Shape::At(to + v * Shape::kWidth);
      *sum = (first ? Vec{} : *sum) + add;
    }
  }
}

template <bool kScaled>
SOK_INLINE void SumAll(const float* const* source, const float* factor, const uint32_t* slot, int64_t n, int64_t dim,
                       float* sums) {
  int64_t at = ForStrips(
      dim, 8, [&](auto shape, int64_t from) { SumStrip<kScaled>(shape, source, factor, slot, n, dim, from, sums); });
  for (; at < dim; ++at) {
    uint32_t next = 0;
    for (int64_t i = 0; i < n; ++i) {
      float* to = sums + int64_t{slot[i]} * dim + at;
      const bool first = slot[i] == next;
      next += first;
      *to = (first ? 0.0f : *to) + (kScaled ? factor[i] * source[i][at] : source[i][at]);
    }
  }
}

void SumBySlot(const float* const* source, const float* factor, const uint32_t* slot, int64_t n, int64_t dim,
               float* sums) {
  if (factor == nullptr) {
    SumAll<false>(source, factor, slot, n, dim, sums);
  } else {
    SumAll<true>(source, factor, slot, n, dim, sums);
  }
}

template <class Shape>
SOK_INLINE void AddStrip(Shape, const float* const* source, float* const* to, const uint8_t* fresh, int64_t n,
                         int64_t at) {
  using Vec = typename Shape::Vec;
  constexpr int64_t kAhead = 8, kColumns = Shape::kVectors * Shape::kWidth;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      for (int64_t line = 0; line < kColumns; line += 16) {
        __builtin_prefetch(source[i + kAhead] + at + line);
        __builtin_prefetch(to[i + kAhead] + at + line, 1);
      }
    }
    const float* from = source[i] + at;
    for (int64_t v = 0; v < Shape::kVectors; ++v) {
      Vec* sum = Shape::At(to[i] + at + v * Shape::kWidth);
      *sum = (fresh[i] ? Vec{} : *sum) + *Shape::At(from + v * Shape::kWidth);
    }
  }
}

void AddRows(const float* const* source, float* const* to, const uint8_t* fresh, int64_t n, int64_t dim) {
  int64_t at = ForStrips(dim, 4, [&](auto shape, int64_t from) { AddStrip(shape, source, to, fresh, n, from); });
  for (; at < dim; ++at)
    for (int64_t i = 0; i < n; ++i) to[i][at] = (fresh[i] ? 0.0f : to[i][at]) + source[i][at];
}

}  // namespace
}  // namespace sok
