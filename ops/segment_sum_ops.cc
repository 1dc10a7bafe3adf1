// Grouped sum, as tf.math.unsorted_segment_sum.
#include "op.h"
#include "output_pool.h"
#include "segment_sum_op.h"
#include "sok/segment_sum.h"

namespace sok {
namespace {

REGISTER_OP("Sok>UnsortedSegmentSum")
    .Input("data: T")
    .Input("segment_ids: Tindices")
    .Input("num_segments: Tnumsegments")
    .Output("output: T")
    .Attr("T: {float, double, half, bfloat16}")
    .Attr("Tindices: {int32, int64}")
    .Attr("Tnumsegments: {int32, int64} = DT_INT32")
    .SetShapeFn(tensorflow::shape_inference::SegmentReductionWithNumSegmentsShapeFn);

template <class T>
class UnsortedSegmentSumOp : public GuardedOp {
 public:
  using GuardedOp::GuardedOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &data = ctx->input(0), &ids = ctx->input(1), &num = ctx->input(2);
    const int64_t segments = num.dtype() == tensorflow::DT_INT32 ? ScalarArg<int32_t>(num, "num_segments")
                                                                 : ScalarArg<int64_t>(num, "num_segments");
    int64_t dim;
    Tensor* out = AllocateOutput(ctx, 0, SegmentSumShape(data, ids, segments, &dim));
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    auto sum = [&](const auto* of_ids) {
      Sum({executor}, scratch.get(), data.flat<T>().data(), of_ids, ids.NumElements(), dim, segments,
          out->flat<T>().data());
    };
    if (ids.dtype() == tensorflow::DT_INT32) return sum(ids.flat<int32_t>().data());
    sum(Int64(ids));
  }

 private:
  template <class U, class Id>
  static void Sum(const Cpu& cpu, Scratch* scratch, const U* data, const Id* ids, int64_t n, int64_t dim,
                  int64_t segments, U* out) {
    if constexpr (std::is_same_v<U, float> || std::is_same_v<U, double>) {
      UnsortedSegmentSum(cpu, scratch, data, ids, n, dim, segments, out);
    } else {
      // 16-bit sums lose whole addends: widen, sum in float, round once.
      float* wide = scratch->Get<float>(n * dim);
      float* sums = scratch->Get<float>(segments * dim);
      for (int64_t i = 0; i < n * dim; ++i) wide[i] = static_cast<float>(data[i]);
      UnsortedSegmentSum(cpu, scratch, wide, ids, n, dim, segments, sums);
      for (int64_t i = 0; i < segments * dim; ++i) out[i] = static_cast<U>(sums[i]);
    }
  }
};

#define SOK_REGISTER(T)                                                                            \
  SOK_KERNEL(Name("Sok>UnsortedSegmentSum").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), \
             UnsortedSegmentSumOp<T>)
SOK_REGISTER(float);
SOK_REGISTER(double);
SOK_REGISTER(Eigen::half);
SOK_REGISTER(tensorflow::bfloat16);
#undef SOK_REGISTER

}  // namespace
}  // namespace sok
