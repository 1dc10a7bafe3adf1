// Arrays on the device for the C++ tests.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "detail/check.h"

// n values on the device; copies wait for everything before them.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t n) : n_(n) {
    SOK_CUDA(cudaMalloc(&data_, static_cast<size_t>(n < 1 ? 1 : n) * sizeof(T)));
  }
  DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) { Set(values); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { sok::Ignore(cudaFree(data_)); }

  T* data() { return data_; }
  operator T*() { return data_; }
  int64_t size() const { return n_; }

  // Pointers among the values are those that the host knows.
  void Set(std::vector<T> values) {
    SOK_CUDA(cudaDeviceSynchronize());
#if defined(SOK_CUDA_EMULATED)
    sok_emulator::MoveElements(values.data(), values.size(), {__FILE__, __LINE__}, "an array");
#endif
    SOK_CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> Get() const {
    std::vector<T> values(static_cast<size_t>(n_));
    SOK_CUDA(cudaDeviceSynchronize());
    if (n_ > 0) SOK_CUDA(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  int64_t n_;
};
