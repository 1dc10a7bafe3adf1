// Inputs on their way to a GPU, and what is wrong with those that lie there.
#include <vector>

#include "../validate_csr_op.h"
#include "gpu_op.h"

namespace sok {
namespace {

// Keys stay where they are, and nothing waits for them: a key that the table cannot hold is found by its lookup, reads as
// zeros, and is raised by the table's next call on the host (DeviceTable::ThrowIfBadToHost).
class GpuValidateCsrOp final : public ValidateCsrOp {
 public:
  using ValidateCsrOp::ValidateCsrOp;

 private:
  InputStatus InspectKeys(const TableConfig&, const Tensor&) const override { return {kFine, 0}; }
};
SOK_GPU_KERNEL(Name("Sok>ValidateCsr").HostMemory("handle").HostMemory("row_splits"), GpuValidateCsrOp);

// The outputs lie side by side in one block, which goes back with the last of them.
void GpuToDevice(OpKernelContext* ctx) {
  constexpr int64_t kAlignment = 64;  // what TensorFlow asks of a tensor's memory
  std::vector<HostPart> parts;
  int64_t bytes = 0;
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    const Tensor& value = ctx->input(i);
    parts.push_back({value.data(), static_cast<int64_t>(value.TotalBytes()), bytes});
    bytes += (parts.back().bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  Tensor block;
  Check(ctx->allocate_temp(tensorflow::DT_INT8, CheckedShape({bytes}), &block));
  CopyToDevice(CudaOf(ctx), block.data(), parts.data(), static_cast<int64_t>(parts.size()));
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    const Tensor& value = ctx->input(i);
    const HostPart& part = parts[static_cast<size_t>(i)];
    Tensor there;
    Check(there.BitcastFrom(block.Slice(part.at, part.at + part.bytes), value.dtype(), value.shape()));
    ctx->set_output(i, there);
  }
}
SOK_GPU_KERNEL(Name("Sok>ToDevice").HostMemory("values"), FunctionOp<GpuToDevice>);

}  // namespace
}  // namespace sok
