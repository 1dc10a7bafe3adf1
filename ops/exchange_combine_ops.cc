// Rows that came home, pooled or as they are, and the gradients on their way back (docs/design/exchange.md).
#include <algorithm>
#include <string>
#include <vector>

#include "exchange_op.h"

namespace sok {
namespace {

using tensorflow::OpInputList;

// Raises what an owner has said of itself.
void CheckAnswers(const float* answers, int64_t num_floats, const Tensor& splits, const Tensor& asked) {
  const int world = static_cast<int>(asked.NumElements());
  CheckShape(splits, asked.shape(), "splits");
  int64_t at = 0;
  bool all_there = true;
  for (int r = 0; r < world; ++r) {
    const int64_t size = splits.flat<int32_t>()(r);
    if (size < kAnswerHeader || at + size > num_floats) throw InvalidArgument("`splits` does not fit `answers`.");
    const float* answer = answers + at;
    at += size;
    if (answer[0] == static_cast<float>(kServed)) {
      all_there = all_there && size == asked.flat<int32_t>()(r);
      continue;
    }
    std::string text = "rank " + std::to_string(r) + " could not answer: ";
    for (int64_t i = 0; i < std::min(static_cast<int64_t>(answer[1]), size - kAnswerHeader); ++i) {
      text += static_cast<char>(answer[kAnswerHeader + i]);
    }
    if (answer[0] == static_cast<float>(kFull)) throw TableFull(text);
    if (answer[0] == static_cast<float>(kNoMemory)) throw OutOfMemory(text);
    if (answer[0] == static_cast<float>(kBadRequest)) throw InvalidArgument(text);
    if (answer[0] == static_cast<float>(kBadState)) throw FailedPrecondition(text);
    throw std::runtime_error(text);
  }
  if (at != num_floats) throw InvalidArgument("`splits` does not fit `answers`.");
  if (!all_there) throw InvalidArgument("the answers are not those that were asked for.");
}

// What CombineAnswers and its gradients have in common: features of a group, each with a combiner or as they are.
class PoolOp : public OpKernel {
 public:
  explicit PoolOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      std::vector<std::string> combiners;
      Check(ctx->GetAttr("combiners", &combiners));
      Check(ctx->GetAttr("dims", &dims_));
      if (combiners.size() != dims_.size()) throw InvalidArgument("`dims` must have one value per feature.");
      for (const std::string& combiner : combiners) {
        is_pooled_.push_back(combiner != "rows");
        combiners_.push_back(is_pooled_.back() ? ParseCombiner(combiner) : Combiner::kSum);
      }
      for (const int64_t dim : dims_)
        if (dim < 1) throw InvalidArgument("`dims` must be at least 1.");
    });
  }

 protected:
  // scales: empty, or those of a feature by sums, whose combiner has been seen to with them.
  PooledFeature Feature(int f, const Tensor& index, const Tensor& row_splits, const Tensor& weights,
                        const Tensor& scales, int64_t size) const {
    CheckRank(index, 1, "index");
    CheckRank(scales, 1, "scales");
    PooledFeature feature;
    feature.n = index.NumElements();
    feature.index = index.flat<int32_t>().data();
    feature.dim = dims_[f];
    feature.combiner = combiners_[f];
    feature.segments = feature.n;
    feature.weights = WeightsOrNull(weights, feature.n);
    if (scales.NumElements() > 0) {
      if (feature.weights != nullptr || scales.NumElements() != feature.n) {
        throw InvalidArgument("`scales` must have one value per piece of a feature without weights.");
      }
      feature.weights = scales.flat<float>().data();
      feature.combiner = Combiner::kSum;
    }
    if (is_pooled_[f]) {
      feature.segments = CheckRowSplits(row_splits, feature.n);
      feature.row_splits = Int64(row_splits);
    }
    if (!PlacesFit(feature, size)) throw InvalidArgument("`index` must lie inside the answers.");
    return feature;
  }

  std::vector<PooledFeature> Features(OpKernelContext* ctx, int64_t size) const {
    OpInputList index, row_splits, weights, scales;
    Check(ctx->input_list("index", &index));
    Check(ctx->input_list("row_splits", &row_splits));
    Check(ctx->input_list("weights", &weights));
    Check(ctx->input_list("scales", &scales));
    if (index.size() != static_cast<int>(dims_.size()))
      throw InvalidArgument("`dims` must have one value per feature.");
    std::vector<PooledFeature> features;
    for (int f = 0; f < index.size(); ++f) {
      features.push_back(Feature(f, index[f], row_splits[f], weights[f], scales[f], size));
    }
    return features;
  }

  std::vector<int64_t> dims_;  // [F]
  std::vector<bool> is_pooled_;
  std::vector<Combiner> combiners_;
};

#define SOK_POOL_ATTRS Attr("F: int >= 1").Attr("combiners: list(" SOK_POOLERS ")").Attr("dims: list(int)")

REGISTER_OP("Sok>ExchangeCombine")
    .Input("answers: float")
    .Input("splits: int32")
    .Input("asked: int32")
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
        TF_RETURN_IF_ERROR(c->WithRank(c->input(3 + f), 1, &index));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(3 + static_cast<int>(features) + f), 1, &splits));
        DimensionHandle segments = c->Dim(index, 0);
        if (combiners[f] != "rows") TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &segments));
        c->set_output(f, c->Matrix(segments, dims[f]));
      }
      return absl::OkStatus();
    });

class ExchangeCombineOp : public PoolOp {
 public:
  using PoolOp::PoolOp;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor& answers = ctx->input(0);
      CheckRank(answers, 1, "answers");
      CheckRank(ctx->input(2), 1, "asked");
      const int64_t size = answers.NumElements();
      CheckAnswers(answers.flat<float>().data(), size, ctx->input(1), ctx->input(2));
      const ProfileSpan span("combine", name(), {-1, -1, size * int64_t{sizeof(float)}}, "op");
      const std::vector<PooledFeature> features = Features(ctx, size);
      std::vector<Wanted> wanted;
      for (const PooledFeature& f : features)
        wanted.push_back({tensorflow::DT_FLOAT, CheckedShape({f.segments, f.dim})});
      std::vector<Tensor> tensors = AllocateTogether(ctx, wanted);
      std::vector<float*> outputs;
      for (size_t f = 0; f < features.size(); ++f) {
        outputs.push_back(tensors[f].flat<float>().data());
        ctx->set_output(static_cast<int>(f), tensors[f]);
      }
      const TfExecutor executor(ctx);
      CombineAnswers({executor}, answers.flat<float>().data(), features.data(), static_cast<int>(features.size()),
                     outputs.data());
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeCombine").Device(tensorflow::DEVICE_CPU), ExchangeCombineOp);

REGISTER_OP("Sok>ExchangeCombineGrad")
    .Input("grads: F * float")
    .Input("splits: int32")
    .Input("index: F * int32")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
    .Input("scales: F * float")
    .Output("packed: float")
    .SOK_POOL_ATTRS.SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

class ExchangeCombineGradOp : public PoolOp {
 public:
  using PoolOp::PoolOp;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      OpInputList grads;
      Check(ctx->input_list("grads", &grads));
      const Tensor& splits = ctx->input(grads.size());
      CheckRank(splits, 1, "splits");
      int64_t size = 0;
      for (int64_t r = 0; r < splits.NumElements(); ++r) {
        if (splits.flat<int32_t>()(r) < kAnswerHeader) throw InvalidArgument("`splits` are not those of answers.");
        size += splits.flat<int32_t>()(r);
      }
      const ProfileSpan span("backward", name(), {-1, -1, size * int64_t{sizeof(float)}}, "op");
      const std::vector<PooledFeature> features = Features(ctx, size);
      std::vector<const float*> from;
      for (int f = 0; f < grads.size(); ++f) {
        CheckShape(grads[f], CheckedShape({features[f].segments, features[f].dim}), "grads");
        from.push_back(grads[f].flat<float>().data());
      }
      Tensor* packed = AllocateOutput(ctx, 0, CheckedShape({size}));
      float* out = packed->flat<float>().data();
      int64_t at = 0;
      for (int64_t r = 0; r < splits.NumElements(); ++r) {
        std::fill_n(out + at, kAnswerHeader, 0.0f);
        at += splits.flat<int32_t>()(r);
      }
      const TfExecutor executor(ctx);
      CombineAnswersGrad({executor}, features.data(), static_cast<int>(features.size()), from.data(), size, out);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeCombineGrad").Device(tensorflow::DEVICE_CPU), ExchangeCombineGradOp);

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

class ExchangeCombineGradWeightsOp : public PoolOp {
 public:
  using PoolOp::PoolOp;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      if (dims_.size() != 1) throw InvalidArgument("gradients in weights are those of one feature.");
      const Tensor &grad = ctx->input(0), &answers = ctx->input(1);
      CheckRank(answers, 1, "answers");
      const PooledFeature feature = Features(ctx, answers.NumElements())[0];
      CheckShape(grad, CheckedShape({feature.segments, feature.dim}), "grad");
      Tensor* out;
      Check(ctx->allocate_output(0, ctx->input(4).shape(), &out));
      if (out->NumElements() == 0) return;  // no weights, or no keys
      const TfExecutor executor(ctx);
      CombineAnswersGradWeights({executor}, answers.flat<float>().data(), feature, grad.flat<float>().data(),
                                out->flat<float>().data());
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeCombineGradWeights").Device(tensorflow::DEVICE_CPU),
                        ExchangeCombineGradWeightsOp);

}  // namespace
}  // namespace sok
