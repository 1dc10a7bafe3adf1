// Numbers between host and device, and between widths: what surrounds the kernels, for callers without CUDA's headers.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/float_type.h"

namespace sok {

// to[0 .. bytes) = from[0 .. bytes), put on the stream. `from` is host memory of any kind, read before the call returns; it
// travels by way of pinned memory, since a copy from another kind makes the host wait for the stream. Throws CudaError.
void CopyToDevice(const Cuda& cuda, void* to, const void* from, int64_t bytes);

// Memory of the host of any kind, and where it goes.
struct HostPart {
  const void* from;
  int64_t bytes;
  int64_t at;  // bytes behind the begin
};
// The same of several parts, which come in the order of `at` and do not overlap, by one copy for up to 32 MiB. What lies between
// them is overwritten.
void CopyToDevice(const Cuda& cuda, void* to, const HostPart* parts, int64_t num_parts);

void CopyOnDevice(const Cuda& cuda, void* to, const void* from, int64_t bytes);
void ZeroOnDevice(const Cuda& cuda, void* to, int64_t bytes);
void SetOnDevice(const Cuda& cuda, void* to, int byte, int64_t bytes);

// `to` is host memory. Waits for the stream.
void CopyToHost(const Cuda& cuda, void* to, const void* from, int64_t bytes);

// 32-bit keys as the 64-bit words that tables take: signed ones sign-extended, unsigned ones zero-extended. And back.
void WidenKeys(const Cuda& cuda, const uint32_t* keys, bool is_unsigned, int64_t n,
               uint64_t* words);  // [n]
void NarrowKeys(const Cuda& cuda, const uint64_t* words, int64_t n,
                uint32_t* keys);  // [n]

// 32-bit numbers as 64-bit ones.
void WidenNumbers(const Cuda& cuda, const uint32_t* numbers, int64_t n,
                  int64_t* wide);  // [n]

// float32 rounded to the nearest of `type`.
void RoundFloats(const Cuda& cuda, const float* from, int64_t n, FloatType type,
                 void* to);  // [n] of `type`

}  // namespace sok
