// Gradients into tables of a GPU.
#include <string>
#include <vector>

#include "../group_apply_op.h"
#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_table.h"
#include "sok/sum_rows.h"

namespace sok {
namespace {

// How many rows a table may have.
constexpr int64_t kMostRows = INT64_C(0xFFFFFFFE);

// Rows that come more than once, summed; how many there are stays on the device.
struct Summed {
  const int64_t* row_ids;
  const float* sums;
  const int64_t* count;
};

Summed SumDuplicates(const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, const float* values, int64_t n,
                     int64_t dim, int64_t* ids_to, float* sums_to) {
  DeviceAddends addends;
  addends.row_ids = row_ids;
  addends.values = values;
  addends.values_stride = dim;
  addends.segments.segments = addends.segments.n = n;
  auto* count = scratch->Get<int64_t>(1);
  SumRows(cuda, scratch, &addends, 1, &kMostRows, 1, dim, FloatType::kFloat32, ids_to, nullptr, sums_to, count,
          nullptr);
  return {ids_to, sums_to, count};
}

// With nonfinite='raise' this waits for the stream, to raise at once; a table that has something against its gradients
// stays as it is, while tables before it in the group have been updated. Otherwise a row id that a table never gave is left
// out, and raised by a later lookup, or by the next call that looks at the table from outside.
class GpuGroupApplyOp final : public GroupApplyOp {
 public:
  using GroupApplyOp::GroupApplyOp;

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const int m = num_tables();
      const UpdateRule rule = Rule(ctx);
      const Cuda cuda = CudaOf(ctx);
      for (int t = 0; t < m; ++t) {
        const RefCountPtr<TableResource> resource = TableArg(ctx, t);
        const int64_t dim = resource->config().dim;
        const Tensor &row_ids = ctx->input(m + t), &grads = ctx->input(2 * m + t);
        CheckRank(row_ids, 1, "row_ids");
        const int64_t n = row_ids.NumElements();
        CheckShape(grads, TensorShape({n, dim}), "grads");
        TfDeviceScratch scratch(ctx);
        Summed sums{Int64(row_ids), grads.flat<float>().data(), nullptr};
        if (!distinct_[static_cast<size_t>(t)]) {
          sums = SumDuplicates(cuda, &scratch, sums.row_ids, sums.sums, n, dim, scratch.Get<int64_t>(n),
                               scratch.Get<float>(n * dim));
        }
        resource->device_table().Apply(cuda, &scratch, rule, slot_set_, nonfinite_, 1.0f, sums.row_ids, sums.sums, n,
                                       sums.count);
        if (nonfinite_ == Nonfinite::kRaise) resource->device_table().ThrowIfBadToHost(cuda);
      }
    });
  }
};
SOK_GPU_KERNEL(Name("Sok>GroupApply").HostMemory("handles").HostMemory("step").HostMemory("hyper"), GpuGroupApplyOp);

// Waits for the stream, to learn how many rows there are.
class GpuSumDuplicatesOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor &row_ids = ctx->input(0), &values = ctx->input(1);
      CheckRank(row_ids, 1, "row_ids");
      CheckRank(values, 2, "values");
      const int64_t n = row_ids.NumElements(), dim = values.dim_size(1);
      CheckShape(values, TensorShape({n, dim}), "values");
      const Cuda cuda = CudaOf(ctx);
      TfDeviceScratch scratch(ctx);
      Tensor unique, sums;
      Check(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({n}), &unique));
      Check(ctx->allocate_temp(tensorflow::DT_FLOAT, values.shape(), &sums));
      int64_t count = 0;
      if (n > 0 && dim > 0) {
        const Summed summed = SumDuplicates(cuda, &scratch, Int64(row_ids), values.flat<float>().data(), n, dim,
                                            static_cast<int64_t*>(unique.data()), static_cast<float*>(sums.data()));
        CopyToHost(cuda, &count, summed.count, sizeof(count));
      }
      ctx->set_output(0, unique.Slice(0, count));
      ctx->set_output(1, sums.Slice(0, count));
    });
  }
};
SOK_GPU_KERNEL(Name("Sok>SumDuplicates"), GpuSumDuplicatesOp);

}  // namespace
}  // namespace sok
