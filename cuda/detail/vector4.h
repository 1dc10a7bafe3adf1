// Four neighbouring elements of a row at a time, whatever their type in memory: a lane of a tile holds columns
// 4 * lane .. 4 * lane + 3 of a row in float32, read and written at once where the address allows it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "sok/first_bad.h"
#include "sok/float_bits.h"
#include "sok/float_type.h"

// In front of a loop over few, counted items that must be under way together.
#if defined(SOK_CUDA_EMULATED)
#define SOK_UNROLL
#else
#define SOK_UNROLL _Pragma("unroll")
#endif

// In front of a function that nvcc is to call, not to copy.
#if defined(SOK_CUDA_EMULATED)
#define SOK_OUT_OF_LINE
#else
#define SOK_OUT_OF_LINE __noinline__
#endif

namespace sok {

// As they lie in memory.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

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
