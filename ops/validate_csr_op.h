// Is this rank's input of one table what it should be? Row splits are in the host's memory; where the keys are is up to the
// device's kernel.
#pragma once

#include "input_limits.h"
#include "op.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {

class ValidateCsrOp : public GuardedOp {
 public:
  explicit ValidateCsrOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("slot_num", &limits_.slot_num));
    Check(ctx->GetAttr("max_nnz", &limits_.max_nnz));
    Check(ctx->GetAttr("max_feature_num", &limits_.max_feature_num));
  }

  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    const Tensor& keys = ctx->input(1);
    resource->CheckKeyType(keys);
    CheckRank(keys, 1, "keys");
    const TableConfig& table = resource->config();
    const int64_t n = keys.NumElements();
    const ProfileSpan span("route", table.name, {n});
    const Splits row_splits = Labelled([&] { return table.Label(); }, [&] { return ReadSplits(ctx->input(2), n); });
    InputStatus status = row_splits.status;
    if (status.status == kFine) status = InspectKeys(table, keys);
    if (status.status == kFine) status = limits_.Inspect(row_splits);
    if (status.status != kFine) limits_.Raise(table, table.rank, status);
    ctx->set_output(0, keys);
  }

 private:
  virtual InputStatus InspectKeys(const TableConfig& table, const Tensor& keys) const = 0;

  InputLimits limits_;
};

}  // namespace sok
