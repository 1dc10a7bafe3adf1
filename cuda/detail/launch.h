// How kernels are started, and the few words that a compiler for devices and the emulator (tests/cuda/emulator) spell
// differently.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "check.h"
#include "sok/device.h"
#include "sok/philox.h"

namespace sok {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xFFFFFFFFu;
constexpr int kThreads = 256;  // of a block
constexpr int kRowLanes = 8;   // that copy a row together

// A stream, and the line that puts something on it.
struct StreamAt {
  StreamAt(cudaStream_t s, const char* f = __builtin_FILE(), int l = __builtin_LINE()) : stream(s), file(f), line(l) {}
  StreamAt(const Cuda& cuda, const char* f = __builtin_FILE(), int l = __builtin_LINE())
      : stream(cuda.stream), file(f), line(l) {}

  cudaStream_t stream;
  const char* file;
  int line;
};

// Puts kernel(args...) on the stream: grid blocks of `block` threads. A grid of no blocks starts nothing.
// Throws CudaError.
template <class... Params, class... Args>
void Launch(void (*kernel)(Params...), int64_t grid, int block, size_t shared_bytes, StreamAt at, Args&&... args) {
  if (grid <= 0) return;
  std::tuple<Params...> params(std::forward<Args>(args)...);
#if defined(SOK_CUDA_EMULATED)
  std::apply([&](Params&... param) { sok_emulator::MoveArguments({at.file, at.line}, &param...); }, params);
  CheckCuda(sok_emulator::Launch(at.stream, static_cast<unsigned>(grid), static_cast<unsigned>(block), shared_bytes,
                                 [kernel, params] { std::apply(kernel, params); }),
            "starting a kernel", at.file, at.line);
#else
  std::apply(
      [&](Params&... param) {
        void* pointers[] = {const_cast<void*>(static_cast<const volatile void*>(&param))..., nullptr};
        CheckCuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid)),
                                   dim3(static_cast<unsigned>(block)), pointers, shared_bytes, at.stream),
                  "starting a kernel", at.file, at.line);
      },
      params);
#endif
}

// Blocks for n items at so many a block. Kernels stride over the grid, so that more items than fit one are no fault;
// a quarter of a million blocks keep any device busy.
inline int64_t GridFor(int64_t n, int64_t items_per_block) {
  return std::min<int64_t>((n + items_per_block - 1) / items_per_block, int64_t{1} << 18);
}

// This thread's number in the grid, and how many there are: 64 bits wide.
__device__ __forceinline__ int64_t GlobalThread() {
  return static_cast<int64_t>(blockIdx.x) * static_cast<int64_t>(blockDim.x) + static_cast<int64_t>(threadIdx.x);
}
__device__ __forceinline__ int64_t GlobalThreads() {
  return static_cast<int64_t>(gridDim.x) * static_cast<int64_t>(blockDim.x);
}

// A stretch of 2^k lanes of a warp that works on one item: lanes of a tile may talk to each other, and only to those.
template <int kLanes>
struct Tile {
  static_assert(kLanes >= 1 && kLanes <= kWarpSize && (kLanes & (kLanes - 1)) == 0, "a tile is 2^k lanes");

  __device__ __forceinline__ Tile()
      : lane(static_cast<int>(threadIdx.x) & (kLanes - 1)),
        first(static_cast<int>(threadIdx.x) & (kWarpSize - 1) & ~(kLanes - 1)),
        mask((kLanes == kWarpSize ? kFullMask : ((1u << (kLanes & 31)) - 1u)) << first) {}

  template <class T>
  __device__ __forceinline__ T Shuffle(T value, int from) const {
    return __shfl_sync(mask, value, from, kLanes);
  }
  // Bit i: what lane i of the tile said.
  __device__ __forceinline__ unsigned Ballot(bool yes) const {
    const unsigned lanes = __ballot_sync(mask, yes) >> first;
    return kLanes == kWarpSize ? lanes : lanes & ((1u << (kLanes & 31)) - 1u);
  }
  __device__ __forceinline__ void Sync() const { __syncwarp(mask); }

  int lane;       // of this thread in its tile
  int first;      // lane of the warp where the tile begins
  unsigned mask;  // the tile's lanes in the warp
};

// Reads and writes of words that other threads of the same launch may change meanwhile.
#if defined(SOK_CUDA_EMULATED)
template <class T>
T LoadRelaxed(const T* p) {
  sok_emulator::MaybeYield();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T>
void StoreRelaxed(T* p, T value) {
  sok_emulator::MaybeYield();
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
inline ulonglong2 LoadTwoRelaxed(const uint64_t* p) { return make_ulonglong2(LoadRelaxed(p), LoadRelaxed(p + 1)); }
#else
template <class T>
__device__ __forceinline__ T LoadRelaxed(const T* p) {
  return *static_cast<const volatile T*>(p);
}
template <class T>
__device__ __forceinline__ void StoreRelaxed(T* p, T value) {
  *static_cast<volatile T*>(p) = value;
}
// Each of the two by itself; p is 16-byte aligned.
__device__ __forceinline__ ulonglong2 LoadTwoRelaxed(const uint64_t* p) {
  ulonglong2 two;
  asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];" : "=l"(two.x), "=l"(two.y) : "l"(p));
  return two;
}
#endif

// Lets the line at p come near, for a read that follows. Waits for nothing.
#if defined(SOK_CUDA_EMULATED)
inline void Fetch(const void*) {}
#else
__device__ __forceinline__ void Fetch(const void* p) { asm volatile("prefetch.L2 [%0];" ::"l"(p)); }
#endif

// 16 bytes at once; p is 16-byte aligned.
__device__ __forceinline__ float4 LoadFloat4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void StoreFloat4(float* p, const float4& value) { *reinterpret_cast<float4*>(p) = value; }

SOK_HOST_DEVICE bool IsAligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

}  // namespace sok

// T* name = the launch's dynamic shared memory.
#if defined(SOK_CUDA_EMULATED)
#define SOK_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(sok_emulator::DynamicShared())
#else
#define SOK_DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char sok_shared_[]; \
  T* name = reinterpret_cast<T*>(sok_shared_)
#endif
