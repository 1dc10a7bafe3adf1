// The gradient of a group lookup in its weights, on a GPU.
#include "../tables_op.h"
#include "gpu_group.h"
#include "gpu_op.h"
#include "segments_arg.h"
#include "sok/combine_grad.h"
#include "sok/device_table.h"

namespace sok {
namespace {

// Reads the rows once more; keys without one read as their fresh row, as they did in the lookup.
class GpuGroupLookupGradWeightsOp final : public TablesOp {
 public:
  using TablesOp::TablesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = group_->num_tables(), n = group_->num_features();
    const std::vector<RefCountPtr<TableResource>> tables = Tables(ctx);
    const Cuda cuda = CudaOf(ctx);
    const TfExecutor executor(ctx);
    for (int f = 0; f < n; ++f) {
      TableResource& resource = *tables[group_->TableOf(f)];
      const Tensor &grad = ctx->input(m + f), &keys = ctx->input(m + n + f), &row_splits = ctx->input(m + 2 * n + f),
                   &weights = ctx->input(m + 3 * n + f);
      resource.CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      DeviceFeature feature;
      feature.dim = resource.config().dim;
      const int64_t num_keys = keys.NumElements();
      feature.segments = SegmentsArg(row_splits, num_keys);
      feature.weights = WeightsOrNull(weights, num_keys);
      feature.combiner = group_->combiners[static_cast<size_t>(f)];
      CheckShape(grad, {feature.segments.segments, feature.dim}, "grad");
      auto* out = static_cast<float*>(Output(ctx, f, weights.shape())->data());
      if (feature.weights == nullptr) continue;
      TfDeviceScratch scratch(ctx);
      GpuAsked asked;
      asked.Add(&resource, KeysOn(keys), num_keys, scratch.Get<int64_t>(num_keys));
      const std::vector<DeviceTable::Reading> found = RowsOf(cuda, {executor}, &scratch, &asked, /*insert=*/false);
      SetRows(asked.all[0], found[0], 0, &feature);
      CombineGradWeights(cuda, feature, grad.flat<float>().data(), out, nullptr);
    }
  }
};
SOK_GPU_KERNEL(Name("Sok>GroupLookupGradWeights").HostMemory("handles"), GpuGroupLookupGradWeightsOp);

}  // namespace
}  // namespace sok
