// Distinct values with inverse and counts, on a GPU.
#include "../op.h"
#include "gpu_op.h"
#include "sok/unique.h"

namespace sok {
namespace {

// Numbers below 2^31 into a tensor of int32 or int64.
void PutNumbers(const Cuda& cuda, const uint32_t* from, int64_t n, Tensor* to) {
  if (to->dtype() == tensorflow::DT_INT64) return WidenNumbers(cuda, from, n, static_cast<int64_t*>(to->data()));
  CopyOnDevice(cuda, to->data(), from, n * int64_t{sizeof(uint32_t)});
}

// Waits for the stream once, to learn how many values there are.
class GpuUniqueOp final : public GuardedOp {
 public:
  explicit GpuUniqueOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("with_counts", &with_counts_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    CheckRank(x, 1, "x");
    const int64_t n = x.NumElements();
    const Cuda cuda = CudaOf(ctx);
    TfDeviceScratch scratch(ctx);
    auto* distinct = scratch.Get<uint64_t>(n);
    auto* inverse = scratch.Get<uint32_t>(n);
    auto* counts = with_counts_ ? scratch.Get<uint32_t>(n) : nullptr;
    const int64_t found = n == 0 ? 0
                                 : UniqueToHost(cuda, &scratch, DeviceKeyWords(cuda, x, &scratch), n,
                                                UniqueOrder::kFirstAppearance, distinct, inverse, counts);
    Tensor* y = Output(ctx, 0, CheckedShape({found}));
    if (tensorflow::DataTypeSize(y->dtype()) == 8) {
      CopyOnDevice(cuda, y->data(), distinct, found * int64_t{sizeof(uint64_t)});
    } else {
      NarrowKeys(cuda, distinct, found, static_cast<uint32_t*>(y->data()));
    }
    PutNumbers(cuda, inverse, n, Output(ctx, 1, CheckedShape({n})));
    Tensor* count = Output(ctx, 2, CheckedShape({with_counts_ ? found : 0}));
    if (with_counts_) PutNumbers(cuda, counts, found, count);
  }

 private:
  bool with_counts_ = true;
};
SOK_GPU_KERNEL(Name("Sok>Unique"), GpuUniqueOp);

}  // namespace
}  // namespace sok
