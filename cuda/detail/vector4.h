// Four neighbouring elements of a row at a time, whatever their type in memory: a lane of a tile holds columns
// 4 * lane .. 4 * lane + 3 of a row in float32, read and written at once where the address allows it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "sok/first_bad.h"
#include "sok/float_type.h"
#include "sok/philox.h"

#if !defined(SOK_CUDA_EMULATED)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// In front of a loop over few, counted items that must be under way together.
#if defined(SOK_CUDA_EMULATED)
#define SOK_UNROLL
#else
#define SOK_UNROLL _Pragma("unroll")
#endif

namespace sok {

// As they lie in memory.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

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

// The same for IEEE half precision. On a device one instruction; this is what it does.
SOK_HOST_DEVICE uint16_t HalfBits(float x) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(x));
#else
  const uint32_t word = WordOfFloat(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7FFFu);
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
  return __half2float(__ushort_as_half(bits));
#else
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return FloatOfWord(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  if (magnitude >= 0x400u) return FloatOfWord(sign | ((magnitude << 13) + 0x38000000u));
  const float small = static_cast<float>(magnitude) * (1.0f / 16777216.0f);
  return sign != 0 ? -small : small;
#endif
}

SOK_HOST_DEVICE float ToFloat(float x) { return x; }
SOK_HOST_DEVICE float ToFloat(Half x) { return FloatOfHalf(x.bits); }
SOK_HOST_DEVICE float ToFloat(BFloat16 x) { return FloatOfBFloat16(x.bits); }
SOK_HOST_DEVICE void FromFloat(float x, float* to) { *to = x; }
SOK_HOST_DEVICE void FromFloat(float x, Half* to) { to->bits = HalfBits(x); }
SOK_HOST_DEVICE void FromFloat(float x, BFloat16* to) { to->bits = BFloat16Bits(x); }

struct Vector4 {
  float x[4];
};

// The first `count` (1 to 4) elements at p; the others read as zero. One access where p is aligned for it.
__device__ __forceinline__ Vector4 Load4(const float* p, int count) {
  if (count == 4 && IsAligned16(p)) {
    const float4 v = LoadFloat4(p);
    return {{v.x, v.y, v.z, v.w}};
  }
  Vector4 out = {};
  for (int j = 0; j < 4; ++j)
    if (j < count) out.x[j] = p[j];
  return out;
}
template <class T>
__device__ __forceinline__ Vector4 Load4(const T* p, int count) {
  Vector4 out = {};
  if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    const uint32_t word[2] = {v.x, v.y};
    for (int j = 0; j < 4; ++j) out.x[j] = ToFloat(T{static_cast<uint16_t>(word[j / 2] >> (16 * (j & 1)))});
    return out;
  }
  for (int j = 0; j < 4; ++j)
    if (j < count) out.x[j] = ToFloat(p[j]);
  return out;
}

__device__ __forceinline__ void Store4(float* p, const Vector4& v, int count) {
  if (count == 4 && IsAligned16(p)) {
    StoreFloat4(p, make_float4(v.x[0], v.x[1], v.x[2], v.x[3]));
    return;
  }
  for (int j = 0; j < 4; ++j)
    if (j < count) p[j] = v.x[j];
}
template <class T>
__device__ __forceinline__ void Store4(T* p, const Vector4& v, int count) {
  T out[4];
  for (int j = 0; j < 4; ++j) FromFloat(v.x[j], &out[j]);
  if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    *reinterpret_cast<uint2*>(p) =
        make_uint2(out[0].bits | uint32_t{out[1].bits} << 16, out[2].bits | uint32_t{out[3].bits} << 16);
    return;
  }
  for (int j = 0; j < 4; ++j)
    if (j < count) p[j] = out[j];
}

// log2 of how many lanes share a row of dim elements: enough to have four each, at most a warp.
inline int LaneBits(int64_t dim) {
  int bits = 0;
  while (bits < 5 && (int64_t{4} << bits) < dim) ++bits;
  return bits;
}

// How many of a lane's four columns from `column` on there are.
SOK_HOST_DEVICE int ColumnsLeft(int64_t dim, int64_t column) {
  return dim - column >= 4 ? 4 : static_cast<int>(dim - column);
}

// Where a kernel reports what is wrong with its input; the caller set it to kNothingBad. Null: it is left unsaid.
__device__ __forceinline__ void ReportBad(uint64_t* first_bad, int64_t position) {
  if (first_bad != nullptr) {
    atomicMin(reinterpret_cast<unsigned long long*>(first_bad), static_cast<unsigned long long>(position));
  }
}

// Calls f with a null pointer of the type.
template <class F>
void WithFloatType(FloatType type, const F& f) {
  if (type == FloatType::kFloat32) {
    f(static_cast<float*>(nullptr));
  } else if (type == FloatType::kFloat16) {
    f(static_cast<Half*>(nullptr));
  } else {
    f(static_cast<BFloat16*>(nullptr));
  }
}

}  // namespace sok
