// Rows as vectors, as wide as the instruction set has them: what the bodies of RowKernels are written in.
// Included by row_kernels_body.h, which says how.
#pragma once

#include <cstdint>

#include "row_kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace sok {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kAlign = kLanes * 4;

#define SOK_INLINE inline __attribute__((always_inline))

// So many vectors of so many floats.
template <int64_t kFloats, int64_t kCount>
struct Width {
  static constexpr int64_t kWidth = kFloats, kVectors = kCount;
  typedef float Vec __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
  static SOK_INLINE const Vec* At(const float* p) { return reinterpret_cast<const Vec*>(p); }
  static SOK_INLINE Vec* At(float* p) { return reinterpret_cast<Vec*>(p); }
};

SOK_INLINE void StreamVector(float* to, const float* from) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, _mm512_loadu_ps(from));
#elif defined(__AVX2__)
  _mm256_stream_ps(to, _mm256_loadu_ps(from));
#elif defined(__SSE2__)
  _mm_stream_ps(to, _mm_loadu_ps(from));
#else
  *Width<kLanes, 1>::At(to) = *Width<kLanes, 1>::At(from);
#endif
}

// Asks the memory for a line that will be read soon. Where there is AVX-512 into the second cache alone: an Intel has three
// times as many lines on their way there as to the first, and a load from it is hidden anyway.
#if defined(__AVX512F__)
constexpr int kAskedFor = 2;
constexpr int64_t kAheadLines = 64;
#else
constexpr int kAskedFor = 3;
constexpr int64_t kAheadLines = 24;
#endif
SOK_INLINE void Ask(const void* line) { __builtin_prefetch(line, 0, kAskedFor); }

// A row of kDim floats in the widest vectors that it fills.
template <int64_t kDim>
struct Wide : Width<(kDim < kLanes ? kDim : kLanes), (kDim < kLanes ? 1 : kDim / kLanes)> {};

SOK_INLINE const float* RecordAt(const RowView& view, uint32_t row) {
  return view.slabs[row >> view.shift] + (row & view.mask) * view.stride;
}

#define SOK_FOR_DIMS(call) \
  switch (dim) {           \
    case 4:                \
      call(4);             \
      return true;         \
    case 8:                \
      call(8);             \
      return true;         \
    case 16:               \
      call(16);            \
      return true;         \
    case 32:               \
      call(32);            \
      return true;         \
    case 64:               \
      call(64);            \
      return true;         \
    case 128:              \
      call(128);           \
      return true;         \
    default:               \
      return false;        \
  }

// Calls strip<width, vectors>(at) for stretches of columns that cover [0, dim) but for fewer than four at the end; gives
// where those begin. Narrow vectors do what the widest leave: a row of eight floats is one of them, not eight columns.
template <class Strip>
SOK_INLINE int64_t ForStrips(int64_t dim, int64_t widest, const Strip& strip) {
  int64_t at = 0;
  if (widest >= 8)
    for (; at + 8 * kLanes <= dim; at += 8 * kLanes) strip(Width<kLanes, 8>(), at);
  for (; at + 4 * kLanes <= dim; at += 4 * kLanes) strip(Width<kLanes, 4>(), at);
  if (at + 2 * kLanes <= dim) {
    strip(Width<kLanes, 2>(), at);
    at += 2 * kLanes;
  }
  if (at + kLanes <= dim) {
    strip(Width<kLanes, 1>(), at);
    at += kLanes;
  }
  if (kLanes > 8 && at + 8 <= dim) {
    strip(Width<8, 1>(), at);
    at += 8;
  }
  if (kLanes > 4 && at + 4 <= dim) {
    strip(Width<4, 1>(), at);
    at += 4;
  }
  return at;
}

}  // namespace
}  // namespace sok
