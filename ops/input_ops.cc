// What is wrong with an input: reports in place of row splits, and the judge of one rank.
#include <string>

#include "input_limits.h"
#include "op.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {
namespace {

REGISTER_OP("Sok>CheckInput")
    .Input("row_splits: int64")
    .Input("ok: bool")
    .Input("detail: int64")
    .Output("checked_splits: int64")
    .Attr("problem: {'rows_not_whole', 'wrong_slot_num', 'uneven', 'weights_differ'}")
    .SetShapeFn([](InferenceContext* c) {
      // Splits, or a report of two numbers: but whatever follows a report is never run.
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

class CheckInputOp : public OpKernel {
 public:
  explicit CheckInputOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string problem;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("problem", &problem));
    status_ = problem == "rows_not_whole"   ? kRowsNotWhole
              : problem == "wrong_slot_num" ? kWrongSlotNum
              : problem == "uneven"         ? kUneven
                                            : kWeightsDiffer;
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor& row_splits = ctx->input(0);
      const bool ok = ScalarArg<bool>(ctx->input(1), "ok");
      if (ok || IsReport(row_splits)) return ctx->set_output(0, row_splits);
      WriteReport(ctx, 0, {status_, ScalarArg<int64_t>(ctx->input(2), "detail")});
    });
  }

 private:
  KeyStatus status_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>CheckInput").Device(tensorflow::DEVICE_CPU), CheckInputOp);

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
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

class ValidateCsrOp : public OpKernel {
 public:
  explicit ValidateCsrOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      Check(ctx->GetAttr("slot_num", &limits_.slot_num));
      Check(ctx->GetAttr("max_nnz", &limits_.max_nnz));
      Check(ctx->GetAttr("max_feature_num", &limits_.max_feature_num));
    });
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const Tensor& keys = ctx->input(1);
      resource->CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      const TableConfig& table = resource->config();
      const int64_t n = keys.NumElements();
      const ProfileSpan span("route", table.name, {n});
      const Splits row_splits = Labelled([&] { return table.Label(); }, [&] { return ReadSplits(ctx->input(2), n); });
      InputStatus status = row_splits.status;
      const ScratchLease scratch;
      const uint64_t* words = table.hashed ? nullptr : KeyWords(keys, scratch.get());
      for (int64_t i = 0; words != nullptr && i < n && status.status == kFine; ++i)
        if (!table.IsLegal(words[i])) status = {kKeyOutOfRange, static_cast<int64_t>(words[i])};
      if (status.status == kFine) status = limits_.Inspect(row_splits);
      if (status.status != kFine) limits_.Raise(table, table.rank, status);
      ctx->set_output(0, keys);
    });
  }

 private:
  InputLimits limits_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ValidateCsr").Device(tensorflow::DEVICE_CPU), ValidateCsrOp);

}  // namespace
}  // namespace sok
