// CUDA's statuses as exceptions of sok, checked where the call stands.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "sok/error.h"

namespace sok {

[[noreturn]] inline void ThrowCuda(cudaError_t status, const char* what, const char* file, int line) {
  // What went wrong stays set otherwise, and the next call would report it as its own.
  static_cast<void>(cudaGetLastError());
  const std::string text = std::string(what) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                           "), at " + file + ":" + std::to_string(line);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw CudaError(text);
}

// For what nobody can be told, in destructors above all. An error that stayed set would be the next call's: CUB takes it for its own.
inline void Ignore(cudaError_t status) {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
}

inline void CheckCuda(cudaError_t status, const char* what, const char* file, int line) {
  if (status != cudaSuccess) ThrowCuda(status, what, file, line);
}

}  // namespace sok

#define SOK_CUDA(call) ::sok::CheckCuda((call), #call, __FILE__, __LINE__)
