// Keys to rows in one table on one rank.
#include <algorithm>

#include "../table_resource.h"
#include "gpu_group.h"
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
    const TfExecutor executor(ctx);
    const int64_t n = keys.NumElements();
    const DeviceTier* tier = TierOf(resource.get());
    // What makes rows does so for all keys or none.
    const int64_t most = tier == nullptr || insert ? std::max<int64_t>(1, n) : tier->keys_at_a_time();
    for (int64_t at = 0; at < n; at += most) {
      GpuAsked asked;
      asked.Add(resource.get(), KeysOn(keys).From(at), std::min(most, n - at),
                static_cast<int64_t*>(row_ids->data()) + at);
      const DeviceTier::Held held(cuda, {executor}, &scratch, asked.OfTiers(), insert);
      asked.all[0].rows = rows->flat<float>().data() + at * dim_;
      DeviceTable::LookupGroup(cuda, &scratch, asked.all.data(), 1, insert && tier == nullptr);
    }
    if (insert) resource->ids += n;
  }

 private:
  int64_t dim_ = 1;
};
SOK_GPU_KERNEL(Name("Sok>TableLookup").HostMemory("handle").HostMemory("insert"), GpuTableLookupOp);

}  // namespace
}  // namespace sok
