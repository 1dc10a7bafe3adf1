// CUDA on the host, as far as cuda/ uses it: the same .cu files, compiled by the host's compiler, run here. For tests only.
//
// Threads of a block are fibers of one thread of the host, so that __syncthreads and warp functions work; blocks of a grid
// run side by side on several threads, and each stream is a thread of its own. A fiber may give way to another at any atomic
// operation, in an order that SOK_EMULATOR_SEED changes. What the device leaves undefined ends the process here, with a
// sentence: a barrier that a thread never reaches, a lane that reads from one outside the mask. Under ThreadSanitizer two
// threads of a block that touch the same memory without a barrier between them are a race, as they are on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#define SOK_CUDA_EMULATED 1

#define __global__
#define __device__
#define __host__
// No more than that: what is made of each template is large, and takes twice as long to compile where all is put in its place.
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// A block runs on one thread of the host from its first to its last instruction.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// ---- the host's side

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0,
                   cudaHostRegisterDefault = 0, cudaHostAllocPortable = 1;

struct CUstream_st;
struct CUevent_st;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))

#if defined(SOK_TRACED)  // linked to what nvcc has made (tests/cuda/traced)
extern "C" {
#endif
const char* cudaGetErrorName(cudaError_t status);
const char* cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceCount(int* count);

// As of CUDA 13. Of the driver it has what cuda/home_device.cc asks for.
#define CUDART_VERSION 13000
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* found);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaMalloc(void** p, size_t bytes);
cudaError_t cudaFree(void* p);
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream);
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* p);
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p);
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* p);
// As on a device: from and to pinned memory the copy happens later; other memory was read, or is written, on return.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
// Of the stream's work; calls nothing of CUDA's. Tests put what other libraries do on streams by it.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);
#if defined(SOK_TRACED)
}
#endif

template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** p, size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(p), bytes, flags);
}

namespace sok_emulator {

// Puts grid * block calls of `thread` on the stream.
cudaError_t Launch(cudaStream_t stream, unsigned grid, unsigned block, size_t shared_bytes,
                   std::function<void()> thread);

// Puts work on the stream that runs once, on the host. Counts as a launch.
cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work);

// Of the calls from here on (of_allocations: of those that ask for memory) the one after `others` more fails with the error; for good:
// so do all after it, as those of a device on which a kernel has gone astray.
void FailCall(int64_t others, int error, bool for_good, bool of_allocations = false);
bool EndFaults();  // no call fails any more; whether one has

// Where the device has what the host knows as p. Memory of the host stays where it is.
void* MovedToDevice(const void* p);
template <class T>
T* OnDevice(T* p) {
  return static_cast<T*>(MovedToDevice(p));
}

// Moves pointers to where the device has what they point to. Those in structures are known by their values. Ends the process,
// naming `what` and the line, where one points to memory of the host that is not pinned: no device reaches it.
struct Line {
  const char* file;
  int number;
};
void MovePointers(void* words, size_t bytes, bool are_pointers, Line line, const char* what);
template <class T>
void MoveElements(T* values, size_t n, Line line, const char* what) {
  constexpr bool kIsPointer = std::is_pointer<T>::value;
  if constexpr (kIsPointer || (std::is_class<T>::value && alignof(T) >= alignof(void*))) {
    // Between members anything may lie, half an old pointer too.
#if !defined(__clang__)  // which has no such thing
    for (size_t i = 0; i < n; ++i) __builtin_clear_padding(values + i);
#endif
    MovePointers(values, n * sizeof(T), kIsPointer, line, what);
  }
}
template <class... T>
void MoveArguments(Line line, T*... arguments) {
  int number = 0;
  (MoveElements(arguments, 1, line, ("argument " + std::to_string(++number)).c_str()), ...);
}

// From now on memory of the host is as good as the device's: where NumPy's arrays stand for a device's.
void HostMemoryIsDevice();

// Calls for which this device had to have a context, since the process began.
int64_t CallsOn(int device);

// What all threads have asked for since the process began. A call of CUB counts as one launch, though it is several.
struct Counts {
  int64_t launches, copies, sets;  // kernels, cudaMemcpyAsync, cudaMemsetAsync
  int64_t to_device, to_host;      // of the copies
  int64_t bytes;                   // of these two
  int64_t pageable;      // of these two: from or to memory that is not pinned, where the host may have to wait
  int64_t marks, waits;  // cudaEventRecord, cudaStreamWaitEvent
  int64_t host_waits;    // the host waited for a stream

  int64_t OnStreams() const { return launches + copies + sets + marks + waits; }
};
Counts CountsSoFar();
inline Counts operator-(const Counts& a, const Counts& b) {
  return {a.launches - b.launches, a.copies - b.copies,        a.sets - b.sets,         a.to_device - b.to_device,
          a.to_host - b.to_host,   a.bytes - b.bytes,          a.pageable - b.pageable, a.marks - b.marks,
          a.waits - b.waits,       a.host_waits - b.host_waits};
}

// How much device memory there is from now on, and how much is taken: for tests of running out of it.
void SetMemoryLimit(size_t bytes);
size_t MemoryInUse();

struct ThreadIndex {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
inline thread_local const ThreadIndex* current = nullptr;

void* DynamicShared();
void MaybeYield();  // lets other threads of the block run, now and then
void Yield();
void BlockBarrier();
void Fence();

enum class WarpOp { kSync, kShuffle, kShuffleXor, kShuffleUp, kShuffleDown, kBallot, kMatch };
// Waits for all lanes of the mask, and gives this lane's answer.
uint64_t Warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width);
unsigned ActiveMask();

template <class T>
T Shuffle(WarpOp op, unsigned mask, T value, int argument, int width) {
  static_assert(sizeof(T) <= 8, "warp functions move words of up to 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = Warp(op, mask, word, argument, width);
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace sok_emulator

// ---- the device's side

#define threadIdx (::sok_emulator::current->thread)
#define blockIdx (::sok_emulator::current->block)
#define blockDim (::sok_emulator::current->block_dim)
#define gridDim (::sok_emulator::current->grid_dim)
constexpr int warpSize = 32;

inline void __syncthreads() { sok_emulator::BlockBarrier(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { sok_emulator::Warp(sok_emulator::WarpOp::kSync, mask, 0, 0, 32); }
inline void __threadfence() { sok_emulator::Fence(); }
inline void __threadfence_block() { sok_emulator::Fence(); }
inline void __nanosleep(unsigned) { sok_emulator::Yield(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return sok_emulator::Shuffle(sok_emulator::WarpOp::kShuffle, mask, value, from, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return sok_emulator::Shuffle(sok_emulator::WarpOp::kShuffleXor, mask, value, lanes, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return sok_emulator::Shuffle(sok_emulator::WarpOp::kShuffleUp, mask, value, static_cast<int>(delta), width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return sok_emulator::Shuffle(sok_emulator::WarpOp::kShuffleDown, mask, value, static_cast<int>(delta), width);
}
inline unsigned __ballot_sync(unsigned mask, int yes) {
  return static_cast<unsigned>(sok_emulator::Warp(sok_emulator::WarpOp::kBallot, mask, yes != 0, 0, 32));
}
inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return static_cast<unsigned>(sok_emulator::Warp(sok_emulator::WarpOp::kMatch, mask, word, 0, 32));
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned word;
  std::memcpy(&word, &x, sizeof(word));
  return word;
}
inline float __uint_as_float(unsigned word) {
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

// Atomics take the types that the device's take, no others.
#define SOK_EMULATED_ATOMICS(T)                                                                                      \
  inline T atomicAdd(T* p, T value) {                                                                                \
    sok_emulator::MaybeYield();                                                                                      \
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);                                                           \
  }                                                                                                                  \
  inline T atomicExch(T* p, T value) {                                                                               \
    sok_emulator::MaybeYield();                                                                                      \
    return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);                                                          \
  }                                                                                                                  \
  inline T atomicCAS(T* p, T expected, T value) {                                                                    \
    sok_emulator::MaybeYield();                                                                                      \
    __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                     \
    return expected;                                                                                                 \
  }                                                                                                                  \
  inline T atomicMin(T* p, T value) {                                                                                \
    sok_emulator::MaybeYield();                                                                                      \
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                                    \
    while (value < old && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
    }                                                                                                                \
    return old;                                                                                                      \
  }                                                                                                                  \
  inline T atomicMax(T* p, T value) {                                                                                \
    sok_emulator::MaybeYield();                                                                                      \
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                                    \
    while (old < value && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
    }                                                                                                                \
    return old;                                                                                                      \
  }
SOK_EMULATED_ATOMICS(int)
SOK_EMULATED_ATOMICS(unsigned)
SOK_EMULATED_ATOMICS(unsigned long long)
#undef SOK_EMULATED_ATOMICS
#define SOK_EMULATED_BIT_ATOMICS(T)                        \
  inline T atomicOr(T* p, T value) {                       \
    sok_emulator::MaybeYield();                            \
    return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);  \
  }                                                        \
  inline T atomicAnd(T* p, T value) {                      \
    sok_emulator::MaybeYield();                            \
    return __atomic_fetch_and(p, value, __ATOMIC_RELAXED); \
  }
SOK_EMULATED_BIT_ATOMICS(int)
SOK_EMULATED_BIT_ATOMICS(unsigned)
SOK_EMULATED_BIT_ATOMICS(unsigned long long)
#undef SOK_EMULATED_BIT_ATOMICS
inline unsigned atomicSub(unsigned* p, unsigned value) { return atomicAdd(p, 0u - value); }
inline int atomicSub(int* p, int value) { return atomicAdd(p, -value); }
inline float atomicAdd(float* p, float value) {
  sok_emulator::MaybeYield();
  unsigned* word = reinterpret_cast<unsigned*>(p);
  unsigned old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, __float_as_uint(__uint_as_float(old) + value), false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return __uint_as_float(old);
}
