// float32 and the types of 16 bit, as they lie in memory: the same bits on host and device, but for the payload of a NaN.
#pragma once

#include <cstdint>

#include "sok/philox.h"

namespace sok {

SOK_HOST_DEVICE uint32_t WordOfFloat(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t word;
  __builtin_memcpy(&word, &x, sizeof(word));
  return word;
#endif
}
SOK_HOST_DEVICE float FloatOfWord(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(word);
#else
  float x;
  __builtin_memcpy(&x, &word, sizeof(x));
  return x;
#endif
}

// Rounded to the nearest, ties to even; too large becomes infinite, a NaN stays one.
SOK_HOST_DEVICE uint16_t BFloat16Bits(float x) {
  const uint32_t word = WordOfFloat(x);
  if ((word & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
  return static_cast<uint16_t>((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
}
SOK_HOST_DEVICE float FloatOfBFloat16(uint16_t bits) { return FloatOfWord(uint32_t{bits} << 16); }

// The same for IEEE half precision. On a device one instruction; elsewhere what F16C does, which keeps the upper bits of a
// NaN and makes it quiet.
SOK_HOST_DEVICE uint16_t HalfBits(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#else
  const uint32_t word = WordOfFloat(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // below 2^-14: in steps of 2^-24, which the sum with 0.5 rounds to
    const float shifted = FloatOfWord(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (WordOfFloat(shifted) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}
SOK_HOST_DEVICE float FloatOfHalf(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude > 0x7C00u) return FloatOfWord(sign | 0x7FC00000u | (magnitude & 0x3FFu) << 13);
  if (magnitude == 0x7C00u) return FloatOfWord(sign | 0x7F800000u);
  if (magnitude >= 0x400u) return FloatOfWord(sign | ((magnitude << 13) + 0x38000000u));
  const float small = static_cast<float>(magnitude) * (1.0f / 16777216.0f);
  return sign != 0 ? -small : small;
#endif
}

}  // namespace sok
