// Until the last users of SOK_HOST_MEMORY_KERNEL are gone.
#pragma once

#include "op.h"

namespace sok {
template <class Op>
bool RegisterHostMemoryKernel(const char* op, const char* class_name, std::initializer_list<const char*> args) {
  if (GpuDevice() == nullptr) return false;
  tensorflow::KernelDefBuilder on_gpu(op);
  on_gpu.Device(GpuDevice());
  for (const char* arg : args) on_gpu.HostMemory(arg);
  return RegisterKernel<Op>(on_gpu, class_name);
}
}  // namespace sok
#define SOK_HOST_MEMORY_KERNEL(op, Class, ...) \
  [[maybe_unused]] static const bool k##Class##IsOnGpus = RegisterHostMemoryKernel<Class>(op, #Class, {__VA_ARGS__})
