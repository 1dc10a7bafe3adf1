// Gradients into the table: the fused sparse update, and summing what belongs to one row.
#include <algorithm>
#include <vector>

#include "op.h"
#include "sok/unique.h"
#include "table_resource.h"

namespace sok {
namespace {

REGISTER_OP("Sok>TableApply")
    .Input("handle: resource")
    .Input("row_ids: int64")
    .Input("grads: float")
    .Input("step: int64")
    .Input("hyper: double")
    .Attr("rule: {'sgd', 'adagrad', 'adam', 'lazy_adam'}")
    .Attr("slot_set: string")
    .Attr("nonfinite: {'allow', 'skip', 'raise'} = 'allow'")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      return c->WithRank(c->input(4), 1, &unused);
    });

class TableApplyOp : public OpKernel {
 public:
  explicit TableApplyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      std::string nonfinite;
      Check(ctx->GetAttr("rule", &rule_));
      Check(ctx->GetAttr("slot_set", &slot_set_));
      Check(ctx->GetAttr("nonfinite", &nonfinite));
      nonfinite_ = ParseNonfinite(nonfinite);
    });
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const Tensor &row_ids = ctx->input(1), &grads = ctx->input(2);
      CheckRank(row_ids, 1, "row_ids");
      const int64_t n = row_ids.NumElements();
      CheckShape(grads, TensorShape({n, resource->table().dim()}), "grads");
      const int64_t step = ScalarArg<int64_t>(ctx->input(3), "step");
      CheckRank(ctx->input(4), 1, "hyper");
      const UpdateRule rule =
          MakeUpdateRule(rule_, ctx->input(4).flat<double>().data(), ctx->input(4).NumElements(), step);
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      resource->table().Apply({executor}, scratch.get(), rule, slot_set_, nonfinite_, Int64(row_ids),
                              grads.flat<float>().data(), n);
    });
  }

 private:
  std::string rule_, slot_set_;
  Nonfinite nonfinite_ = Nonfinite::kAllow;
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableApply").Device(tensorflow::DEVICE_CPU), TableApplyOp);

// Writes distinct row ids in order of first appearance and, for each, the sum over its positions p of
// factor[p] * values[source[p]] (nulls: 1 and p). Negative row ids are dropped.
void SumByRow(OpKernelContext* ctx, Scratch* scratch, const int64_t* row_ids, int64_t n, const float* values,
              const uint32_t* source, const float* factor, int64_t dim) {
  const TfExecutor executor(ctx);
  int64_t kept = n;
  if (std::any_of(row_ids, row_ids + n, [](int64_t id) { return id < 0; })) {
    int64_t* ids = scratch->Get<int64_t>(n);
    uint32_t* from = scratch->Get<uint32_t>(n);
    float* scale = factor == nullptr ? nullptr : scratch->Get<float>(n);
    kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (row_ids[i] < 0) continue;
      ids[kept] = row_ids[i];
      from[kept] = source == nullptr ? static_cast<uint32_t>(i) : source[i];
      if (scale != nullptr) scale[kept] = factor[i];
      ++kept;
    }
    row_ids = ids;
    source = from;
    factor = scale;
  }
  const Groups groups = GroupKeys({executor}, scratch, reinterpret_cast<const uint64_t*>(row_ids), kept);
  const uint32_t* order = FirstAppearance({executor}, scratch, groups, kept);
  Tensor *unique, *sums;
  Check(ctx->allocate_output(0, TensorShape({groups.num_groups}), &unique));
  Check(ctx->allocate_output(1, TensorShape({groups.num_groups, dim}), &sums));
  auto unique_ids = unique->flat<int64_t>();
  for (int64_t g = 0; g < groups.num_groups; ++g) unique_ids(order[g]) = row_ids[groups.positions[groups.offsets[g]]];
  SumGroups({executor}, groups, values, source, factor, order, dim, sums->flat<float>().data());
}

absl::Status SumByRowShape(InferenceContext* c) {
  ShapeHandle ids, values;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() == 2 ? 0 : 1), 1, &ids));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() == 2 ? 1 : 0), 2, &values));
  const DimensionHandle distinct = c->UnknownDim();
  c->set_output(0, c->Vector(distinct));
  c->set_output(1, c->Matrix(distinct, c->Dim(values, 1)));
  return absl::OkStatus();
}

REGISTER_OP("Sok>SumDuplicates")
    .Input("row_ids: int64")
    .Input("values: float")
    .Output("unique_row_ids: int64")
    .Output("sums: float")
    .SetShapeFn(SumByRowShape);

class SumDuplicatesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor &row_ids = ctx->input(0), &values = ctx->input(1);
      CheckRank(row_ids, 1, "row_ids");
      CheckRank(values, 2, "values");
      const int64_t n = row_ids.NumElements(), dim = values.dim_size(1);
      CheckShape(values, TensorShape({n, dim}), "values");
      const ScratchLease scratch;
      SumByRow(ctx, scratch.get(), Int64(row_ids), n, values.flat<float>().data(), nullptr, nullptr, dim);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>SumDuplicates").Device(tensorflow::DEVICE_CPU), SumDuplicatesOp);

// The gradient of TableLookupCombine: spreads each segment's gradient over its keys and sums it per row, in one pass,
// so that the [N, D] matrix of per-key gradients never exists.
REGISTER_OP("Sok>CombineGradSparse")
    .Input("grad: float")
    .Input("row_ids: int64")
    .Input("row_splits: int64")
    .Input("weights: float")
    .Output("unique_row_ids: int64")
    .Output("sums: float")
    .Attr("combiner: " SOK_COMBINERS)
    .SetShapeFn(SumByRowShape);

class CombineGradSparseOp : public CombinerOp {
 public:
  using CombinerOp::CombinerOp;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor &grad = ctx->input(0), &row_ids = ctx->input(1);
      CheckRank(grad, 2, "grad");
      CheckRank(row_ids, 1, "row_ids");
      const int64_t n = row_ids.NumElements(), dim = grad.dim_size(1);
      const int64_t segments = CheckRowSplits(ctx->input(2), n);
      CheckShape(grad, TensorShape({segments, dim}), "grad");
      const float* weights = WeightsOrNull(ctx->input(3), n);
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      uint32_t* segment_of = scratch.get()->Get<uint32_t>(n);
      float* factor = scratch.get()->Get<float>(n);
      ExpandSegments({executor}, Int64(ctx->input(2)), weights, segments, combiner_, segment_of, factor);
      SumByRow(ctx, scratch.get(), Int64(row_ids), n, grad.flat<float>().data(), segment_of, factor, dim);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>CombineGradSparse").Device(tensorflow::DEVICE_CPU), CombineGradSparseOp);

}  // namespace
}  // namespace sok
