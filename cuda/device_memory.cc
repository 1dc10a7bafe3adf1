#include "sok/device_memory.h"

#include "detail/check.h"
#include "sok/error.h"

namespace sok {

void* DeviceMemory::Allocate(int64_t bytes, const char* what) {
  const std::string asked = label_ + ": no device memory for " + what + ": " + std::to_string(bytes) +
                            " bytes asked for, " + std::to_string(in_use_) + " in use";
  if (budget_bytes_ > 0 && bytes > budget_bytes_ - in_use_) {
    throw OutOfMemory(asked + " of a budget of " + std::to_string(budget_bytes_) +
                      ". Raise the table's memory budget, lower its capacity, or use more workers.");
  }
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, static_cast<size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    size_t free_bytes = 0, total_bytes = 0;
    SOK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw OutOfMemory(asked + " by this table, and the device has " + std::to_string(free_bytes) + " of " +
                      std::to_string(total_bytes) + " free. Give the table a smaller capacity, or use more workers.");
  }
  SOK_CUDA(status);
  in_use_ += bytes;
  return p;
}

void DeviceMemory::Free(void* p, int64_t bytes) {
  if (p == nullptr) return;
  in_use_ -= bytes;
  static_cast<void>(cudaFree(p));  // called by destructors; a device that is gone has freed everything
}

}  // namespace sok
