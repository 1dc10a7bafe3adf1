// Keys to rows, and keys to pooled vectors, in one table on one rank.
#include "op.h"
#include "output_pool.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {
namespace {

REGISTER_OP("Sok>TableLookup")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("insert: bool")
    .Output("rows: float")
    .Output("row_ids: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      ShapeHandle unused, rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
      TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(dim), &rows));
      c->set_output(0, rows);
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

class TableLookupOp : public GuardedOp {
 public:
  explicit TableLookupOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("dim", &dim_)); }

  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    const Tensor& keys = ctx->input(1);
    resource->CheckKeyType(keys);
    resource->CheckDim(dim_);
    const bool insert = ScalarArg<bool>(ctx->input(2), "insert");
    TensorShape shape = keys.shape();
    shape.AddDim(dim_);
    Tensor* rows = AllocateOutput(ctx, 0, shape);
    Tensor* row_ids = AllocateOutput(ctx, 1, keys.shape());
    const ProfileSpan span("find", resource->config().name,
                           {keys.NumElements(), keys.NumElements(), static_cast<int64_t>(rows->TotalBytes())});
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    resource->table().Lookup({executor}, scratch.get(), KeyWords(keys, scratch.get()), keys.NumElements(), insert,
                             nullptr, rows->flat<float>().data(),
                             reinterpret_cast<int64_t*>(row_ids->flat<int64_t>().data()));
    if (insert) resource->ids += keys.NumElements();
  }

 private:
  int64_t dim_;
};
SOK_CPU_KERNEL("Sok>TableLookup", TableLookupOp);

}  // namespace
}  // namespace sok
