// Answers and gradients in 16 bit while they travel (docs/design/exchange.md).
#include "exchange_wire.h"

#include "shapes.h"

namespace sok {
namespace {

REGISTER_OP("Sok>ExchangeNarrow")
    .Input("floats: float")
    .Input("splits: int32")
    .Output("words: float")
    .Output("word_splits: int32")
    .Attr("type: {'float16', 'bfloat16'}")
    .SetShapeFn(MessagesShape);

class ExchangeNarrowOp : public WireOp {
 public:
  using WireOp::WireOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor& floats = ctx->input(0);
    const ProfileSpan span("narrow", name(), {-1, -1, static_cast<int64_t>(floats.TotalBytes())}, "op");
    const Begins begins = OfFloats(floats, ctx->input(1));
    float* words = AllocateOutput(ctx, 0, CheckedShape({begins.words.back()}))->flat<float>().data();
    OutputSplits(ctx, begins.words);
    const TfExecutor executor(ctx);
    NarrowMessages(Cpu{executor}, begins.layout(), type_, floats.flat<float>().data(), words);
  }
};
SOK_CPU_KERNEL("Sok>ExchangeNarrow", ExchangeNarrowOp);

REGISTER_OP("Sok>ExchangeWiden")
    .Input("words: float")
    .Input("splits: int32")
    .Input("expected: int32")
    .Output("floats: float")
    .Output("float_splits: int32")
    .Attr("type: {'float16', 'bfloat16'}")
    .SetShapeFn(MessagesShape);

class ExchangeWidenOp : public WireOp {
 public:
  using WireOp::WireOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor& words = ctx->input(0);
    const ProfileSpan span("widen", name(), {-1, -1, static_cast<int64_t>(words.TotalBytes())}, "op");
    const Begins begins = OfWords(words, ctx->input(1), ctx->input(2));
    float* floats = AllocateOutput(ctx, 0, CheckedShape({begins.floats.back()}))->flat<float>().data();
    OutputSplits(ctx, begins.floats);
    const TfExecutor executor(ctx);
    WidenMessages(Cpu{executor}, begins.layout(), type_, words.flat<float>().data(), floats);
  }
};
SOK_CPU_KERNEL("Sok>ExchangeWiden", ExchangeWidenOp);

}  // namespace
}  // namespace sok
