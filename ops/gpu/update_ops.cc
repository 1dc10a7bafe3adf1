// Gradients into tables of a GPU.
#include <memory>
#include <string>
#include <vector>

#include "../group_apply_op.h"
#include "../table_resource.h"
#include "gpu_group.h"
#include "gpu_op.h"
#include "sok/device_table.h"
#include "sok/sum_rows.h"

namespace sok {
namespace {

DeviceAddends AddendsOf(const int64_t* row_ids, const float* values, int64_t n, int64_t dim) {
  DeviceAddends addends;
  addends.row_ids = row_ids;
  addends.values = values;
  addends.values_stride = dim;
  addends.segments.segments = addends.segments.n = n;
  return addends;
}

// With nonfinite='raise' this waits for the stream, to raise at once; then no row of any table was changed. Otherwise a row
// id that a table never gave is left out, and raised by a later lookup, or by the next call that looks at the table from
// outside.
class GpuGroupApplyOp final : public GroupApplyOp {
 public:
  using GroupApplyOp::GroupApplyOp;

  void Run(OpKernelContext* ctx) override {
    const UpdateRule rule = Rule(ctx);
    const Cuda cuda = CudaOf(ctx);
    std::vector<RefCountPtr<TableResource>> resources;
    std::vector<DeviceTable::Gradients> all;
    std::vector<DeviceTier::Updated> tiered;
    for (int t = 0; t < num_tables(); ++t) {
      resources.push_back(TableArg(ctx, t));
      const Tensor &row_ids = ctx->input(num_tables() + t), &grads = ctx->input(2 * num_tables() + t);
      CheckRank(row_ids, 1, "row_ids");
      const int64_t n = row_ids.NumElements();
      CheckShape(grads, {n, resources.back()->config().dim}, "grads");
      all.push_back({&resources.back()->device_table(), Int64(row_ids), grads.flat<float>().data(), n, nullptr});
      if (DeviceTier* tier = TierOf(resources.back().get()); tier != nullptr)
        tiered.push_back({tier, Int64(row_ids), n});
    }
    const TfExecutor executor(ctx);
    DeviceTier::Updating updating(cuda, {executor}, tiered, rule, slot_set_);
    TfDeviceScratch scratch(ctx);
    const std::unique_ptr<RowSumsOutput> sums = SumDuplicatesOf(ctx, cuda, &scratch, &all);  // read until the end
    DeviceTable::ApplyGroup(cuda, &scratch, rule, slot_set_, nonfinite_, 1.0f, all.data(), num_tables());
    if (nonfinite_ == Nonfinite::kRaise) {
      DeviceTable::ThrowIfBadToHost(cuda, &scratch, DeviceTablesOf(resources));
    }
    updating.Done();
  }

 private:
  // Sums duplicates where there may be any; how many rows are left stays on the device.
  std::unique_ptr<RowSumsOutput> SumDuplicatesOf(OpKernelContext* ctx, const Cuda& cuda, DeviceScratch* scratch,
                                                 std::vector<DeviceTable::Gradients>* all) const {
    std::vector<size_t> which;
    std::vector<std::vector<DeviceAddends>> addends;
    std::vector<int64_t> dims, num_rows;
    for (size_t t = 0; t < all->size(); ++t) {
      const DeviceTable::Gradients& g = (*all)[t];
      if (distinct_[t]) continue;
      which.push_back(t);
      dims.push_back(g.table->config().dim);
      num_rows.push_back(g.table->config().capacity);
      addends.push_back({AddendsOf(g.row_ids, g.grads, g.n, dims.back())});
    }
    if (which.empty()) return nullptr;
    auto sums = std::make_unique<RowSumsOutput>(ctx, cuda, scratch, addends, dims, num_rows, /*fills=*/false);
    for (size_t i = 0; i < which.size(); ++i) {
      DeviceTable::Gradients& g = (*all)[which[i]];
      g = {g.table, sums->ids(i), sums->sums(i), g.n, sums->num_sums(i)};
    }
    return sums;
  }
};
SOK_GPU_KERNEL(Name("Sok>GroupApply").HostMemory("handles").HostMemory("step").HostMemory("hyper"), GpuGroupApplyOp);

// Waits for the stream, to learn how many rows there are.
void GpuSumDuplicates(OpKernelContext* ctx) {
  const Tensor &row_ids = ctx->input(0), &values = ctx->input(1);
  CheckRank(row_ids, 1, "row_ids");
  CheckRank(values, 2, "values");
  const int64_t n = row_ids.NumElements(), dim = values.dim_size(1);
  CheckShape(values, {n, dim}, "values");
  const Cuda cuda = CudaOf(ctx);
  TfDeviceScratch scratch(ctx);
  Tensor unique, sums;
  Check(ctx->allocate_temp(tensorflow::DT_INT64, CheckedShape({n}), &unique));
  Check(ctx->allocate_temp(tensorflow::DT_FLOAT, values.shape(), &sums));
  int64_t count = 0;
  if (n > 0 && dim > 0) {
    const DeviceAddends addends = AddendsOf(Int64(row_ids), values.flat<float>().data(), n, dim);
    auto* on_device = scratch.Get<int64_t>(1);
    SumRows(cuda, &scratch, &addends, 1, &kMostRows, 1, dim, FloatType::kFloat32, static_cast<int64_t*>(unique.data()),
            nullptr, static_cast<float*>(sums.data()), on_device, nullptr);
    CopyToHost(cuda, &count, on_device, sizeof(count));
  }
  ctx->set_output(0, unique.Slice(0, count));
  ctx->set_output(1, sums.Slice(0, count));
}
SOK_GPU_KERNEL(Name("Sok>SumDuplicates"), FunctionOp<GpuSumDuplicates>);

}  // namespace
}  // namespace sok
