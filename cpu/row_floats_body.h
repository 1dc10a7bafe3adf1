// RowKernels: floats to 16 bit and back, with the bits of sok/float_bits.h.
#include <cstdint>

#include "sok/float_bits.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace sok {
namespace {

void ToHalf(const float* from, int64_t n, uint16_t* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bits);
  }
#endif
  for (; i < n; ++i) to[i] = HalfBits(from[i]);
}

void FromHalf(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < n; ++i) to[i] = FloatOfHalf(from[i]);
}

void ToBFloat16(const float* from, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = BFloat16Bits(from[i]);
}

void FromBFloat16(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = FloatOfBFloat16(from[i]);
}

}  // namespace
}  // namespace sok
