// Rows of a table out and in by row id, for penalties and constraints.
#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_table.h"

namespace sok {
namespace {

class GpuRowOp : public GuardedOp {
 public:
  explicit GpuRowOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("dim", &dim_)); }

 protected:
  // Calls body(table, cuda, scratch, row_ids, n) with the inputs, checked.
  template <class Body>
  void WithTable(OpKernelContext* ctx, const Body& body) const {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    resource->CheckDim(dim_);
    const Tensor& row_ids = ctx->input(1);
    CheckRank(row_ids, 1, "row_ids");
    TfDeviceScratch scratch(ctx);
    body(resource->device_table(), CudaOf(ctx), &scratch, Int64(row_ids), row_ids.NumElements());
  }

  int64_t dim_ = 1;
};

class GpuTableGatherOp final : public GpuRowOp {
 public:
  using GpuRowOp::GpuRowOp;
  void Run(OpKernelContext* ctx) override {
    WithTable(ctx,
              [&](DeviceTable& table, const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, int64_t n) {
                Tensor* rows = Output(ctx, 0, TensorShape({n, dim_}));
                table.Weights(cuda, scratch, row_ids, n, rows->flat<float>().data());
              });
  }
};
SOK_GPU_KERNEL(Name("Sok>TableGather").HostMemory("handle"), GpuTableGatherOp);

class GpuTableScatterOp final : public GpuRowOp {
 public:
  using GpuRowOp::GpuRowOp;
  void Run(OpKernelContext* ctx) override {
    WithTable(ctx,
              [&](DeviceTable& table, const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, int64_t n) {
                const Tensor& rows = ctx->input(2);
                CheckShape(rows, TensorShape({n, dim_}), "rows");
                table.SetWeights(cuda, scratch, row_ids, n, rows.flat<float>().data());
              });
  }
};
SOK_GPU_KERNEL(Name("Sok>TableScatter").HostMemory("handle"), GpuTableScatterOp);

}  // namespace
}  // namespace sok
