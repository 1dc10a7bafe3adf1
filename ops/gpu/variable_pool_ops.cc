// Many plain TensorFlow variables on a GPU at once: pooled where they lie, and the sums of what comes back.
#include <algorithm>
#include <string>
#include <vector>

#include "../variable_pool_op.h"
#include "gpu_op.h"
#include "segments_arg.h"
#include "sok/check_ids.h"
#include "sok/sum_rows.h"

namespace sok {
namespace {

// What a device holds, in host memory. Waits for the stream.
Tensor OnHost(const Cuda& cuda, const Tensor& tensor) {
  Tensor copy(tensor.dtype(), tensor.shape());
  CopyToHost(cuda, copy.data(), tensor.data(), static_cast<int64_t>(tensor.TotalBytes()));
  return copy;
}

void CheckOnDevice(const Cuda& cuda, const Tensor& ids, int64_t num_rows, const Tensor& row_splits,
                   uint64_t* first_bad) {
  CheckIds(cuda, Int64(ids), ids.NumElements(), num_rows, Int64(row_splits), row_splits.NumElements(), first_bad);
}

class GpuPoolAttributesOp : public PoolAttributesOp {
 public:
  using PoolAttributesOp::PoolAttributesOp;

 protected:
  int64_t DimOf(int f) const { return of_->dims[static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)])]; }

  // The segments of feature f: those of its splits, or one for each id.
  DeviceSegments SegmentsOf(int f, const Tensor& ids, const Tensor& row_splits) const {
    return Labelled([&] { return of_->Label(of_->variable_of[static_cast<size_t>(f)]); },
                    [&] {
                      CheckRank(ids, 1, "ids");
                      CheckRank(row_splits, 1, "row_splits");
                      if (of_->is_pooled[static_cast<size_t>(f)]) return SegmentsArg(row_splits, ids.NumElements());
                      DeviceSegments one_each;
                      one_each.segments = one_each.n = ids.NumElements();
                      return one_each;
                    });
  }
};

// Nothing waits for the stream, so nothing is raised about values: an id that is no row reads as zeros, and so does a segment
// whose splits make no sense. The gradient raises, which waits anyway.
template <bool kByHandle>
class GpuPoolOp final : public GpuPoolAttributesOp {
 public:
  using GpuPoolAttributesOp::GpuPoolAttributesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = of_->num_variables(), n = of_->num_features();
    std::vector<RefCountPtr<tensorflow::Var>> variables;
    if (kByHandle) variables = VariablesOf(ctx, *of_);
    // Until the work is on the stream: a writer's comes behind it there.
    const SharedLocks locks(variables);
    std::vector<const float*> rows;
    for (int v = 0; v < m; ++v)
      rows.push_back(RowsOf(*of_, v, kByHandle ? *variables[static_cast<size_t>(v)]->tensor() : ctx->input(v)));
    std::vector<DeviceFeature> features;
    for (int f = 0; f < n; ++f) {
      const size_t variable = static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)]);
      const Tensor& ids = ctx->input(m + f);
      DeviceFeature feature;
      feature.dim = of_->dims[variable];
      feature.rows = MatrixRows(rows[variable], feature.dim);
      feature.num_rows = of_->num_rows[variable];
      feature.segments = SegmentsOf(f, ids, ctx->input(m + n + f));
      feature.index = Int64(ids);
      feature.combiner = of_->combiners[static_cast<size_t>(f)];
      feature.output = Output(ctx, f, CheckedShape({feature.segments.segments, feature.dim}))->data();
      feature.output_stride = feature.dim;
      if (feature.dim > 0) features.push_back(feature);
    }
    TfDeviceScratch scratch(ctx);
    CombineGroup(CudaOf(ctx), &scratch, features.data(), static_cast<int64_t>(features.size()), FloatType::kFloat32,
                 nullptr);
  }
};
SOK_GPU_KERNEL(Name("Sok>VariablePool").HostMemory("handles"), GpuPoolOp<true>);
SOK_GPU_KERNEL(Name("Sok>TensorPool"), GpuPoolOp<false>);

// Waits for the stream once, to learn how many rows each variable's gradient has, and whether the input was fine.
class GpuVariablePoolGradOp final : public GpuPoolAttributesOp {
 public:
  using GpuPoolAttributesOp::GpuPoolAttributesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = of_->num_variables(), n = of_->num_features();
    const Cuda cuda = CudaOf(ctx);
    TfDeviceScratch scratch(ctx);
    auto* words = scratch.Get<uint64_t>(m + n);  // counts, then what is bad
    auto* num_sums = reinterpret_cast<int64_t*>(words);
    SetOnDevice(cuda, words, 0xFF, (m + n) * int64_t{sizeof(uint64_t)});
    std::vector<std::vector<DeviceAddends>> addends(static_cast<size_t>(m));
    for (int f = 0; f < n; ++f) {
      const size_t variable = static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)]);
      const Tensor &grad = ctx->input(f), &ids = ctx->input(n + f), &row_splits = ctx->input(2 * n + f);
      DeviceAddends a;
      a.segments = SegmentsOf(f, ids, row_splits);
      CheckShape(grad, {a.segments.segments, DimOf(f)}, "grads");
      a.row_ids = Int64(ids);
      a.values = grad.data();
      a.values_stride = DimOf(f);
      a.combiner = of_->combiners[static_cast<size_t>(f)];
      addends[variable].push_back(a);
      CheckOnDevice(cuda, ids, of_->num_rows[variable], row_splits, words + m + f);
    }
    std::vector<Tensor> ids(static_cast<size_t>(m)), sums(static_cast<size_t>(m));
    for (size_t v = 0; v < addends.size(); ++v) {
      int64_t most = 0;
      for (const DeviceAddends& a : addends[v]) most += a.segments.n;
      Check(ctx->allocate_temp(tensorflow::DT_INT64, CheckedShape({most}), &ids[v]));
      Check(ctx->allocate_temp(tensorflow::DT_FLOAT, CheckedShape({most, of_->dims[v]}), &sums[v]));
      SumOf(cuda, &scratch, v, &addends[v], most, &ids[v], &sums[v], num_sums + v);
    }
    std::vector<uint64_t> found(static_cast<size_t>(m + n));
    CopyToHost(cuda, found.data(), words, (m + n) * int64_t{sizeof(uint64_t)});
    for (int f = 0; f < n; ++f) {
      if (found[static_cast<size_t>(m + f)] == kNothingBad) continue;
      // As on the CPU, which finds the same.
      ReadPoolInput(*of_, f, OnHost(cuda, ctx->input(n + f)), OnHost(cuda, ctx->input(2 * n + f)));
    }
    for (int v = 0; v < m; ++v) {
      const int64_t count = static_cast<int64_t>(found[static_cast<size_t>(v)]);
      ctx->set_output(v, ids[static_cast<size_t>(v)].Slice(0, count));
      ctx->set_output(m + v, sums[static_cast<size_t>(v)].Slice(0, count));
    }
  }

 private:
  void SumOf(const Cuda& cuda, DeviceScratch* scratch, size_t v, std::vector<DeviceAddends>* addends, int64_t most,
             Tensor* ids, Tensor* sums, int64_t* num_sums) const {
    int64_t dim = of_->dims[v];
    auto* to = static_cast<float*>(sums->data());
    if (dim == 0) {
      // A variable without columns still has rows that were read: sums of nothing, one wide, which nobody sees.
      dim = 1;
      to = scratch->Get<float>(most);
      auto* zero = scratch->Get<float>(1);
      ZeroOnDevice(cuda, zero, sizeof(float));
      for (DeviceAddends& a : *addends) a.values = zero;
    }
    SumRows(cuda, scratch, addends->data(), static_cast<int64_t>(addends->size()), &of_->num_rows[v], 1, dim,
            FloatType::kFloat32, static_cast<int64_t*>(ids->data()), nullptr, to, num_sums, nullptr);
  }
};
SOK_GPU_KERNEL(Name("Sok>VariablePoolGrad"), GpuVariablePoolGradOp);

// Waits for the stream: it is there to raise, and the stock ops that it stands before ask for sizes anyway.
class GpuCheckIdsOp final : public GuardedOp {
 public:
  explicit GpuCheckIdsOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("variable", &variable_));
    Check(ctx->GetAttr("num_rows", &num_rows_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor &ids = ctx->input(0), &row_splits = ctx->input(1);
    const Cuda cuda = CudaOf(ctx);
    Labelled([&] { return "variable '" + variable_ + "'"; },
             [&] {
               CheckRank(ids, 1, "ids");
               CheckRank(row_splits, 1, "row_splits");
               TfDeviceScratch scratch(ctx);
               auto* first_bad = scratch.Get<uint64_t>(1);
               SetOnDevice(cuda, first_bad, 0xFF, sizeof(uint64_t));
               CheckOnDevice(cuda, ids, num_rows_, row_splits, first_bad);
               uint64_t found;
               CopyToHost(cuda, &found, first_bad, sizeof(found));
               if (found != kNothingBad) CheckPoolInput(num_rows_, OnHost(cuda, ids), OnHost(cuda, row_splits));
               return 0;
             });
    ctx->set_output(0, ids);
  }

 private:
  std::string variable_;
  int64_t num_rows_;
};
SOK_GPU_KERNEL(Name("Sok>CheckIds"), GpuCheckIdsOp);

}  // namespace
}  // namespace sok
