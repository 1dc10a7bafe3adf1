// Gradients into the table: the fused sparse update, and summing what belongs to one row.
#include <string>
#include <vector>

#include "group_apply_op.h"
#include "output_pool.h"
#include "sok/profile.h"
#include "sok/sum_rows.h"
#include "table_resource.h"

namespace sok {
namespace {

using Gradients = EmbeddingTable::Gradients;

absl::Status GroupUpdateShape(InferenceContext* c) {
  int64_t m;
  TF_RETURN_IF_ERROR(c->GetAttr("M", &m));
  ShapeHandle unused;
  for (int t = 0; t < m; ++t) {
    TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(m) + t), 1, &unused));
    TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(2 * m) + t), 2, &unused));
  }
  TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(3 * m)), 0, &unused));
  return c->WithRank(c->input(static_cast<int>(3 * m + 1)), 1, &unused);
}

REGISTER_OP("Sok>GroupApply")
    .Input("handles: M * resource")
    .Input("row_ids: M * int64")
    .Input("grads: M * float")
    .Input("step: int64")
    .Input("hyper: double")
    .Attr("M: int >= 1")
    .Attr("rule: string")
    .Attr("slot_set: string")
    .Attr("nonfinite: {'allow', 'skip', 'raise'} = 'allow'")
    .Attr("distinct: list(bool)")
    .SetIsStateful()
    .SetShapeFn(GroupUpdateShape);

// Inputs of a group of tables: f(gradients, rule, executor, scratch).
class HostGroupUpdateOp : public GroupApplyOp {
 public:
  using GroupApplyOp::GroupApplyOp;

 protected:
  template <class F>
  void WithGroup(OpKernelContext* ctx, const F& f) {
    const int m = num_tables();
    std::vector<RefCountPtr<TableResource>> tables;
    std::vector<Gradients> gradients;
    for (int t = 0; t < m; ++t) {
      tables.push_back(TableArg(ctx, t));
      EmbeddingTable& table = tables.back()->table();
      const Tensor &row_ids = ctx->input(m + t), &grads = ctx->input(2 * m + t);
      CheckRank(row_ids, 1, "row_ids");
      const int64_t n = row_ids.NumElements();
      CheckShape(grads, {n, table.dim()}, "grads");
      gradients.push_back({&table, Int64(row_ids), grads.flat<float>().data(), n, distinct_[static_cast<size_t>(t)]});
    }
    const UpdateRule rule = Rule(ctx);
    const ProfileGroup group = DescribeGroup(gradients, [](const Gradients& g) {
      return ProfileCounts{-1, g.n, g.n * g.table->dim() * int64_t{sizeof(float)}};
    });
    const ProfileSpan span("update", group.tables, group.counts);
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    f(Cpu{executor}, scratch.get(), rule, gradients.data());
  }
};

class HostGroupApplyOp final : public HostGroupUpdateOp {
 public:
  using HostGroupUpdateOp::HostGroupUpdateOp;

  void Run(OpKernelContext* ctx) override {
    WithGroup(ctx, [&](const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const Gradients* gradients) {
      EmbeddingTable::ApplyGroup(cpu, scratch, rule, slot_set_, nonfinite_, gradients, num_tables());
    });
  }
};
SOK_CPU_KERNEL("Sok>GroupApply", HostGroupApplyOp);

REGISTER_OP("Sok>GroupTry")
    .Input("handles: M * resource")
    .Input("row_ids: M * int64")
    .Input("grads: M * float")
    .Input("step: int64")
    .Input("hyper: double")
    .Output("why: string")
    .Attr("M: int >= 1")
    .Attr("rule: string")
    .Attr("slot_set: string")
    .Attr("nonfinite: {'raise'} = 'raise'")
    .Attr("distinct: list(bool)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(GroupUpdateShape(c));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

class HostGroupTryOp final : public HostGroupUpdateOp {
 public:
  using HostGroupUpdateOp::HostGroupUpdateOp;

  void Run(OpKernelContext* ctx) override {
    Tensor* why = Output(ctx, 0, CheckedShape({}));
    WithGroup(ctx, [&](const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const Gradients* gradients) {
      why->scalar<tensorflow::tstring>()() =
          EmbeddingTable::TryGroup(cpu, scratch, rule, slot_set_, gradients, num_tables());
    });
  }
};
SOK_CPU_KERNEL("Sok>GroupTry", HostGroupTryOp);

// Writes distinct row ids and, for each, the sum of its addends. Negative row ids are dropped.
void SumByRow(OpKernelContext* ctx, Scratch* scratch, const RowAddends& addends, int64_t dim) {
  const TfExecutor executor(ctx);
  const RowSums table = {dim, &addends, 1};
  SumRows({executor}, scratch, &table, 1, [&](int64_t, int64_t rows) {
    RowSumsTarget target;
    target.row_ids = reinterpret_cast<int64_t*>(AllocateOutput(ctx, 0, CheckedShape({rows}))->flat<int64_t>().data());
    target.sums = AllocateOutput(ctx, 1, CheckedShape({rows, dim}))->flat<float>().data();
    return target;
  });
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

class SumDuplicatesOp : public GuardedOp {
 public:
  using GuardedOp::GuardedOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &row_ids = ctx->input(0), &values = ctx->input(1);
    CheckRank(row_ids, 1, "row_ids");
    CheckRank(values, 2, "values");
    const int64_t n = row_ids.NumElements(), dim = values.dim_size(1);
    CheckShape(values, {n, dim}, "values");
    RowAddends addends;
    addends.row_ids = Int64(row_ids);
    addends.n = n;
    addends.values = values.flat<float>().data();
    const ProfileSpan span("backward", name(), {-1, n, static_cast<int64_t>(values.TotalBytes())}, "op");
    const ScratchLease scratch;
    SumByRow(ctx, scratch.get(), addends, dim);
  }
};
SOK_CPU_KERNEL("Sok>SumDuplicates", SumDuplicatesOp);

}  // namespace
}  // namespace sok
