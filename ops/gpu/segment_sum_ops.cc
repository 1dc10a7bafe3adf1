// Grouped sum on a GPU. An id >= num_segments is left out, as tf.math.unsorted_segment_sum does there: to raise would take
// a wait for the stream.
#include "sok/segment_sum.h"

#include <type_traits>

#include "../segment_sum_op.h"
#include "gpu_op.h"

namespace sok {
namespace {

template <class T>
class GpuUnsortedSegmentSumOp final : public GuardedOp {
 public:
  using GuardedOp::GuardedOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &data = ctx->input(0), &ids = ctx->input(1), &num = ctx->input(2);
    const int64_t segments = num.dtype() == tensorflow::DT_INT32 ? ScalarArg<int32_t>(num, "num_segments")
                                                                 : ScalarArg<int64_t>(num, "num_segments");
    int64_t dim;
    Tensor* out = Output(ctx, 0, SegmentSumShape(data, ids, segments, &dim));
    const Cuda cuda = CudaOf(ctx);
    TfDeviceScratch scratch(ctx);
    auto sum = [&](const auto* of_ids) {
      Sum(cuda, &scratch, data.flat<T>().data(), of_ids, ids.NumElements(), dim, segments, out->flat<T>().data());
    };
    if (ids.dtype() == tensorflow::DT_INT32) return sum(ids.flat<int32_t>().data());
    sum(Int64(ids));
  }

 private:
  template <class U, class Id>
  static void Sum(const Cuda& cuda, DeviceScratch* scratch, const U* data, const Id* ids, int64_t n, int64_t dim,
                  int64_t segments, U* out) {
    if constexpr (std::is_same_v<U, double>) {
      UnsortedSegmentSum(cuda, scratch, data, ids, n, dim, segments, out, nullptr);
    } else if constexpr (std::is_same_v<U, float>) {
      UnsortedSegmentSum(cuda, scratch, data, FloatType::kFloat32, ids, n, dim, segments, SumOrder::kFixed, out,
                         nullptr);
    } else {
      // Summed in float32 and rounded once.
      const FloatType type = std::is_same_v<U, Eigen::half> ? FloatType::kFloat16 : FloatType::kBFloat16;
      auto* sums = scratch->Get<float>(segments * dim);
      UnsortedSegmentSum(cuda, scratch, data, type, ids, n, dim, segments, SumOrder::kFixed, sums, nullptr);
      RoundFloats(cuda, sums, segments * dim, type, out);
    }
  }
};

#define SOK_REGISTER(T)                                                                            \
  SOK_GPU_KERNEL(Name("Sok>UnsortedSegmentSum").TypeConstraint<T>("T").HostMemory("num_segments"), \
                 GpuUnsortedSegmentSumOp<T>)
SOK_REGISTER(float);
SOK_REGISTER(double);
SOK_REGISTER(Eigen::half);
SOK_REGISTER(tensorflow::bfloat16);
#undef SOK_REGISTER

}  // namespace
}  // namespace sok
