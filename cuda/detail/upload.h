// Small arrays of the host on the device, truly in stream order, by one operation on the stream: as parameters of a kernel, or
// where they do not fit there, copied from pinned memory. A copy from pageable memory may make the driver wait for the stream.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "launch.h"
#include "sok/scratch.h"
#include "staging.h"

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
  if (words <= 0) return;
  if (words > UploadChunk::kWords) return UploadBytes(cuda, from, words * 4, to);
  UploadChunk chunk;
  std::memcpy(chunk.words, from, static_cast<size_t>(words) * 4);
  Launch(StoreChunkKernel<uint32_t>, 1, 256, 0, cuda, chunk, reinterpret_cast<uint32_t*>(to), static_cast<int>(words));
}

// The same into scratch.
template <class T>
T* Upload(const Cuda& cuda, DeviceScratch* scratch, const T* from, int64_t n) {
  T* to = scratch->Get<T>(n);
  UploadTo(cuda, from, n, to);
  return to;
}

// Arrays of several types that go to the device together.
class Parcel {
 public:
  template <class T>
  struct Place {
    size_t at;
  };

  template <class T>
  Place<T> Add(const T* from, int64_t n) {
    static_assert(std::is_trivially_copyable<T>::value && alignof(T) <= kAlignment, "bytes are copied");
    const Place<T> place = {bytes_.size()};
#if defined(SOK_CUDA_EMULATED)
    std::vector<T> moved(from, from + n);
    sok_emulator::MoveElements(moved.data(), moved.size(), {__FILE__, __LINE__}, "an array of a parcel");
    from = moved.data();
#endif
    const char* begin = reinterpret_cast<const char*>(from);
    bytes_.insert(bytes_.end(), begin, begin + n * static_cast<int64_t>(sizeof(T)));
    bytes_.resize((bytes_.size() + kAlignment - 1) / kAlignment * kAlignment);
    return place;
  }

  void Send(const Cuda& cuda, DeviceScratch* scratch) {
    const int64_t words = static_cast<int64_t>(bytes_.size() / sizeof(uint32_t));
    on_device_ = reinterpret_cast<char*>(
        Upload(cuda, scratch, static_cast<const uint32_t*>(static_cast<const void*>(bytes_.data())), words));
  }

  // Where the array is once the parcel was sent.
  template <class T>
  T* On(const Place<T>& place) const {
    return reinterpret_cast<T*>(on_device_ + place.at);
  }

 private:
  static constexpr size_t kAlignment = 16;
  std::vector<char> bytes_;
  char* on_device_ = nullptr;
};

}  // namespace sok
