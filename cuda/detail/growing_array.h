// Device memory that grows with the rows of a table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "check.h"
#include "sok/device.h"
#include "sok/device_memory.h"

namespace sok {

// What a table keeps beside each row, on the device: grows with the rows; new ones are zero.
template <class T>
class GrowingArray {
 public:
  explicit GrowingArray(DeviceMemory* memory) : memory_(memory) {}
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() { memory_->Free(data_, capacity_ * kBytes); }

  T* data() const { return data_; }
  int64_t capacity() const { return capacity_; }

  void Swap(GrowingArray* other) {
    std::swap(data_, other->data_);
    std::swap(capacity_, other->capacity_);
  }
  // The values have come from another table, whose memory was swapped with this one's.
  void MoveTo(DeviceMemory* memory) { memory_ = memory; }

  // Throws OutOfMemory, then nothing changed.
  void Grow(const Cuda& cuda, int64_t n, int64_t most, const char* what) {
    if (n <= capacity_) return;
    const int64_t wanted = std::min(std::max(n, most), std::max(n, capacity_ + capacity_ / 2));
    auto* longer = static_cast<T*>(memory_->Allocate(cuda, wanted * kBytes, what));
    SOK_CUDA(cudaMemsetAsync(longer + capacity_, 0, static_cast<size_t>((wanted - capacity_) * kBytes), cuda.stream));
    if (capacity_ > 0) {
      SOK_CUDA(cudaMemcpyAsync(longer, data_, static_cast<size_t>(capacity_ * kBytes), cudaMemcpyDeviceToDevice,
                               cuda.stream));
      memory_->Free(cuda, data_, capacity_ * kBytes);
    }
    data_ = longer;
    capacity_ = wanted;
  }

 private:
  static constexpr int64_t kBytes = sizeof(T);
  DeviceMemory* memory_;
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

using GrowingWords = GrowingArray<uint32_t>;

}  // namespace sok
