// The emulator's device in place of TensorFlow's GPU, for kernels that run in tests.
#include "../../ops/gpu/gpu_op.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/tf_status.h"

namespace sok {

const char* GpuDevice() { return "EMULATED_GPU"; }

Cuda CudaOf(OpKernelContext* ctx) {
  TF_Status* status = TF_NewStatus();
  SP_Stream stream = TF_GetStream(reinterpret_cast<TF_OpKernelContext*>(ctx), status);
  const bool ok = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
  if (!ok) throw FailedPrecondition("this op runs on the emulated GPU, and has no stream.");
  return {reinterpret_cast<cudaStream_t>(stream)};
}

}  // namespace sok
