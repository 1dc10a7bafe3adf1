// Distinct values with inverse and counts, as tf.unique_with_counts; without counts the third output is empty.
#include "op.h"
#include "output_pool.h"
#include "sok/unique.h"

namespace sok {
namespace {

REGISTER_OP("Sok>Unique")
    .Input("x: T")
    .Output("y: T")
    .Output("idx: out_idx")
    .Output("counts: out_idx")
    .Attr("T: " SOK_KEY_TYPES)
    .Attr("out_idx: {int32, int64} = DT_INT32")
    .Attr("with_counts: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &x));
      bool with_counts;
      TF_RETURN_IF_ERROR(c->GetAttr("with_counts", &with_counts));
      const DimensionHandle distinct = c->UnknownDim();
      c->set_output(0, c->Vector(distinct));
      c->set_output(1, x);
      c->set_output(2, c->Vector(with_counts ? distinct : c->MakeDim(0)));
      return absl::OkStatus();
    });

void StoreNumbers(const uint32_t* from, int64_t n, Tensor* to) {
  if (to->dtype() == tensorflow::DT_INT32) {
    std::copy(from, from + n, to->flat<int32_t>().data());
  } else {
    std::copy(from, from + n, to->flat<int64_t>().data());
  }
}

class UniqueOp : public GuardedOp {
 public:
  explicit UniqueOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("with_counts", &with_counts_)); }

  void Run(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    CheckRank(x, 1, "x");
    const int64_t n = x.NumElements();
    if (n > INT32_MAX && ctx->expected_output_dtype(1) == tensorflow::DT_INT32) {
      throw InvalidArgument("`x` has " + std::to_string(n) + " elements: use out_idx=int64.");
    }
    const TfExecutor executor(ctx);
    const ScratchLease lease;
    Scratch* scratch = lease.get();
    uint64_t* distinct = scratch->Get<uint64_t>(n);
    uint32_t* counts = with_counts_ ? scratch->Get<uint32_t>(n) : nullptr;
    Tensor* idx = AllocateOutput(ctx, 1, CheckedShape({n}));
    // int32 numbers are written where they are wanted.
    const bool in_place = idx->dtype() == tensorflow::DT_INT32;
    uint32_t* inverse = in_place ? reinterpret_cast<uint32_t*>(idx->flat<int32_t>().data()) : scratch->Get<uint32_t>(n);
    const int64_t found = Unique({executor}, scratch, KeyWords(x, scratch), n, distinct, inverse, counts);
    Tensor* y = AllocateOutput(ctx, 0, CheckedShape({found}));
    Tensor* count = AllocateOutput(ctx, 2, CheckedShape({with_counts_ ? found : 0}));
    StoreKeys(distinct, found, y);
    if (!in_place) StoreNumbers(inverse, n, idx);
    if (with_counts_) StoreNumbers(counts, found, count);
  }

 private:
  bool with_counts_ = true;
};
SOK_CPU_KERNEL("Sok>Unique", UniqueOp);

}  // namespace
}  // namespace sok
