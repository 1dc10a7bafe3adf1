// TensorFlow's own GPUs.
#include "gpu_op.h"
#include "sok/error.h"
#include "xla/stream_executor/stream.h"

namespace sok {

const char* GpuDevice() { return tensorflow::DEVICE_GPU; }

Cuda CudaOf(OpKernelContext* ctx) {
  tensorflow::DeviceContext* device = ctx->op_device_context();
  if (device == nullptr || device->stream() == nullptr)
    throw FailedPrecondition("this op runs on a GPU, and has none.");
  return {static_cast<cudaStream_t>(device->stream()->platform_specific_handle().stream)};
}

}  // namespace sok
