// Rows of a table out and in by row id, for what TensorFlow calculates: penalties and constraints.
#include <string>

#include "op.h"
#include "table_resource.h"

namespace sok {
namespace {

absl::Status RowsOf(InferenceContext* c, ShapeHandle* rows) {
  int64_t dim;
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
  ShapeHandle ids;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &ids));
  *rows = c->Matrix(c->Dim(ids, 0), dim);
  return absl::OkStatus();
}

REGISTER_OP("Sok>TableGather")
    .Input("handle: resource")
    .Input("row_ids: int64")
    .Output("rows: float")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(RowsOf(c, &rows));
      c->set_output(0, rows);
      return absl::OkStatus();
    });

REGISTER_OP("Sok>TableScatter")
    .Input("handle: resource")
    .Input("row_ids: int64")
    .Input("rows: float")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(RowsOf(c, &rows));
      return c->Merge(c->input(2), rows, &rows);
    });

class RowOp : public GuardedOp {
 public:
  explicit RowOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("dim", &dim_)); }

 protected:
  // Calls body(table, row_ids, n) with the inputs, checked.
  template <class Body>
  void WithTable(OpKernelContext* ctx, const Body& body) const {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    resource->CheckDim(dim_);
    const Tensor& row_ids = ctx->input(1);
    CheckRank(row_ids, 1, "row_ids");
    body(resource->table(), Int64(row_ids), row_ids.NumElements());
  }

  int64_t dim_ = 1;
};

class TableGatherOp final : public RowOp {
 public:
  using RowOp::RowOp;
  void Run(OpKernelContext* ctx) override {
    WithTable(ctx, [&](EmbeddingTable& table, const int64_t* row_ids, int64_t n) {
      Tensor* rows = Output(ctx, 0, TensorShape({n, dim_}));
      const TfExecutor executor(ctx);
      table.Gather({executor}, row_ids, n, rows->flat<float>().data());
    });
  }
};
SOK_CPU_KERNEL("Sok>TableGather", TableGatherOp);

class TableScatterOp final : public RowOp {
 public:
  using RowOp::RowOp;
  void Run(OpKernelContext* ctx) override {
    WithTable(ctx, [&](EmbeddingTable& table, const int64_t* row_ids, int64_t n) {
      const Tensor& rows = ctx->input(2);
      CheckShape(rows, TensorShape({n, dim_}), "rows");
      const TfExecutor executor(ctx);
      table.Scatter({executor}, row_ids, n, rows.flat<float>().data());
    });
  }
};
SOK_CPU_KERNEL("Sok>TableScatter", TableScatterOp);

}  // namespace
}  // namespace sok
