// Pooling of rows that came home from their owners, and its gradients, on a GPU. Nothing waits for the stream, so nothing is
// raised about values: an index outside of the rows reads as zeros and has no gradient, and so has a segment whose splits
// make no sense.
#include "../op.h"
#include "gpu_op.h"
#include "segments_arg.h"
#include "sok/combine_grad.h"

namespace sok {
namespace {

DeviceFeature FeatureOf(const Tensor& rows, const Tensor& index, const Tensor& row_splits, const Tensor& weights,
                        Combiner combiner) {
  CheckRank(rows, 2, "rows");
  CheckRank(index, 1, "index");
  DeviceFeature feature;
  feature.dim = rows.dim_size(1);
  feature.rows = MatrixRows(rows.flat<float>().data(), feature.dim);
  feature.num_rows = rows.dim_size(0);
  feature.index = Int64(index);
  feature.segments = SegmentsArg(row_splits, index.NumElements());
  feature.weights = WeightsOrNull(weights, index.NumElements());
  feature.combiner = combiner;
  return feature;
}

class GpuCombineOp final : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Run(OpKernelContext* ctx) override {
    DeviceFeature feature = FeatureOf(ctx->input(0), ctx->input(1), ctx->input(2), ctx->input(3), combiner_);
    feature.output = Output(ctx, 0, CheckedShape({feature.segments.segments, feature.dim}))->data();
    feature.output_stride = feature.dim;
    if (feature.dim == 0) return;
    TfDeviceScratch scratch(ctx);
    CombineGroup(CudaOf(ctx), &scratch, &feature, 1, FloatType::kFloat32, nullptr);
  }
};
SOK_GPU_KERNEL(Name("Sok>Combine"), GpuCombineOp);

class GpuCombineGradRowsOp final : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &grad = ctx->input(0), &index = ctx->input(1);
    CheckRank(grad, 2, "grad");
    CheckRank(index, 1, "index");
    const int64_t n = index.NumElements(), dim = grad.dim_size(1);
    const DeviceSegments segments = SegmentsArg(ctx->input(2), n);
    CheckShape(grad, {segments.segments, dim}, "grad");
    const float* weights = WeightsOrNull(ctx->input(3), n);
    const int64_t num_rows = ScalarArg<int64_t>(ctx->input(4), "num_rows");
    auto* out = static_cast<float*>(Output(ctx, 0, CheckedShape({num_rows, dim}))->data());
    TfDeviceScratch scratch(ctx);
    CombineGradRows(CudaOf(ctx), &scratch, grad.flat<float>().data(), Int64(index), segments, weights, num_rows, dim,
                    combiner_, out, nullptr);
  }
};
SOK_GPU_KERNEL(Name("Sok>CombineGradRows").HostMemory("num_rows"), GpuCombineGradRowsOp);

class GpuCombineGradWeightsOp final : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &grad = ctx->input(0), &weights = ctx->input(4);
    const DeviceFeature feature = FeatureOf(ctx->input(1), ctx->input(2), ctx->input(3), weights, combiner_);
    CheckShape(grad, {feature.segments.segments, feature.dim}, "grad");
    auto* out = static_cast<float*>(Output(ctx, 0, weights.shape())->data());
    if (feature.weights == nullptr) return;  // no weights, or no keys
    CombineGradWeights(CudaOf(ctx), feature, grad.flat<float>().data(), out, nullptr);
  }
};
SOK_GPU_KERNEL(Name("Sok>CombineGradWeights"), GpuCombineGradWeightsOp);

}  // namespace
}  // namespace sok
