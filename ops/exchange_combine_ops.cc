// Rows that came home, pooled or as they are, and the gradients on their way back (docs/design/exchange.md).
#include <algorithm>
#include <vector>

#include "exchange_pool.h"
#include "shapes.h"

namespace sok {
namespace {

using tensorflow::OpInputList;

// The features, and that what their tensors hold makes sense for answers of `size` floats.
class CpuPoolOp : public PoolOp {
 public:
  using PoolOp::PoolOp;

 protected:
  std::vector<PooledFeature> CheckedFeatures(OpKernelContext* ctx, int64_t size) const {
    OpInputList row_splits;
    Check(ctx->input_list("row_splits", &row_splits));
    const std::vector<PooledFeature> features = Features(ctx);
    for (size_t f = 0; f < features.size(); ++f) {
      if (features[f].row_splits != nullptr) CheckRowSplits(row_splits[static_cast<int>(f)], features[f].n);
      if (!PlacesFit(features[f], size)) throw InvalidArgument("`index` must lie inside the answers.");
    }
    return features;
  }
};

#define SOK_POOL_ATTRS Attr("F: int >= 1").Attr("combiners: list(" SOK_POOLERS ")").Attr("dims: list(int)")

// What came home, and how much of each rank, once it is known to be rows. Where the tensors are: on the host that costs a GPU nothing.
REGISTER_OP("Sok>ExchangeCheck")
    .Input("answers: float")
    .Input("splits: int32")
    .Input("asked: int32")
    .Output("checked_answers: float")
    .Output("checked_splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 2; ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    });

void CheckAnswersOnHost(OpKernelContext* ctx) {
  const Tensor& answers = ctx->input(0);
  CheckRank(answers, 1, "answers");
  const float* floats = answers.flat<float>().data();
  const std::vector<int64_t> begin = AnswerBegins(ctx->input(1), ctx->input(2), answers.NumElements());
  std::vector<float> headers;
  for (size_t r = 0; r + 1 < begin.size(); ++r) headers.insert(headers.end(), floats + begin[r], floats + begin[r] + 2);
  CheckAnswers(begin, ctx->input(2), headers.data(),
               [&](int64_t at, int64_t n) { return std::vector<float>(floats + at, floats + at + n); });
  ctx->set_output(0, answers);
  ctx->set_output(1, ctx->input(1));
}
SOK_CPU_KERNEL("Sok>ExchangeCheck", FunctionOp<CheckAnswersOnHost>);

REGISTER_OP("Sok>ExchangeCombine")
    .Input("answers: float")
    .Input("splits: int32")  // for the gradient: of each rank how many floats
    .Input("index: F * int32")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
    .Input("scales: F * float")
    .Output("outputs: F * float")
    .SOK_POOL_ATTRS.SetShapeFn([](InferenceContext* c) {
      int64_t features;
      std::vector<int64_t> dims;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(c->GetAttr("F", &features));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      if (static_cast<int64_t>(dims.size()) != features || static_cast<int64_t>(combiners.size()) != features) {
        return absl::InvalidArgumentError("`dims` and `combiners` must have one value per feature.");
      }
      for (int f = 0; f < features; ++f) {
        ShapeHandle index, splits;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 + f), 1, &index));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 + static_cast<int>(features) + f), 1, &splits));
        DimensionHandle segments = c->Dim(index, 0);
        if (combiners[f] != "rows") TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &segments));
        c->set_output(f, c->Matrix(segments, dims[f]));
      }
      return absl::OkStatus();
    });

class ExchangeCombineOp : public CpuPoolOp {
 public:
  using CpuPoolOp::CpuPoolOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor& answers = ctx->input(0);
    CheckRank(answers, 1, "answers");
    const int64_t size = answers.NumElements();
    const float* floats = answers.flat<float>().data();
    const ProfileSpan span("combine", name(), {-1, -1, size * int64_t{sizeof(float)}}, "op");
    const std::vector<PooledFeature> features = CheckedFeatures(ctx, size);
    std::vector<Wanted> wanted;
    for (const PooledFeature& f : features) wanted.push_back({tensorflow::DT_FLOAT, CheckedShape({f.segments, f.dim})});
    std::vector<Tensor> tensors = AllocateTogether(ctx, wanted);
    std::vector<float*> outputs;
    for (size_t f = 0; f < features.size(); ++f) {
      outputs.push_back(tensors[f].flat<float>().data());
      ctx->set_output(static_cast<int>(f), tensors[f]);
    }
    const TfExecutor executor(ctx);
    CombineAnswers({executor}, floats, features.data(), static_cast<int>(features.size()), outputs.data());
  }
};
SOK_CPU_KERNEL("Sok>ExchangeCombine", ExchangeCombineOp);

REGISTER_OP("Sok>ExchangeCombineGrad")
    .Input("grads: F * float")
    .Input("splits: int32")
    .Input("index: F * int32")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
    .Input("scales: F * float")
    .Output("packed: float")
    .SOK_POOL_ATTRS.SetShapeFn(VectorShape);

class ExchangeCombineGradOp : public CpuPoolOp {
 public:
  using CpuPoolOp::CpuPoolOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor& splits = ctx->input(num_features());
    const int64_t size = AnswerFloats(splits);
    const ProfileSpan span("backward", name(), {-1, -1, size * int64_t{sizeof(float)}}, "op");
    const std::vector<PooledFeature> features = CheckedFeatures(ctx, size);
    const std::vector<const float*> grads = Grads(ctx, features);
    Tensor packed = AllocateToSend(ctx, tensorflow::DT_FLOAT, CheckedShape({size}));
    float* out = packed.flat<float>().data();
    int64_t at = 0;
    for (int64_t r = 0; r < splits.NumElements(); ++r) {
      std::fill_n(out + at, kAnswerHeader, 0.0f);
      at += splits.flat<int32_t>()(r);
    }
    const TfExecutor executor(ctx);
    CombineAnswersGrad({executor}, features.data(), num_features(), grads.data(), size, out);
    ctx->set_output(0, packed);
  }
};
SOK_CPU_KERNEL("Sok>ExchangeCombineGrad", ExchangeCombineGradOp);

REGISTER_OP("Sok>ExchangeCombineGradWeights")
    .Input("grad: float")
    .Input("answers: float")
    .Input("index: F * int32")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
    .Input("scales: F * float")
    .Output("grad_weights: float")
    .SOK_POOL_ATTRS.SetShapeFn([](InferenceContext* c) {
      int64_t features;
      TF_RETURN_IF_ERROR(c->GetAttr("F", &features));
      c->set_output(0, c->input(2 + 2 * static_cast<int>(features)));
      return absl::OkStatus();
    });

class ExchangeCombineGradWeightsOp : public CpuPoolOp {
 public:
  using CpuPoolOp::CpuPoolOp;
  void Run(OpKernelContext* ctx) override {
    if (dims_.size() != 1) throw InvalidArgument("gradients in weights are those of one feature.");
    const Tensor &grad = ctx->input(0), &answers = ctx->input(1);
    CheckRank(answers, 1, "answers");
    const PooledFeature feature = CheckedFeatures(ctx, answers.NumElements())[0];
    CheckShape(grad, {feature.segments, feature.dim}, "grad");
    Tensor* out = Output(ctx, 0, ctx->input(4).shape());
    if (out->NumElements() == 0) return;  // no weights, or no keys
    const TfExecutor executor(ctx);
    CombineAnswersGradWeights({executor}, answers.flat<float>().data(), feature, grad.flat<float>().data(),
                              out->flat<float>().data());
  }
};
SOK_CPU_KERNEL("Sok>ExchangeCombineGradWeights", ExchangeCombineGradWeightsOp);

}  // namespace
}  // namespace sok
