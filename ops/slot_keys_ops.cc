// Keys of features that share a table without sharing rows.
#include <algorithm>

#include "input_limits.h"
#include "op.h"

namespace sok {
namespace {

REGISTER_OP("Sok>SlotKeys")
    .Input("keys: Tkey")
    .Input("row_splits: int64")
    .Output("slot_keys: Tkey")
    .Output("ok: bool")
    .Output("detail: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("slot_num: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      c->set_output(1, c->Scalar());
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    });

template <typename T>
class SlotKeysOp : public GuardedOp {
 public:
  explicit SlotKeysOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("slot_num", &slot_num_)); }

  void Run(OpKernelContext* ctx) override {
    const Tensor& keys = ctx->input(0);
    CheckRank(keys, 1, "keys");
    const int64_t n = keys.NumElements();
    Tensor* out = Output(ctx, 0, keys.shape());
    const T* from = keys.flat<T>().data();
    T* to = out->flat<T>().data();
    int64_t bad = -1;
    // Splits that make no sense, or a report, are for the lookup to judge: it does not read the keys then.
    const Tensor& splits = ctx->input(1);
    CheckRank(splits, 1, "row_splits");
    const int64_t* begin = splits.flat<int64_t>().data();
    const int64_t segments = std::max<int64_t>(splits.NumElements() - 1, 0);
    int64_t i = 0;
    for (int64_t s = 0, slot = 0; s < segments; ++s, slot = slot + 1 == slot_num_ ? 0 : slot + 1) {
      const int64_t end = std::min(begin[s + 1], n);
      for (; i < end; ++i) {
        const bool overflows =
            __builtin_mul_overflow(from[i], slot_num_, &to[i]) || __builtin_add_overflow(to[i], slot, &to[i]);
        if (overflows && bad < 0) bad = i;
      }
    }
    std::copy(from + i, from + n, to + i);
    ScalarOutput<bool>(ctx, 1) = bad < 0;
    ScalarOutput<int64_t>(ctx, 2) = bad < 0 ? 0 : static_cast<int64_t>(from[bad]);
  }

 private:
  int64_t slot_num_ = 1;
};

#define SOK_SLOT_KEYS(T) \
  SOK_KERNEL(Name("Sok>SlotKeys").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("Tkey"), SlotKeysOp<T>)
SOK_SLOT_KEYS(int64_t);
SOK_SLOT_KEYS(int32_t);
SOK_SLOT_KEYS(uint32_t);
SOK_SLOT_KEYS(uint64_t);
#undef SOK_SLOT_KEYS

}  // namespace
}  // namespace sok
