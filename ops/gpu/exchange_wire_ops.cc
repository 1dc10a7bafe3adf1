// Answers and gradients in 16 bit while they travel, on a GPU. Nothing waits for the stream.
#include "../exchange_wire.h"
#include "gpu_op.h"

namespace sok {
namespace {

class GpuExchangeNarrowOp final : public WireOp {
 public:
  using WireOp::WireOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor& floats = ctx->input(0);
    const Begins begins = OfFloats(floats, ctx->input(1));
    float* words = Output(ctx, 0, CheckedShape({begins.words.back()}))->flat<float>().data();
    OutputSplits(ctx, begins.words);
    TfDeviceScratch scratch(ctx);
    NarrowMessages(CudaOf(ctx), &scratch, begins.layout(), type_, floats.flat<float>().data(), words);
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeNarrow").HostMemory("splits").HostMemory("word_splits"), GpuExchangeNarrowOp);

class GpuExchangeWidenOp final : public WireOp {
 public:
  using WireOp::WireOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor& words = ctx->input(0);
    const Begins begins = OfWords(words, ctx->input(1), ctx->input(2));
    float* floats = Output(ctx, 0, CheckedShape({begins.floats.back()}))->flat<float>().data();
    OutputSplits(ctx, begins.floats);
    TfDeviceScratch scratch(ctx);
    WidenMessages(CudaOf(ctx), &scratch, begins.layout(), type_, words.flat<float>().data(), floats);
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeWiden").HostMemory("splits").HostMemory("expected").HostMemory("float_splits"),
               GpuExchangeWidenOp);

}  // namespace
}  // namespace sok
