// What every op file begins with: TensorFlow's names, our bridges, and attributes that several ops share.
#pragma once

#include <string>

#include "guard.h"
#include "kernel.h"
#include "scratch_tf.h"
#include "sok/combine.h"
#include "tensor_args.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::core::RefCountPtr;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

#define SOK_KEY_TYPES "{int64, int32, uint32, uint64}"
#define SOK_COMBINERS "{'sum', 'mean', 'sqrtn'}"

using tensorflow::shape_inference::NoOutputs;
using tensorflow::shape_inference::ScalarShape;

// Output `index` of the op, not yet written.
inline Tensor* Output(OpKernelContext* ctx, int index, const TensorShape& shape) {
  Tensor* output = nullptr;
  Check(ctx->allocate_output(index, shape, &output));
  return output;
}

template <class T>
T& ScalarOutput(OpKernelContext* ctx, int index) {
  return Output(ctx, index, TensorShape({}))->scalar<T>()();
}

// An op whose work may throw.
class GuardedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) final {
    Guard(ctx, [&] { Run(ctx); });
  }
  // TensorFlow takes kernels of GPUs for ones that only start something, and runs them one after the other on the thread
  // that starts all else. Ours may work on the host, or wait for the device. How long each takes it measures by itself.
  bool IsExpensive() final { return true; }

 private:
  virtual void Run(OpKernelContext* ctx) = 0;
};

// An op without attributes: a function of its inputs.
template <void (*kRun)(OpKernelContext*)>
class FunctionOp final : public GuardedOp {
 public:
  using GuardedOp::GuardedOp;

 private:
  void Run(OpKernelContext* ctx) override { kRun(ctx); }
};

// An op with the attribute `combiner`.
class CombinerOp : public GuardedOp {
 public:
  explicit CombinerOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string combiner;
    Check(ctx->GetAttr("combiner", &combiner));
    combiner_ = ParseCombiner(combiner);
  }

 protected:
  Combiner combiner_ = Combiner::kSum;
};

}  // namespace sok
