// Keys to rows, and keys to pooled vectors, in one table on one rank.
#include "op.h"
#include "output_pool.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {
namespace {

REGISTER_OP("Sok>TableLookup")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("insert: bool")
    .Output("rows: float")
    .Output("row_ids: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      ShapeHandle unused, rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
      TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(dim), &rows));
      c->set_output(0, rows);
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

class TableLookupOp : public OpKernel {
 public:
  explicit TableLookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) { OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_)); }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const Tensor& keys = ctx->input(1);
      resource->CheckKeyType(keys);
      resource->CheckDim(dim_);
      const bool insert = ScalarArg<bool>(ctx->input(2), "insert");
      TensorShape shape = keys.shape();
      shape.AddDim(dim_);
      Tensor* rows = AllocateOutput(ctx, 0, shape);
      Tensor* row_ids = AllocateOutput(ctx, 1, keys.shape());
      const ProfileSpan span("find", resource->table().config().name,
                             {keys.NumElements(), keys.NumElements(), static_cast<int64_t>(rows->TotalBytes())});
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      resource->table().Lookup({executor}, scratch.get(), KeyWords(keys, scratch.get()), keys.NumElements(), insert,
                               nullptr, rows->flat<float>().data(),
                               reinterpret_cast<int64_t*>(row_ids->flat<int64_t>().data()));
    });
  }

 private:
  int64_t dim_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableLookup").Device(tensorflow::DEVICE_CPU), TableLookupOp);

REGISTER_OP("Sok>TableLookupCombine")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("row_splits: int64")
    .Input("weights: float")
    .Input("insert: bool")
    .Output("output: float")
    .Output("row_ids: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("dim: int >= 1")
    .Attr("combiner: " SOK_COMBINERS)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      ShapeHandle unused, keys, splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &splits));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 0, &unused));
      DimensionHandle segments;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &segments));
      c->set_output(0, c->Matrix(segments, dim));
      c->set_output(1, keys);
      return absl::OkStatus();
    });

class TableLookupCombineOp : public CombinerOp {
 public:
  explicit TableLookupCombineOp(OpKernelConstruction* ctx) : CombinerOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const Tensor& keys = ctx->input(1);
      resource->CheckKeyType(keys);
      resource->CheckDim(dim_);
      CheckRank(keys, 1, "keys");
      const int64_t n = keys.NumElements();
      const int64_t segments = CheckRowSplits(ctx->input(2), n);
      const float* weights = WeightsOrNull(ctx->input(3), n);
      const bool insert = ScalarArg<bool>(ctx->input(4), "insert");
      Tensor* output = AllocateOutput(ctx, 0, TensorShape({segments, dim_}));
      Tensor* row_ids = AllocateOutput(ctx, 1, TensorShape({n}));
      const ProfileSpan span("find+combine", resource->table().config().name,
                             {n, segments, static_cast<int64_t>(output->TotalBytes())});
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      resource->table().LookupCombine({executor}, scratch.get(), KeyWords(keys, scratch.get()), n, Int64(ctx->input(2)),
                                      weights, segments, combiner_, insert, output->flat<float>().data(),
                                      reinterpret_cast<int64_t*>(row_ids->flat<int64_t>().data()));
    });
  }

 private:
  int64_t dim_ = 1;
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableLookupCombine").Device(tensorflow::DEVICE_CPU), TableLookupCombineOp);

}  // namespace
}  // namespace sok
