// What is wrong with an input: reports in place of row splits, and the judge of one rank.
#include <string>

#include "input_limits.h"
#include "op.h"
#include "shapes.h"
#include "validate_csr_op.h"

namespace sok {
namespace {

REGISTER_OP("Sok>CheckInput")
    .Input("row_splits: int64")
    .Input("ok: bool")
    .Input("detail: int64")
    .Output("checked_splits: int64")
    .Attr("problem: {'rows_not_whole', 'wrong_slot_num', 'uneven', 'weights_differ', 'slot_key_too_large'}")
    .SetShapeFn(ShapeOfInput<0>);  // splits, or a report of two numbers: but whatever follows a report is never run

class CheckInputOp : public GuardedOp {
 public:
  explicit CheckInputOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string problem;
    Check(ctx->GetAttr("problem", &problem));
    status_ = problem == "rows_not_whole"   ? kRowsNotWhole
              : problem == "wrong_slot_num" ? kWrongSlotNum
              : problem == "uneven"         ? kUneven
              : problem == "weights_differ" ? kWeightsDiffer
                                            : kSlotKeyTooLarge;
  }
  void Run(OpKernelContext* ctx) override {
    const Tensor& row_splits = ctx->input(0);
    const bool ok = ScalarArg<bool>(ctx->input(1), "ok");
    if (ok || IsReport(row_splits)) return ctx->set_output(0, row_splits);
    WriteReport(ctx, 0, {status_, ScalarArg<int64_t>(ctx->input(2), "detail")});
  }

 private:
  KeyStatus status_;
};
SOK_HOST_KERNEL("Sok>CheckInput", CheckInputOp, "row_splits", "ok", "detail", "checked_splits");

// Tensors of the host where the op is placed. On a GPU by one copy, however many there are (ops/gpu/input_ops.cc).
REGISTER_OP("Sok>ToDevice")
    .Input("values: T")
    .Output("there: T")
    .Attr("T: list({int64, int32, uint32, uint64, float}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_inputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    });

void PassOn(OpKernelContext* ctx) {
  for (int i = 0; i < ctx->num_inputs(); ++i) ctx->set_output(i, ctx->input(i));
}
SOK_CPU_KERNEL("Sok>ToDevice", FunctionOp<PassOn>);

REGISTER_OP("Sok>ValidateCsr")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("row_splits: int64")
    .Output("checked_keys: Tkey")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("slot_num: int >= 1 = 1")
    .Attr("max_nnz: int >= 0 = 0")
    .Attr("max_feature_num: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(ShapeOfInput<1>);

class HostValidateCsrOp final : public ValidateCsrOp {
 public:
  using ValidateCsrOp::ValidateCsrOp;

 private:
  InputStatus InspectKeys(const TableConfig& table, const Tensor& keys) const override {
    if (table.hashed) return {kFine, 0};
    const ScratchLease scratch;
    const uint64_t* words = KeyWords(keys, scratch.get());
    for (int64_t i = 0; i < keys.NumElements(); ++i)
      if (!table.IsLegal(words[i])) return {kKeyOutOfRange, static_cast<int64_t>(words[i])};
    return {kFine, 0};
  }
};
SOK_CPU_KERNEL("Sok>ValidateCsr", HostValidateCsrOp);

}  // namespace
}  // namespace sok
