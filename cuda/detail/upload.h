// Small arrays of the host on the device, truly in stream order: as parameters of kernels. A copy from pageable memory may make
// the driver wait for the stream, and no graph can capture it.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "launch.h"
#include "sok/scratch.h"

#if defined(SOK_CUDA_EMULATED)
#include <vector>
#endif

namespace sok {

// Parameters of a kernel may have 4,096 bytes together.
struct UploadChunk {
  static constexpr int64_t kWords = 960;
  uint32_t words[kWords];
};

template <class T>  // a template only so that it may stand in a header
__global__ void StoreChunkKernel(const __grid_constant__ UploadChunk chunk, T* to, int num_words) {
  for (int i = static_cast<int>(threadIdx.x); i < num_words; i += static_cast<int>(blockDim.x)) to[i] = chunk.words[i];
}

// to[0 .. n) = from[0 .. n), put on the stream; `from` is read before the call returns.
template <class T>
void UploadTo(const Cuda& cuda, const T* from, int64_t n, T* to) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) % sizeof(uint32_t) == 0, "whole words are stored");
#if defined(SOK_CUDA_EMULATED)
  std::vector<T> moved(from, from + n);
  sok_emulator::MoveElements(moved.data(), moved.size(), {__FILE__, __LINE__}, "an uploaded array");
  from = moved.data();
#endif
  const int64_t words = n * static_cast<int64_t>(sizeof(T) / sizeof(uint32_t));
  for (int64_t at = 0; at < words; at += UploadChunk::kWords) {
    UploadChunk chunk;
    const int count = static_cast<int>(words - at < UploadChunk::kWords ? words - at : UploadChunk::kWords);
    std::memcpy(chunk.words, reinterpret_cast<const char*>(from) + at * 4, static_cast<size_t>(count) * 4);
    Launch(StoreChunkKernel<uint32_t>, 1, 256, 0, cuda, chunk, reinterpret_cast<uint32_t*>(to) + at, count);
  }
}

// The same into scratch.
template <class T>
T* Upload(const Cuda& cuda, DeviceScratch* scratch, const T* from, int64_t n) {
  T* to = scratch->Get<T>(n);
  UploadTo(cuda, from, n, to);
  return to;
}

}  // namespace sok
