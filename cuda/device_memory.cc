#include "sok/device_memory.h"

#include "detail/check.h"
#include "detail/event.h"
#include "sok/error.h"

namespace sok {
namespace {

// What is put on `later` from now on comes after what is on `earlier`.
void Order(const Cuda& earlier, const Cuda& later) {
  if (earlier.stream == later.stream) return;
  const std::shared_ptr<Event> event = TakeEvent();
  event->Record(earlier);
  event->Before(later);
}

std::string FreeOfDevice() {
  size_t free_bytes = 0, total_bytes = 0;
  SOK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return "the device has " + std::to_string(free_bytes) + " of " + std::to_string(total_bytes) + " free";
}

}  // namespace

std::string DeviceMemory::Asked(int64_t bytes, const char* what) const {
  return label_ + ": no device memory for " + what + ": " + std::to_string(bytes) + " bytes asked for, " +
         std::to_string(in_use_) + " in use";
}

void DeviceMemory::CheckBudget(int64_t bytes, const char* what) const {
  if (budget_bytes_ <= 0 || bytes <= budget_bytes_ - in_use_) return;
  throw OutOfMemory(Asked(bytes, what) + " of a budget of " + std::to_string(budget_bytes_) +
                    ". Raise the table's memory budget, lower its capacity, or use more workers.");
}

void* DeviceMemory::TryAllocate(const Cuda& cuda, int64_t bytes) const {
  bytes = bytes < 1 ? 1 : bytes;
  if (owner_ != nullptr) return owner_->Allocate(bytes);
  void* p = nullptr;
  const cudaError_t status = cudaMallocAsync(&p, static_cast<size_t>(bytes), cuda.stream);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  SOK_CUDA(status);
  return p;
}

void* DeviceMemory::Allocate(const Cuda& cuda, int64_t bytes, const char* what) {
  CheckBudget(bytes, what);
  void* p = TryAllocate(cuda, bytes);
  if (p == nullptr) {  // what streams still have to give back may do
    SOK_CUDA(cudaDeviceSynchronize());
    p = TryAllocate(cuda, bytes);
  }
  if (p == nullptr) {
    throw OutOfMemory(Asked(bytes, what) + " by this table, and " +
                      (owner_ != nullptr ? owner_->Room() : FreeOfDevice()) +
                      ". Give the table a smaller capacity, or use more workers.");
  }
  in_use_ += bytes;
  if (owner_ != nullptr) Order(owner_->stream(), cuda);
  return p;
}

void DeviceMemory::Free(const Cuda& cuda, void* p, int64_t bytes) {
  if (p == nullptr) return;
  in_use_ -= bytes;
  if (owner_ == nullptr) {
    SOK_CUDA(cudaFreeAsync(p, cuda.stream));
    return;
  }
  Order(cuda, owner_->stream());
  owner_->Free(p);
}

void DeviceMemory::Free(void* p, int64_t bytes) {
  if (p == nullptr) return;
  in_use_ -= bytes;
  if (owner_ != nullptr) return owner_->Free(p);
  // Called by destructors; a device that is gone has freed everything. Of memory of a pool cudaFree takes it for granted that
  // nobody uses it any more (seen on an H200: an illegal address in a kernel that was still running).
  Ignore(cudaDeviceSynchronize());
  Ignore(cudaFree(p));
}

}  // namespace sok
