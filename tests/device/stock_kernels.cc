// What TensorFlow's own kernels for any device do wrong on one whose memory the host cannot touch, done on the stream.
//
// Those of AssignAddVariableOp and AssignSubVariableOp are the CPU's: they read and write device memory on the host, and do
// not wait for what is still going on in it. A GPU has others.
#include <cuda_runtime.h>

#include "../../ops/gpu/gpu_op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace sok {
namespace {

enum class Sign { kPlus, kMinus };

template <class T, Sign kSign>
class UpdateVariable : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(ctx, tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), &variable));
    const Tensor& value = ctx->input(1);
    tensorflow::mutex_lock lock(*variable->mu());
    const Tensor& before = *variable->tensor();
    OP_REQUIRES(ctx, before.shape() == value.shape(),
                absl::InvalidArgumentError("the variable and what is added must have one shape."));
    Tensor after;  // whoever has read the variable keeps what it read
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(before.dtype(), before.shape(), &after));
    const T* a = sok_emulator::OnDevice(before.flat<T>().data());
    const T* b = sok_emulator::OnDevice(value.flat<T>().data());
    T* sum = sok_emulator::OnDevice(after.flat<T>().data());
    const int64_t n = before.NumElements();
    // What the host frees meanwhile, it gives away in the order of the stream.
    sok_emulator::Enqueue(CudaOf(ctx).stream, [=] {
      for (int64_t i = 0; i < n; ++i) sum[i] = kSign == Sign::kPlus ? a[i] + b[i] : a[i] - b[i];
    });
    *variable->tensor() = after;
  }
};

#define REGISTER(T)                                                                                      \
  REGISTER_KERNEL_BUILDER(                                                                               \
      Name("AssignAddVariableOp").Device(GpuDevice()).HostMemory("resource").TypeConstraint<T>("dtype"), \
      UpdateVariable<T, Sign::kPlus>);                                                                   \
  REGISTER_KERNEL_BUILDER(                                                                               \
      Name("AssignSubVariableOp").Device(GpuDevice()).HostMemory("resource").TypeConstraint<T>("dtype"), \
      UpdateVariable<T, Sign::kMinus>)
REGISTER(float);
REGISTER(double);
REGISTER(int32_t);
REGISTER(int64_t);
#undef REGISTER

}  // namespace
}  // namespace sok
