// Rows that came home and their gradients: what answers say of themselves, and the features of a group, on every device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange_op.h"

namespace sok {

// Where the answer of each rank begins: [world + 1]. Throws InvalidArgument for splits that do not fit.
inline std::vector<int64_t> AnswerBegins(const Tensor& splits, const Tensor& asked, int64_t num_floats) {
  CheckRank(asked, 1, "asked");
  CheckShape(splits, asked.shape(), "splits");
  std::vector<int64_t> begin{0};
  for (int64_t r = 0; r < splits.NumElements(); ++r) {
    const int64_t size = splits.flat<int32_t>()(r);
    if (size < kAnswerHeader || begin.back() + size > num_floats) break;
    begin.push_back(begin.back() + size);
  }
  if (static_cast<int64_t>(begin.size()) != splits.NumElements() + 1 || begin.back() != num_floats) {
    throw InvalidArgument("`splits` does not fit `answers`.");
  }
  return begin;
}

// Raises what an owner has said of itself. headers: [world, 2], status and bytes of text of each answer;
// read(at, n): floats at .. at + n of the answers.
template <class Read>
void CheckAnswers(const std::vector<int64_t>& begin, const Tensor& asked, const float* headers, const Read& read) {
  bool all_there = true;
  for (int64_t r = 0; r < asked.NumElements(); ++r) {
    const int64_t size = begin[r + 1] - begin[r];
    const float status = headers[2 * r];
    if (status == static_cast<float>(kServed)) {
      all_there = all_there && size == asked.flat<int32_t>()(r);
      continue;
    }
    const int64_t told = std::min({static_cast<int64_t>(headers[2 * r + 1]), kMaxErrorBytes, size - kAnswerHeader});
    std::string text = "rank " + std::to_string(r) + " could not answer: ";
    for (const float c : read(begin[r] + kAnswerHeader, std::max<int64_t>(0, told))) text += static_cast<char>(c);
    if (status == static_cast<float>(kFull)) throw TableFull(text);
    if (status == static_cast<float>(kNoMemory)) throw OutOfMemory(text);
    if (status == static_cast<float>(kBadRequest)) throw InvalidArgument(text);
    if (status == static_cast<float>(kBadState)) throw FailedPrecondition(text);
    throw std::runtime_error(text);
  }
  if (!all_there) throw InvalidArgument("the answers are not those that were asked for.");
}

// The floats of all answers. Throws InvalidArgument.
inline int64_t AnswerFloats(const Tensor& splits) {
  CheckRank(splits, 1, "splits");
  int64_t size = 0;
  for (int64_t r = 0; r < splits.NumElements(); ++r) {
    if (splits.flat<int32_t>()(r) < kAnswerHeader) throw InvalidArgument("`splits` are not those of answers.");
    size += splits.flat<int32_t>()(r);
  }
  return size;
}

// What CombineAnswers and its gradients have in common: features of a group, each with a combiner or as they are.
class PoolOp : public GuardedOp {
 public:
  explicit PoolOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    int64_t num_features;
    std::vector<std::string> combiners;
    Check(ctx->GetAttr("F", &num_features));
    Check(ctx->GetAttr("combiners", &combiners));
    Check(ctx->GetAttr("dims", &dims_));
    if (combiners.size() != dims_.size() || static_cast<int64_t>(dims_.size()) != num_features) {
      throw InvalidArgument("`dims` must have one value per feature.");
    }
    for (const std::string& combiner : combiners) {
      is_pooled_.push_back(combiner != "rows");
      combiners_.push_back(is_pooled_.back() ? ParseCombiner(combiner) : Combiner::kSum);
    }
    CheckDims(dims_);
  }

 protected:
  // All features, as far as their shapes say: what the tensors hold may lie on a device.
  std::vector<PooledFeature> Features(OpKernelContext* ctx) const {
    tensorflow::OpInputList index, row_splits, weights, scales;
    Check(ctx->input_list("index", &index));
    Check(ctx->input_list("row_splits", &row_splits));
    Check(ctx->input_list("weights", &weights));
    Check(ctx->input_list("scales", &scales));
    std::vector<PooledFeature> features;
    for (int f = 0; f < index.size(); ++f) {
      features.push_back(Feature(f, index[f], row_splits[f], weights[f], scales[f]));
    }
    return features;
  }

  // The first inputs: of each feature the gradients of what it gave.
  static std::vector<const float*> Grads(OpKernelContext* ctx, const std::vector<PooledFeature>& features) {
    std::vector<const float*> grads;
    for (const PooledFeature& feature : features) {
      const Tensor& grad = ctx->input(static_cast<int>(grads.size()));
      CheckShape(grad, {feature.segments, feature.dim}, "grads");
      grads.push_back(grad.flat<float>().data());
    }
    return grads;
  }

  int num_features() const { return static_cast<int>(dims_.size()); }

  std::vector<int64_t> dims_;  // [F]

 private:
  // scales: empty, or those of a feature by sums, whose combiner has been seen to with them.
  PooledFeature Feature(int f, const Tensor& index, const Tensor& row_splits, const Tensor& weights,
                        const Tensor& scales) const {
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
      CheckRank(row_splits, 1, "row_splits");
      if (row_splits.NumElements() == 0) throw InvalidArgument("`row_splits` must start with 0.");
      feature.segments = row_splits.NumElements() - 1;
      feature.row_splits = Int64(row_splits);
    }
    return feature;
  }

  std::vector<bool> is_pooled_;
  std::vector<Combiner> combiners_;
};

}  // namespace sok
