// What kernels for GPUs begin with. They are compiled by the host's compiler and call the promises of include/sok that take
// a Cuda; nothing here is CUDA source.
#pragma once

#include <cstdint>
#include <vector>

#include "../op.h"
#include "sok/device.h"
#include "sok/device_keys.h"
#include "sok/device_words.h"
#include "sok/scratch.h"

namespace sok {

// The stream that the op's work belongs on; its device is the current one.
Cuda CudaOf(OpKernelContext* ctx);

// Scratch from TensorFlow's allocator, for work on the op's stream. Memory that is given back when the op returns serves
// later work on the same stream, which comes after this op's.
class TfDeviceScratch final : public DeviceScratch {
 public:
  explicit TfDeviceScratch(OpKernelContext* ctx) : ctx_(ctx) {}

 private:
  static constexpr size_t kAlignment = 256, kBlock = size_t{1} << 20;

  void* Allocate(size_t bytes) override {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (blocks_.empty() || used_ + bytes > static_cast<size_t>(blocks_.back().NumElements())) {
      Tensor block;
      Check(ctx_->allocate_temp(tensorflow::DT_INT8, CheckedShape({static_cast<int64_t>(std::max(bytes, kBlock))}),
                                &block));
      blocks_.push_back(block);
      used_ = 0;
    }
    char* p = static_cast<char*>(blocks_.back().data()) + used_;
    used_ += bytes;
    return p;
  }

  OpKernelContext* const ctx_;
  std::vector<Tensor> blocks_;
  size_t used_ = 0;
};

// Keys of any of the four dtypes, which lie on the device, as they are.
inline DeviceKeys KeysOn(const Tensor& keys) {
  if (tensorflow::DataTypeSize(keys.dtype()) == 8) return static_cast<const uint64_t*>(keys.data());
  return {static_cast<const uint32_t*>(keys.data()), IsUnsigned(keys.dtype())};
}

// The same as words there: 64-bit keys are viewed in place.
inline const uint64_t* DeviceKeyWords(const Cuda& cuda, const Tensor& keys, DeviceScratch* scratch) {
  const void* data = keys.data();
  if (tensorflow::DataTypeSize(keys.dtype()) == 8) return static_cast<const uint64_t*>(data);
  auto* words = scratch->Get<uint64_t>(keys.NumElements());
  WidenKeys(cuda, static_cast<const uint32_t*>(data), IsUnsigned(keys.dtype()), keys.NumElements(), words);
  return words;
}

}  // namespace sok

// Registers an op's kernel for GPUs: SOK_GPU_KERNEL(Name("Sok>Op").HostMemory("arg"), Class).
#define SOK_GPU_KERNEL(definition, ...) SOK_KERNEL(definition.Device(GpuDevice()), __VA_ARGS__)
