// Many tables at once on a GPU: looking up and pooling, and the sums of what comes back.
#include "../tables_op.h"

#include <string>
#include <utility>
#include <vector>

#include "gpu_group.h"
#include "gpu_op.h"
#include "segments_arg.h"
#include "sok/combine.h"
#include "sok/device_table.h"
#include "sok/sum_rows.h"

namespace sok {
namespace {

class GpuGroupLookupOp final : public TablesOp {
 public:
  using TablesOp::TablesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = group_->num_tables(), n = group_->num_features();
    const std::vector<RefCountPtr<TableResource>> tables = Tables(ctx);
    const bool insert = ScalarArg<bool>(ctx->input(m + 3 * n), "insert");
    const Cuda cuda = CudaOf(ctx);
    const TfExecutor executor(ctx);
    TfDeviceScratch scratch(ctx);
    watch_.ThrowIfBadIsKnown(cuda, &scratch, DeviceTablesOf(tables));
    std::vector<DeviceFeature> features;
    GpuAsked asked;
    for (int f = 0; f < n; ++f) {
      TableResource& resource = *tables[group_->TableOf(f)];
      const Tensor &keys = ctx->input(m + f), &row_splits = ctx->input(m + n + f);
      resource.CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      DeviceFeature feature;
      feature.dim = resource.config().dim;
      feature.segments = Labelled([&] { return resource.config().Label(); },
                                  [&] { return SegmentsArg(row_splits, keys.NumElements()); });
      feature.weights = WeightsOrNull(ctx->input(m + 2 * n + f), feature.segments.n);
      feature.combiner = group_->combiners[static_cast<size_t>(f)];
      feature.output = Output(ctx, f, CheckedShape({feature.segments.segments, feature.dim}))->data();
      feature.output_stride = feature.dim;
      auto* row_ids = static_cast<int64_t*>(Output(ctx, n + f, keys.shape())->data());
      asked.Add(&resource, KeysOn(keys), feature.segments.n, row_ids);
      if (insert) resource.ids += feature.segments.n;
      features.push_back(feature);
    }
    const std::vector<DeviceTable::Reading> readings = RowsOf(cuda, {executor}, &scratch, &asked, insert);
    for (size_t f = 0; f < features.size(); ++f) SetRows(asked.all[f], readings[f], 0, &features[f]);
    CombineGroup(cuda, &scratch, features.data(), n, FloatType::kFloat32, nullptr);
  }

 private:
  DeviceTableWatch watch_;
};
SOK_GPU_KERNEL(Name("Sok>GroupLookup").HostMemory("handles").HostMemory("insert"), GpuGroupLookupOp);

class GpuGroupLookupGradOp final : public TablesOp {
 public:
  using TablesOp::TablesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = group_->num_tables(), n = group_->num_features();
    std::vector<std::vector<DeviceAddends>> addends(static_cast<size_t>(m));
    for (int f = 0; f < n; ++f) {
      const size_t t = group_->TableOf(f);
      const Tensor &grad = ctx->input(f), &row_ids = ctx->input(n + f), &row_splits = ctx->input(2 * n + f);
      CheckRank(row_ids, 1, "row_ids");
      DeviceAddends a;
      a.row_ids = Int64(row_ids);
      a.segments = SegmentsArg(row_splits, row_ids.NumElements());
      CheckShape(grad, {a.segments.segments, group_->dims[t]}, "grad");
      a.values = grad.data();
      a.values_stride = group_->dims[t];
      a.weights = WeightsOrNull(ctx->input(3 * n + f), a.segments.n);
      a.combiner = group_->combiners[static_cast<size_t>(f)];
      addends[t].push_back(a);
    }
    OutputRowSums(ctx, addends, group_->dims, group_->capacities);
  }
};
SOK_GPU_KERNEL(Name("Sok>GroupLookupGrad"), GpuGroupLookupGradOp);

}  // namespace
}  // namespace sok
