// Pooling of rows that came home from their owners, and its gradients.
#include <string>

#include "op.h"
#include "shapes.h"
#include "sok/profile.h"

namespace sok {
namespace {

void CheckIndex(const int64_t* index, int64_t n, int64_t num_rows) {
  for (int64_t i = 0; i < n; ++i) {
    if (static_cast<uint64_t>(index[i]) < static_cast<uint64_t>(num_rows)) continue;
    throw InvalidArgument("index[" + std::to_string(i) + "] = " + std::to_string(index[i]) + " must lie in [0, " +
                          std::to_string(num_rows) + "), the number of rows.");
  }
}

REGISTER_OP("Sok>Combine")
    .Input("rows: float")
    .Input("index: int64")
    .Input("row_splits: int64")
    .Input("weights: float")
    .Output("output: float")
    .Attr("combiner: " SOK_COMBINERS)
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows, splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &splits));
      DimensionHandle segments;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &segments));
      c->set_output(0, c->Matrix(segments, c->Dim(rows, 1)));
      return absl::OkStatus();
    });

class CombineOp : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &rows = ctx->input(0), &index = ctx->input(1);
    CheckRank(rows, 2, "rows");
    CheckRank(index, 1, "index");
    const int64_t n = index.NumElements(), dim = rows.dim_size(1);
    const int64_t segments = CheckRowSplits(ctx->input(2), n);
    const float* weights = WeightsOrNull(ctx->input(3), n);
    const ProfileSpan span("combine", name(), {n, segments, segments * dim * int64_t{sizeof(float)}}, "op");
    CheckIndex(Int64(index), n, rows.dim_size(0));
    Tensor* output = Output(ctx, 0, CheckedShape({segments, dim}));
    const TfExecutor executor(ctx);
    Combine({executor}, rows.flat<float>().data(), Int64(index), Int64(ctx->input(2)), weights, segments, dim,
            combiner_, output->flat<float>().data());
  }
};
SOK_CPU_KERNEL("Sok>Combine", CombineOp);

REGISTER_OP("Sok>CombineGradRows")
    .Input("grad: float")
    .Input("index: int64")
    .Input("row_splits: int64")
    .Input("weights: float")
    .Input("num_rows: int64")
    .Output("grad_rows: float")
    .Attr("combiner: " SOK_COMBINERS)
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle grad;
      DimensionHandle num_rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &grad));
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(4, &num_rows));
      c->set_output(0, c->Matrix(num_rows, c->Dim(grad, 1)));
      return absl::OkStatus();
    });

class CombineGradRowsOp : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &grad = ctx->input(0), &index = ctx->input(1);
    CheckRank(grad, 2, "grad");
    CheckRank(index, 1, "index");
    const int64_t n = index.NumElements(), dim = grad.dim_size(1);
    const int64_t segments = CheckRowSplits(ctx->input(2), n);
    CheckShape(grad, {segments, dim}, "grad");
    const float* weights = WeightsOrNull(ctx->input(3), n);
    const int64_t num_rows = ScalarArg<int64_t>(ctx->input(4), "num_rows");
    const ProfileSpan span("backward", name(), {n, num_rows, num_rows * dim * int64_t{sizeof(float)}}, "op");
    CheckIndex(Int64(index), n, num_rows);
    Tensor* out = Output(ctx, 0, CheckedShape({num_rows, dim}));
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    CombineGradRows({executor}, scratch.get(), grad.flat<float>().data(), Int64(index), Int64(ctx->input(2)), weights,
                    n, segments, num_rows, dim, combiner_, out->flat<float>().data());
  }
};
SOK_CPU_KERNEL("Sok>CombineGradRows", CombineGradRowsOp);

REGISTER_OP("Sok>CombineGradWeights")
    .Input("grad: float")
    .Input("rows: float")
    .Input("index: int64")
    .Input("row_splits: int64")
    .Input("weights: float")
    .Output("grad_weights: float")
    .Attr("combiner: " SOK_COMBINERS)
    .SetShapeFn(ShapeOfInput<4>);

class CombineGradWeightsOp : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &grad = ctx->input(0), &rows = ctx->input(1), &index = ctx->input(2);
    CheckRank(grad, 2, "grad");
    CheckRank(rows, 2, "rows");
    CheckRank(index, 1, "index");
    const int64_t n = index.NumElements(), dim = rows.dim_size(1);
    const int64_t segments = CheckRowSplits(ctx->input(3), n);
    CheckShape(grad, {segments, dim}, "grad");
    const float* weights = WeightsOrNull(ctx->input(4), n);
    const ProfileSpan span("backward", name(), {n, -1, n * int64_t{sizeof(float)}}, "op");
    CheckIndex(Int64(index), n, rows.dim_size(0));
    Tensor* out = Output(ctx, 0, ctx->input(4).shape());
    if (weights == nullptr) return;  // no weights, or no keys
    const TfExecutor executor(ctx);
    CombineGradWeights({executor}, grad.flat<float>().data(), rows.flat<float>().data(), Int64(index),
                       Int64(ctx->input(3)), weights, segments, dim, combiner_, out->flat<float>().data());
  }
};
SOK_CPU_KERNEL("Sok>CombineGradWeights", CombineGradWeightsOp);

}  // namespace
}  // namespace sok
