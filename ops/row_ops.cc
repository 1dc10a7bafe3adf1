// Rows and slots of a table, out and in by row id: what a rule needs whose step TensorFlow does.
#include <algorithm>
#include <string>
#include <vector>

#include "op.h"
#include "table_resource.h"

namespace sok {
namespace {

absl::Status MatricesOf(InferenceContext* c, bool are_inputs) {
  int64_t dim;
  std::vector<float> inits;
  TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
  TF_RETURN_IF_ERROR(c->GetAttr("slot_inits", &inits));
  ShapeHandle ids, unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &ids));
  const ShapeHandle rows = c->Matrix(c->Dim(ids, 0), dim);
  DimensionHandle width;
  TF_RETURN_IF_ERROR(c->Multiply(c->MakeDim(dim), static_cast<int64_t>(inits.size()), &width));
  const ShapeHandle slots = c->Matrix(c->Dim(ids, 0), width);
  if (are_inputs) {
    TF_RETURN_IF_ERROR(c->Merge(c->input(2), rows, &unused));
    return c->Merge(c->input(3), slots, &unused);
  }
  c->set_output(0, rows);
  c->set_output(1, slots);
  return absl::OkStatus();
}

REGISTER_OP("Sok>TableGather")
    .Input("handle: resource")
    .Input("row_ids: int64")
    .Output("rows: float")
    .Output("slots: float")
    .Attr("dim: int >= 1")
    .Attr("rule: string")
    .Attr("slot_set: string")
    .Attr("slot_inits: list(float)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return MatricesOf(c, /*are_inputs=*/false); });

REGISTER_OP("Sok>TableScatter")
    .Input("handle: resource")
    .Input("row_ids: int64")
    .Input("rows: float")
    .Input("slots: float")
    .Attr("dim: int >= 1")
    .Attr("rule: string")
    .Attr("slot_set: string")
    .Attr("slot_inits: list(float)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return MatricesOf(c, /*are_inputs=*/true); });

// What both have: attributes, and the first two inputs.
class RowOp : public GuardedOp {
 public:
  explicit RowOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string rule;
    std::vector<float> inits;
    Check(ctx->GetAttr("dim", &dim_));
    Check(ctx->GetAttr("rule", &rule));
    Check(ctx->GetAttr("slot_set", &slot_set_));
    Check(ctx->GetAttr("slot_inits", &inits));
    rule_.rule = ParseRule(rule);
    if (!rule_.is_named() || slot_set_.empty() || inits.size() != static_cast<size_t>(rule_.num_slots())) {
      throw InvalidArgument(
          "`rule` must list its slots, `slot_inits` have a value for each, and `slot_set` a name. "
          "Received: '" +
          rule + "', " + std::to_string(inits.size()) + " values and '" + slot_set_ + "'.");
    }
    std::copy(inits.begin(), inits.end(), rule_.slot_inits);
  }

 protected:
  // Calls body(table, row_ids, n) with the inputs, checked.
  template <class Body>
  void WithTable(OpKernelContext* ctx, const Body& body) const {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    resource->CheckDim(dim_);
    if (!resource->is_on_host()) {
      throw InvalidArgument(resource->config().Label() + " is on a GPU, where the slots of '" + RuleName(rule_.rule) +
                            "' cannot lie. Train it by one of sok.optimizers, or make it under " +
                            "tf.device('CPU:0').");
    }
    const Tensor& row_ids = ctx->input(1);
    CheckRank(row_ids, 1, "row_ids");
    body(resource->table(), Int64(row_ids), row_ids.NumElements());
  }

  int64_t dim_ = 1;
  UpdateRule rule_;
  std::string slot_set_;
};

class TableGatherOp final : public RowOp {
 public:
  using RowOp::RowOp;
  void Run(OpKernelContext* ctx) override {
    WithTable(ctx, [&](EmbeddingTable& table, const int64_t* row_ids, int64_t n) {
      Tensor* rows = Output(ctx, 0, TensorShape({n, dim_}));
      Tensor* slots = Output(ctx, 1, TensorShape({n, dim_ * rule_.num_slots()}));
      const TfExecutor executor(ctx);
      table.Gather({executor}, rule_, slot_set_, row_ids, n, rows->flat<float>().data(), slots->flat<float>().data());
    });
  }
};
SOK_HOST_KERNEL("Sok>TableGather", TableGatherOp, "handle", "row_ids", "rows", "slots");

class TableScatterOp final : public RowOp {
 public:
  using RowOp::RowOp;
  void Run(OpKernelContext* ctx) override {
    WithTable(ctx, [&](EmbeddingTable& table, const int64_t* row_ids, int64_t n) {
      const Tensor &rows = ctx->input(2), &slots = ctx->input(3);
      CheckShape(rows, TensorShape({n, dim_}), "rows");
      CheckShape(slots, TensorShape({n, dim_ * rule_.num_slots()}), "slots");
      const TfExecutor executor(ctx);
      table.Scatter({executor}, rule_, slot_set_, row_ids, n, rows.flat<float>().data(), slots.flat<float>().data());
    });
  }
};
SOK_HOST_KERNEL("Sok>TableScatter", TableScatterOp, "handle", "row_ids", "rows", "slots");

}  // namespace
}  // namespace sok
