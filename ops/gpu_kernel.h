// Kernels that run on the host also where the rest of a model is on a GPU: what they do waits for the table anyway, or is not
// about numbers.
#pragma once

#include <initializer_list>

#include "op.h"
#include "tensorflow/core/framework/kernel_def_builder.h"

namespace sok {

// The type of device that kernels for GPUs are registered for: TensorFlow's GPU (ops/gpu/gpu_device.cc), and in tests the
// emulator (tests/device). Null in a library without CUDA (ops/no_gpu.cc), which has none: a handle that TensorFlow puts on
// a GPU would be of no use there.
const char* GpuDevice();

template <class Op>
bool RegisterHostMemoryKernel(const char* op, const char* class_name, std::initializer_list<const char*> args) {
  if (GpuDevice() == nullptr) return false;
  tensorflow::KernelDefBuilder builder(op);
  builder.Device(GpuDevice());
  for (const char* arg : args) builder.HostMemory(arg);
  tensorflow::kernel_factory::OpKernelRegistrar registrar(
      builder.Build(), class_name, [](OpKernelConstruction* ctx) -> OpKernel* { return new Op(ctx); });
  return true;
}

}  // namespace sok

// Registers a kernel of the CPU for GPUs, too, with the arguments named (all inputs and outputs) in the host's memory:
// SOK_HOST_MEMORY_KERNEL("Sok>Op", Class, "handle", "size").
#define SOK_HOST_MEMORY_KERNEL(op, Class, ...) \
  [[maybe_unused]] static const bool k##Class##IsOnGpus = RegisterHostMemoryKernel<Class>(op, #Class, {__VA_ARGS__})
