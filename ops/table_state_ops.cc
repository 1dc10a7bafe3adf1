// A table's rows together with what optimizers keep of them: restoring, listing, swapping. And its step.
#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "op.h"
#include "shapes.h"
#include "table_resource.h"

namespace sok {
namespace {

REGISTER_OP("Sok>TableRestore")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("rows: float")
    .Input("slots: float")
    .Output("num_new: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("slot_set: string = ''")
    .Attr("rule: string = ''")
    .Attr("slot_inits: list(float) = [0.0]")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &unused));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

class TableRestoreOp : public GuardedOp {
 public:
  explicit TableRestoreOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string rule;
    Check(ctx->GetAttr("slot_set", &info_.name));
    Check(ctx->GetAttr("rule", &rule));
    std::vector<float> inits;
    Check(ctx->GetAttr("slot_inits", &inits));
    if (info_.name.empty() != rule.empty()) {
      throw InvalidArgument("`slot_set` and `rule` must be given together. Received: '" + info_.name + "' and '" +
                            rule + "'.");
    }
    if (!rule.empty()) info_.rule.rule = ParseRule(rule);
    const size_t num_slots = static_cast<size_t>(info_.rule.num_slots());
    if (inits.size() != 1 && inits.size() != num_slots) {
      throw InvalidArgument("`slot_inits` must have 1 value, or one for each of " + std::to_string(num_slots) +
                            " slots. Received: " + std::to_string(inits.size()) + ".");
    }
    for (size_t k = 0; k < num_slots; ++k) info_.rule.slot_inits[k] = inits[inits.size() == 1 ? 0 : k];
  }
  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    TableStore& table = resource->store();
    resource->CheckKeyType(ctx->input(1));
    CheckRank(ctx->input(1), 1, "keys");
    const int64_t n = ctx->input(1).NumElements();
    CheckShape(ctx->input(2), {n, table.dim()}, "rows");
    std::vector<TableStore::SlotSetInfo> sets;
    if (!info_.name.empty()) sets.push_back(info_);
    CheckShape(ctx->input(3), {n, sets.empty() ? 0 : info_.rule.slot_floats(table.dim())}, "slots");
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    TableStore::RowValues values;
    values.keys = KeyWords(ctx->input(1), scratch.get());
    values.rows = ctx->input(2).flat<float>().data();
    values.n = n;
    if (!sets.empty()) values.slots.push_back(ctx->input(3).flat<float>().data());
    int64_t& num_new = ScalarOutput<int64_t>(ctx, 0);  // memory first: afterwards nothing can fail
    num_new = table.Restore({executor}, scratch.get(), sets, values);
  }

 private:
  TableStore::SlotSetInfo info_;
};
SOK_HOST_KERNEL("Sok>TableRestore", TableRestoreOp, "handle", "keys", "rows", "slots", "num_new");

REGISTER_OP("Sok>TableSlotSets")
    .Input("handle: resource")
    .Output("names: string")
    .Output("rules: string")
    .Output("num_slots: int64")
    .Output("calls: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const DimensionHandle n = c->UnknownDim();
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Vector(n));
      return absl::OkStatus();
    });

void TableSlotSets(OpKernelContext* ctx) {
  const std::vector<TableStore::SlotSetInfo> sets = TableArg(ctx, 0)->store().SlotSets();
  Tensor* out[4];
  for (int i = 0; i < 4; ++i) {
    out[i] = Output(ctx, i, CheckedShape({static_cast<int64_t>(sets.size())}));
  }
  for (size_t s = 0; s < sets.size(); ++s) {
    out[0]->vec<tensorflow::tstring>()(static_cast<int64_t>(s)) = sets[s].name;
    out[1]->vec<tensorflow::tstring>()(static_cast<int64_t>(s)) = RuleName(sets[s].rule.rule);
    out[2]->vec<int64_t>()(static_cast<int64_t>(s)) = sets[s].rule.num_slots();
    out[3]->vec<int64_t>()(static_cast<int64_t>(s)) = sets[s].calls;
  }
}
SOK_HOST_KERNEL("Sok>TableSlotSets", FunctionOp<TableSlotSets>, "handle", "names", "rules", "num_slots", "calls");

REGISTER_OP("Sok>TableSwap").Input("handle: resource").Input("other: resource").SetIsStateful().SetShapeFn(NoOutputs);

void TableSwap(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> a = TableArg(ctx, 0), b = TableArg(ctx, 1);
  a->store().Swap(&b->store());
}
SOK_HOST_KERNEL("Sok>TableSwap", FunctionOp<TableSwap>, "handle", "other");

REGISTER_OP("Sok>TableStep").Input("handle: resource").Output("step: int64").SetIsStateful().SetShapeFn(ScalarShape);

void TableStep(OpKernelContext* ctx) { ScalarOutput<int64_t>(ctx, 0) = TableArg(ctx, 0)->store().step; }
SOK_HOST_KERNEL("Sok>TableStep", FunctionOp<TableStep>, "handle", "step");

REGISTER_OP("Sok>TableIds").Input("handle: resource").Output("ids: int64").SetIsStateful().SetShapeFn(ScalarShape);

void TableIds(OpKernelContext* ctx) { ScalarOutput<int64_t>(ctx, 0) = TableArg(ctx, 0)->ids; }
SOK_HOST_KERNEL("Sok>TableIds", FunctionOp<TableIds>, "handle", "ids");

REGISTER_OP("Sok>TableRowsAhead")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(2));
      return absl::OkStatus();
    });

void TableRowsAhead(OpKernelContext* ctx) {
  const auto table = TableArg(ctx, 0);
  Tensor* counts = Output(ctx, 0, TensorShape({2}));
  counts->flat<int64_t>()(0) = table->rows_ahead;
  counts->flat<int64_t>()(1) = table->rows_repaired;
}
SOK_HOST_KERNEL("Sok>TableRowsAhead", FunctionOp<TableRowsAhead>, "handle", "counts");

// The keys of each feature count as ids that its table has seen. For lookups whose ExchangeRoute has not counted them.
REGISTER_OP("Sok>CountIds")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ") >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

void CountIds(OpKernelContext* ctx) {
  tensorflow::OpInputList handles, keys;
  Check(ctx->input_list("handles", &handles));
  Check(ctx->input_list("keys", &keys));
  if (handles.size() != keys.size()) throw InvalidArgument("`keys` must have one tensor per table.");
  for (int i = 0; i < keys.size(); ++i) TableArg(ctx, i)->ids += keys[i].NumElements();
}
SOK_HOST_KERNEL("Sok>CountIds", FunctionOp<CountIds>, "handles", "keys");

REGISTER_OP("Sok>TableSetStep").Input("handle: resource").Input("step: int64").SetIsStateful().SetShapeFn(TakesScalar);

void TableSetStep(OpKernelContext* ctx) {
  const auto step = ScalarArg<int64_t>(ctx->input(1), "step");
  if (step < 0) throw InvalidArgument("`step` must not be negative. Received: " + std::to_string(step) + ".");
  TableArg(ctx, 0)->store().step = step;
}
SOK_HOST_KERNEL("Sok>TableSetStep", FunctionOp<TableSetStep>, "handle", "step");

REGISTER_OP("Sok>TablesCountStep")
    .Input("handles: M * resource")
    .Attr("M: int >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

void TablesCountStep(OpKernelContext* ctx) {
  const TfExecutor executor(ctx);
  std::exception_ptr first;  // all tables end the step, whatever one of them lacks memory for
  for (int t = 0; t < ctx->num_inputs(); ++t) {
    try {
      TableArg(ctx, t)->store().EndStep({executor});
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}
SOK_HOST_KERNEL("Sok>TablesCountStep", FunctionOp<TablesCountStep>, "handles");

}  // namespace
}  // namespace sok
