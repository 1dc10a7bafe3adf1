#include "sok/device_words.h"

#include "detail/check.h"
#include "detail/launch.h"
#include "detail/staging.h"
#include "detail/vector4.h"

namespace sok {
namespace {

// to[i] = convert(from[i])
template <class From, class To, class Convert>
__global__ void ConvertKernel(const From* from, int64_t n, Convert convert, To* to) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) to[i] = convert(from[i]);
}

struct SignExtend {
  __device__ uint64_t operator()(uint32_t key) const { return static_cast<uint64_t>(static_cast<int32_t>(key)); }
};
struct ZeroExtend {
  __device__ uint64_t operator()(uint32_t key) const { return key; }
};
struct LowHalf {
  __device__ uint32_t operator()(uint64_t word) const { return static_cast<uint32_t>(word); }
};
struct Widen {
  __device__ int64_t operator()(uint32_t number) const { return number; }
};

template <class T>
struct Round {
  __device__ T operator()(float x) const {
    T rounded;
    FromFloat(x, &rounded);
    return rounded;
  }
};

template <class From, class To, class Convert>
void ConvertAll(const Cuda& cuda, const From* from, int64_t n, Convert convert, To* to) {
  Launch(ConvertKernel<From, To, Convert>, GridFor(n, kThreads), kThreads, 0, cuda, from, n, convert, to);
}

void Copy(const Cuda& cuda, void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
  if (bytes > 0) SOK_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, cuda.stream));
}

}  // namespace

void CopyToDevice(const Cuda& cuda, void* to, const void* from, int64_t bytes) { UploadBytes(cuda, from, bytes, to); }
void CopyToDevice(const Cuda& cuda, void* to, const HostPart* parts, int64_t num_parts) {
  UploadParts(cuda, parts, num_parts, to);
}
void CopyOnDevice(const Cuda& cuda, void* to, const void* from, int64_t bytes) {
  Copy(cuda, to, from, bytes, cudaMemcpyDeviceToDevice);
}
void CopyToHost(const Cuda& cuda, void* to, const void* from, int64_t bytes) {
  Copy(cuda, to, from, bytes, cudaMemcpyDeviceToHost);
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
}
void ZeroOnDevice(const Cuda& cuda, void* to, int64_t bytes) { SetOnDevice(cuda, to, 0, bytes); }
void SetOnDevice(const Cuda& cuda, void* to, int byte, int64_t bytes) {
  if (bytes > 0) SOK_CUDA(cudaMemsetAsync(to, byte, static_cast<size_t>(bytes), cuda.stream));
}

void WidenKeys(const Cuda& cuda, const uint32_t* keys, bool is_unsigned, int64_t n, uint64_t* words) {
  if (is_unsigned) return ConvertAll(cuda, keys, n, ZeroExtend(), words);
  ConvertAll(cuda, keys, n, SignExtend(), words);
}
void NarrowKeys(const Cuda& cuda, const uint64_t* words, int64_t n, uint32_t* keys) {
  ConvertAll(cuda, words, n, LowHalf(), keys);
}
void WidenNumbers(const Cuda& cuda, const uint32_t* numbers, int64_t n, int64_t* wide) {
  ConvertAll(cuda, numbers, n, Widen(), wide);
}
void RoundFloats(const Cuda& cuda, const float* from, int64_t n, FloatType type, void* to) {
  WithFloatType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    ConvertAll(cuda, from, n, Round<T>(), static_cast<T*>(to));
  });
}

}  // namespace sok
