// The bodies of RowKernels. Included by one file per instruction set, each compiled with its own flags, so nothing here
// may have external linkage: the linker would keep one copy for all.
#include <cstdint>
#include <cstring>

#include "row_kernels.h"
#include "sok/initializer.h"

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

// A row of kDim floats in the widest vectors that it fills.
template <int64_t kDim>
struct Wide : Width<(kDim < kLanes ? kDim : kLanes), (kDim < kLanes ? 1 : kDim / kLanes)> {};

SOK_INLINE const float* RecordAt(const RowView& view, uint32_t row) {
  return view.slabs[row >> view.shift] + (row & view.mask) * view.stride;
}

template <int64_t kDim>
SOK_INLINE void PrefetchRecord(const float* record) {
  for (int64_t at = 0; at < kDim; at += 16) __builtin_prefetch(record + at);
  if (kDim % 16 != 0) __builtin_prefetch(record + kDim - 1);
}

// How many rows ahead the memory is asked: enough to hide its latency, not more lines than it can bring at once.
template <int64_t kDim>
constexpr int64_t kAheadRows = kDim <= 16   ? 24
                               : kDim <= 32 ? 16
                                            : 8;

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
    if (i + kAhead < n) PrefetchRecord<kDim>(record(i + kAhead));
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
  constexpr int64_t kRing = 32;  // records on their way; kAhead of them at a time
  const float* ring[kRing];
  const int64_t base = row_splits[first], n = row_splits[last] - base;
  auto ask = [&](int64_t i) {
    ring[i % kRing] = RecordAt(view, static_cast<uint32_t>(rows[i]));
    PrefetchRecord<kDim>(ring[i % kRing]);
  };
  for (int64_t i = 0; i < (n < kAhead ? n : kAhead); ++i) ask(i);
  int64_t i = 0;
  for (int64_t s = first; s < last; ++s) {
    const int64_t end = row_splits[s + 1] - base, count = end - i;
    Vec sum[kVectors] = {};
    for (; i < end; ++i) {
      const float* from = ring[i % kRing];
      if (i + kAhead < n) ask(i + kAhead);
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
    for (int64_t v = 0; v < kVectors; ++v) add[v] = *reinterpret_cast<const Vec*>(values + s * kDim + v * kWidth);
    if (combiner != Combiner::kSum && count > 1) {
      const float divisor = static_cast<float>(count);
      const float scale = 1.0f / (combiner == Combiner::kMean ? divisor : sqrtf(divisor));
      for (int64_t v = 0; v < kVectors; ++v) add[v] = scale * add[v];
    }
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

SOK_INLINE void UpdateRecord(const UpdateRule& rule, const float* __restrict__ g, float* __restrict__ w,
                             float* __restrict__ a, int64_t dim) {
  const float lr = rule.lr, epsilon = rule.epsilon, c1 = rule.one_minus_beta_1, c2 = rule.one_minus_beta_2;
  float* __restrict__ b = a + dim;
  switch (rule.rule) {
    case Rule::kSgd:
      for (int64_t j = 0; j < dim; ++j) SgdElement(g[j], lr, &w[j]);
      break;
    case Rule::kAdagrad:
      for (int64_t j = 0; j < dim; ++j) AdagradElement(g[j], lr, epsilon, &w[j], &a[j]);
      break;
    case Rule::kAdam:
    case Rule::kLazyAdam:
      for (int64_t j = 0; j < dim; ++j) AdamElement(g[j], lr, c1, c2, epsilon, &w[j], &a[j], &b[j]);
      break;
  }
}

void Update(const UpdateRule& rule, float* const* records, int64_t slot_offset, const float* grads, int64_t count,
            int64_t dim) {
  for (int64_t i = 0; i < count; ++i) UpdateRecord(rule, grads + i * dim, records[i], records[i] + slot_offset, dim);
}

template <int64_t kDim>
SOK_INLINE void UpdateRowsOf(const RowView& view, const UpdateRule& rule, const int64_t* row_ids, int64_t slot_offset,
                             const float* grads, int64_t count, int64_t dim) {
  if (kDim != 0) dim = kDim;
  const int64_t floats = rule.num_slots() * dim, lines = (slot_offset + floats + 15) / 16;
  const int64_t ahead = lines <= 4 ? 12 : lines <= 12 ? 6 : 3;
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) {
      const float* next = RecordAt(view, static_cast<uint32_t>(row_ids[i + ahead]));
      for (int64_t at = 0; at < dim; at += 16) __builtin_prefetch(next + at, 1);
      for (int64_t at = slot_offset; at < slot_offset + floats; at += 16) __builtin_prefetch(next + at, 1);
    }
    float* w = const_cast<float*>(RecordAt(view, static_cast<uint32_t>(row_ids[i])));
    UpdateRecord(rule, grads + i * dim, w, w + slot_offset, dim);
  }
}

void UpdateRows(const RowView& view, const UpdateRule& rule, const int64_t* row_ids, int64_t slot_offset,
                const float* grads, int64_t count, int64_t dim) {
  // Where a row is a few vectors, a loop of unknown length costs more than what it does.
  if (dim == 4) return UpdateRowsOf<4>(view, rule, row_ids, slot_offset, grads, count, dim);
  if (dim == 8) return UpdateRowsOf<8>(view, rule, row_ids, slot_offset, grads, count, dim);
  if (dim == 16) return UpdateRowsOf<16>(view, rule, row_ids, slot_offset, grads, count, dim);
  if (dim == 32) return UpdateRowsOf<32>(view, rule, row_ids, slot_offset, grads, count, dim);
  UpdateRowsOf<0>(view, rule, row_ids, slot_offset, grads, count, dim);
}

void ReadDecayed(const Decay& decay, float epsilon, const float* w, const float* m, const float* v, int64_t dim,
                 float* out) {
  for (int64_t j = 0; j < dim; ++j) out[j] = w[j] - DecayedStep(decay, epsilon, m[j], v[j]);
}

void Settle(const Decay& decay, float epsilon, int64_t dim, float* __restrict__ w, float* __restrict__ m,
            float* __restrict__ v) {
  for (int64_t j = 0; j < dim; ++j) {
    w[j] -= DecayedStep(decay, epsilon, m[j], v[j]);
    m[j] *= decay.fade_m;
    v[j] *= decay.fade_v;
  }
}

constexpr int64_t kBlocks = 16;  // Philox blocks side by side: one block gives four floats

// All rounds of kBlocks blocks, word w of block l in c[w][l].
#if defined(__AVX2__)
// By hand, as no compiler sees that one multiplication of the lower halves of 64-bit lanes gives both halves of a product.
// What stands above a lane's lower half is never looked at.
void PhiloxBlocks(uint64_t seed, uint32_t (*c)[kBlocks]) {
  constexpr int64_t kAtOnce = 4;
  const __m256i multiplier_a = _mm256_set1_epi64x(kPhiloxMultiplier0),
                multiplier_b = _mm256_set1_epi64x(kPhiloxMultiplier1);
  const __m256i lower = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
  for (int64_t l = 0; l < kBlocks; l += kAtOnce) {
    __m256i word[4];
    for (int w = 0; w < 4; ++w) word[w] = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<__m128i*>(c[w] + l)));
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i a = _mm256_mul_epu32(word[0], multiplier_a), b = _mm256_mul_epu32(word[2], multiplier_b);
      word[0] = _mm256_xor_si256(_mm256_srli_epi64(b, 32), _mm256_xor_si256(word[1], _mm256_set1_epi64x(key0)));
      word[2] = _mm256_xor_si256(_mm256_srli_epi64(a, 32), _mm256_xor_si256(word[3], _mm256_set1_epi64x(key1)));
      word[1] = b;
      word[3] = a;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    for (int w = 0; w < 4; ++w) {
      const __m256i packed = _mm256_permutevar8x32_epi32(word[w], lower);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(c[w] + l), _mm256_castsi256_si128(packed));
    }
  }
}
#else
void PhiloxBlocks(uint64_t seed, uint32_t (*c)[kBlocks]) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int64_t l = 0; l < kBlocks; ++l) PhiloxRound(&c[0][l], &c[1][l], &c[2][l], &c[3][l], key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}
#endif

void FillUniform(uint64_t seed, float a, float width, const uint64_t* keys, int64_t count, int64_t dim,
                 float* const* records) {
  const int64_t per_row = (dim + 3) / 4, total = count * per_row;
  int64_t row = 0, block = 0;        // of the block that is prepared next
  int64_t to_row = 0, to_block = 0;  // of the one that is stored next
  for (int64_t first = 0; first < total; first += kBlocks) {
    uint32_t c[4][kBlocks] = {};
    const int64_t n = total - first < kBlocks ? total - first : kBlocks;
    for (int64_t l = 0; l < n; ++l) {
      const PhiloxWords counter = RowCounter(keys[row], static_cast<uint32_t>(block));
      for (int w = 0; w < 4; ++w) c[w][l] = counter.word[w];
      if (++block < per_row) continue;
      block = 0;
      ++row;
    }
    PhiloxBlocks(seed, c);
    float value[kBlocks][4];
    for (int64_t l = 0; l < kBlocks; ++l)
      for (int w = 0; w < 4; ++w) value[l][w] = a + UnitUniform(c[w][l]) * width;
    for (int64_t l = 0; l < n; ++l) {
      const int64_t at = to_block * 4, size = dim - at < 4 ? dim - at : 4;
      float* to = records[to_row] + at;
      if (size == 4) {
        std::memcpy(to, value[l], sizeof(value[l]));
      } else {
        for (int64_t j = 0; j < size; ++j) to[j] = value[l][j];
      }
      if (++to_block < per_row) continue;
      to_block = 0;
      ++to_row;
    }
  }
}

constexpr RowKernels kKernels = {Gather,    Fence,   Pool,        PoolKeys,    AllBelow,   NeverFalls,
                                 Narrow,    Widen,   SumSegments, UpdateRows,  Accumulate, Scale,
                                 SumBySlot, AddRows, Update,      ReadDecayed, Settle,     FillUniform};

}  // namespace
}  // namespace sok
