// A table's rows together with what optimizers keep of them: restoring, listing, swapping. And its step.
#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "gpu_kernel.h"
#include "op.h"
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

class TableRestoreOp : public OpKernel {
 public:
  explicit TableRestoreOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
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
    });
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      TableStore& table = resource->store();
      resource->CheckKeyType(ctx->input(1));
      CheckRank(ctx->input(1), 1, "keys");
      const int64_t n = ctx->input(1).NumElements();
      CheckShape(ctx->input(2), {n, table.dim()}, "rows");
      std::vector<TableStore::SlotSetInfo> sets;
      if (!info_.name.empty()) sets.push_back(info_);
      CheckShape(ctx->input(3), {n, sets.empty() ? 0 : info_.rule.num_slots() * table.dim()}, "slots");
      Tensor* num_new;
      Check(ctx->allocate_output(0, TensorShape({}), &num_new));
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      TableStore::RowValues values;
      values.keys = KeyWords(ctx->input(1), scratch.get());
      values.rows = ctx->input(2).flat<float>().data();
      values.n = n;
      if (!sets.empty()) values.slots.push_back(ctx->input(3).flat<float>().data());
      num_new->scalar<int64_t>()() = table.Restore({executor}, scratch.get(), sets, values);
    });
  }

 private:
  TableStore::SlotSetInfo info_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableRestore").Device(tensorflow::DEVICE_CPU), TableRestoreOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableRestore", TableRestoreOp, "handle", "keys", "rows", "slots", "num_new");

// What cannot be done is told, not raised: in a graph nothing else could tell it to peers that wait in the next collective.
absl::Status TextOut(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

template <class Body>
void Tell(OpKernelContext* ctx, const Body& body) {
  Guard(ctx, [&] {
    Tensor* error;
    Check(ctx->allocate_output(0, TensorShape({}), &error));
    tensorflow::tstring& text = error->scalar<tensorflow::tstring>()();
    try {
      body();
    } catch (const TableFull& full) {
      text = std::string("TableFull: ") + full.what();
    } catch (const OutOfMemory& out) {
      text = std::string("TableFull: ") + out.what();
    } catch (const std::bad_alloc&) {
      text = "TableFull: out of memory";
    } catch (const std::exception& other) {
      text = std::string("RuntimeError: ") + other.what();
    }
  });
}

REGISTER_OP("Sok>TableTryReserve")
    .Input("handle: resource")
    .Input("num_rows: int64")
    .Output("error: string")
    .SetIsStateful()
    .SetShapeFn(TextOut);

class TableTryReserveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Tell(ctx, [&] {
      const TfExecutor executor(ctx);
      TableArg(ctx, 0)->store().Reserve({executor}, ScalarArg<int64_t>(ctx->input(1), "num_rows"));
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableTryReserve").Device(tensorflow::DEVICE_CPU), TableTryReserveOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableTryReserve", TableTryReserveOp, "handle", "num_rows", "error");

REGISTER_OP("Sok>TableTryAssign")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("rows: float")
    .Output("error: string")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn(TextOut);

class TableTryAssignOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Tell(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      resource->CheckKeyType(ctx->input(1));
      CheckRank(ctx->input(1), 1, "keys");
      const int64_t n = ctx->input(1).NumElements();
      CheckShape(ctx->input(2), {n, resource->store().dim()}, "rows");
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      resource->store().Assign({executor}, scratch.get(), KeyWords(ctx->input(1), scratch.get()),
                               ctx->input(2).flat<float>().data(), n);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableTryAssign").Device(tensorflow::DEVICE_CPU), TableTryAssignOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableTryAssign", TableTryAssignOp, "handle", "keys", "rows", "error");

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

class TableSlotSetsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const std::vector<TableStore::SlotSetInfo> sets = TableArg(ctx, 0)->store().SlotSets();
      Tensor* out[4];
      for (int i = 0; i < 4; ++i) {
        Check(ctx->allocate_output(i, CheckedShape({static_cast<int64_t>(sets.size())}), &out[i]));
      }
      for (size_t s = 0; s < sets.size(); ++s) {
        out[0]->vec<tensorflow::tstring>()(static_cast<int64_t>(s)) = sets[s].name;
        out[1]->vec<tensorflow::tstring>()(static_cast<int64_t>(s)) = RuleName(sets[s].rule.rule);
        out[2]->vec<int64_t>()(static_cast<int64_t>(s)) = sets[s].rule.num_slots();
        out[3]->vec<int64_t>()(static_cast<int64_t>(s)) = sets[s].calls;
      }
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableSlotSets").Device(tensorflow::DEVICE_CPU), TableSlotSetsOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableSlotSets", TableSlotSetsOp, "handle", "names", "rules", "num_slots", "calls");

REGISTER_OP("Sok>TableSwap")
    .Input("handle: resource")
    .Input("other: resource")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); });

class TableSwapOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> a = TableArg(ctx, 0), b = TableArg(ctx, 1);
      a->store().Swap(&b->store());
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableSwap").Device(tensorflow::DEVICE_CPU), TableSwapOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableSwap", TableSwapOp, "handle", "other");

REGISTER_OP("Sok>TableStep")
    .Input("handle: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

class TableStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      Tensor* step;
      Check(ctx->allocate_output(0, TensorShape({}), &step));
      step->scalar<int64_t>()() = TableArg(ctx, 0)->step;
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableStep").Device(tensorflow::DEVICE_CPU), TableStepOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableStep", TableStepOp, "handle", "step");

REGISTER_OP("Sok>TableSetStep")
    .Input("handle: resource")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      return c->WithRank(c->input(1), 0, &unused);
    });

class TableSetStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      CheckRank(ctx->input(1), 0, "step");
      TableArg(ctx, 0)->step = ctx->input(1).scalar<int64_t>()();
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableSetStep").Device(tensorflow::DEVICE_CPU), TableSetStepOp);
SOK_HOST_MEMORY_KERNEL("Sok>TableSetStep", TableSetStepOp, "handle", "step");

REGISTER_OP("Sok>TablesCountStep")
    .Input("handles: M * resource")
    .Attr("M: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); });

class TablesCountStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      for (int t = 0; t < ctx->num_inputs(); ++t) ++TableArg(ctx, t)->step;
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TablesCountStep").Device(tensorflow::DEVICE_CPU), TablesCountStepOp);
SOK_HOST_MEMORY_KERNEL("Sok>TablesCountStep", TablesCountStepOp, "handles");

}  // namespace
}  // namespace sok
