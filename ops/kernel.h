// Registering kernels. What a kernel's constructor throws becomes the status of making it.
#pragma once

#include <initializer_list>

#include "guard.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

using tensorflow::register_kernel::Name;

// The type of device that kernels for GPUs are registered for: TensorFlow's GPU (ops/gpu/gpu_device.cc), and in tests the
// emulator (tests/device). Null in a library without CUDA (ops/no_gpu.cc), which has none: a handle that TensorFlow puts on
// a GPU would be of no use there.
const char* GpuDevice();

template <class Op>
bool RegisterKernel(tensorflow::KernelDefBuilder& definition, const char* class_name) {
  tensorflow::kernel_factory::OpKernelRegistrar(definition.Build(), class_name,
                                                [](tensorflow::OpKernelConstruction* ctx) -> tensorflow::OpKernel* {
                                                  tensorflow::OpKernel* kernel = nullptr;
                                                  Guard(ctx, [&] { kernel = new Op(ctx); });
                                                  return kernel;
                                                });
  return true;
}

// A kernel of the CPU, and the same where the rest of a model is on a GPU, if all its arguments lie in the host's memory:
// what it does waits for the table anyway, or is not about numbers.
template <class Op>
bool RegisterHostKernel(const char* op, const char* class_name, std::initializer_list<const char*> args) {
  RegisterKernel<Op>(Name(op).Device(tensorflow::DEVICE_CPU), class_name);
  if (GpuDevice() == nullptr) return true;
  tensorflow::KernelDefBuilder on_gpu(op);
  on_gpu.Device(GpuDevice());
  for (const char* arg : args) on_gpu.HostMemory(arg);
  return RegisterKernel<Op>(on_gpu, class_name);
}

}  // namespace sok

#define SOK_ONCE_AS(number, ...) [[maybe_unused]] static const bool is_registered_##number = __VA_ARGS__
#define SOK_ONCE_WITH(number, ...) SOK_ONCE_AS(number, __VA_ARGS__)

// SOK_KERNEL(Name("Sok>Op").Device(tensorflow::DEVICE_CPU).TypeConstraint<int>("T"), Class)
#define SOK_KERNEL(definition, ...) \
  SOK_ONCE_WITH(__COUNTER__, ::sok::RegisterKernel<__VA_ARGS__>(definition, #__VA_ARGS__))

// SOK_CPU_KERNEL("Sok>Op", Class)
#define SOK_CPU_KERNEL(op, ...) SOK_KERNEL(Name(op).Device(tensorflow::DEVICE_CPU), __VA_ARGS__)

// With the names of the arguments that lie in the host's memory, which are all inputs and outputs but those that the kernel
// passes on unread: SOK_HOST_KERNEL("Sok>Op", Class, "handle", "size")
#define SOK_HOST_KERNEL(op, Class, ...) \
  SOK_ONCE_WITH(__COUNTER__, ::sok::RegisterHostKernel<Class>(op, #Class, {__VA_ARGS__}))
