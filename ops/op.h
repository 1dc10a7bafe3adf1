// What every op file begins with: TensorFlow's names, our bridges, and attributes that several ops share.
#pragma once

#include <string>

#include "guard.h"
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

// An op with the attribute `combiner`.
class CombinerOp : public OpKernel {
 public:
  explicit CombinerOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      std::string combiner;
      Check(ctx->GetAttr("combiner", &combiner));
      combiner_ = ParseCombiner(combiner);
    });
  }

 protected:
  Combiner combiner_ = Combiner::kSum;
};

}  // namespace sok
