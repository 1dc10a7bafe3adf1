// Keys to rows in one table on one rank.
#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_table.h"

namespace sok {
namespace {

class GpuTableLookupOp final : public GuardedOp {
 public:
  explicit GpuTableLookupOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("dim", &dim_)); }

  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    const Tensor& keys = ctx->input(1);
    resource->CheckKeyType(keys);
    resource->CheckDim(dim_);
    const bool insert = ScalarArg<bool>(ctx->input(2), "insert");
    TensorShape shape = keys.shape();
    shape.AddDim(dim_);
    Tensor* rows = Output(ctx, 0, shape);
    Tensor* row_ids = Output(ctx, 1, keys.shape());
    const Cuda cuda = CudaOf(ctx);
    TfDeviceScratch scratch(ctx);
    resource->device_table().ThrowIfBadIsKnown(cuda);
    resource->device_table().Lookup(cuda, &scratch, DeviceKeyWords(cuda, keys, &scratch), keys.NumElements(), insert,
                                    rows->flat<float>().data(), static_cast<int64_t*>(row_ids->data()));
    if (insert) resource->ids += keys.NumElements();
  }

 private:
  int64_t dim_ = 1;
};
SOK_GPU_KERNEL(Name("Sok>TableLookup").HostMemory("handle").HostMemory("insert"), GpuTableLookupOp);

}  // namespace
}  // namespace sok
