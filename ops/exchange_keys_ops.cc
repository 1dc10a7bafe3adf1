// What ranks say to one another: keys to their owners, rows back, and bad news in time (docs/design/exchange.md).
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "exchange_route.h"

namespace sok {
namespace {

REGISTER_OP("Sok>ExchangeRefuse")
    .Input("call: int64")
    .Input("insert: bool")
    .Output("words: Tword")
    .Output("splits: int32")
    .Attr("Tword: {int64, int32}")
    .Attr("program: int = 0")
    .Attr("world_size: int >= 1")
    .Attr("text: string")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

class ExchangeRefuseOp : public GuardedOp {
 public:
  explicit ExchangeRefuseOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("program", &program_));
    Check(ctx->GetAttr("world_size", &world_));
    Check(ctx->GetAttr("text", &text_));
  }
  void Run(OpKernelContext* ctx) override {
    const int64_t call = ScalarArg<int64_t>(ctx->input(0), "call");
    // In what the rows of this call would have travelled, nobody asks any more.
    const int64_t mode = ModeOf(ScalarArg<bool>(ctx->input(1), "insert"), FloatType::kFloat32);
    Refuse(ctx, text_, program_, call, mode, 0, static_cast<int>(world_));
  }

 private:
  int64_t program_, world_;
  std::string text_;
};
SOK_HOST_KERNEL("Sok>ExchangeRefuse", ExchangeRefuseOp, "call", "insert", "words", "splits");

REGISTER_OP("Sok>ExchangeRoute")
    .Input("handles: T * resource")
    .Input("call: int64")
    .Input("insert: bool")
    .Input("keys: Tkeys")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
    .Output("words: Tword")
    .Output("splits: int32")
    .Output("asked: int32")
    .Output("index: F * int32")
    .Output("splits_home: F * int64")
    .Output("scales: F * float")
    .Attr("F: int >= 1")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ")")
    .Attr("combiners: list(" SOK_POOLERS ")")
    .Attr("ways: list({'auto', 'rows', 'sums'})")
    .Attr("counts_ids: bool = true")  // false: CountIds does, at the turn of the step
    .SOK_EXCHANGE_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables, features;
      std::vector<std::string> combiners;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("F", &features));
      TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
      const int keys = static_cast<int>(tables) + 2, n = static_cast<int>(features);
      if (c->num_inputs() != keys + 3 * n || static_cast<int>(combiners.size()) != n) {
        return absl::InvalidArgumentError("`keys` and `combiners` must have one value per feature.");
      }
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      for (int f = 0; f < n; ++f) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(keys + f), 1, &shape));
        c->set_output(3 + f, combiners[static_cast<size_t>(f)] == "rows" ? shape : c->Vector(c->UnknownDim()));
        c->set_output(3 + n + f, c->input(keys + n + f));
        c->set_output(3 + 2 * n + f, c->Vector(c->UnknownDim()));
      }
      return absl::OkStatus();
    });

// Both ops: without `ways` all comes by rows, and the index is all that there is to say of a feature.
class HostExchangeRouteOp final : public ExchangeRouteOp {
 public:
  explicit HostExchangeRouteOp(OpKernelConstruction* ctx) : ExchangeRouteOp(ctx), rows_alone_(!ctx->HasAttr("ways")) {
    std::vector<std::string> ways;
    if (!rows_alone_) Check(ctx->GetAttr("ways", &ways));
    for (const std::string& way : ways) ways_.push_back(ParseWayHome(way));
  }

 private:
  void Route(OpKernelContext* ctx, const Tables& tables, const Inputs& in) const override {
    if (!rows_alone_ && ways_.size() != tables.size()) throw InvalidArgument("`ways` must have one value per table.");
    if (is_wide_) {
      Run<int64_t>(ctx, tables, in);
    } else {
      Run<int32_t>(ctx, tables, in);
    }
  }

  template <class Word>
  void Run(OpKernelContext* ctx, const Tables& tables, const Inputs& in) const {
    const int num_features = in.keys.size(), num_tables = static_cast<int>(tables.size());
    const int world = tables[0]->config().world_size;
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    const std::vector<RouteTable> route_tables =
        RouteTables(tables, rows_alone_ ? std::vector<WayHome>(tables.size(), WayHome::kRows) : ways_);
    std::vector<Tensor> index;
    std::vector<RouteFeature> features;
    for (int f = 0; f < num_features; ++f) {
      const int64_t n = in.keys[f].NumElements();
      index.push_back(AllocateTemp(ctx, tensorflow::DT_INT32, CheckedShape({n})));
      features.push_back({static_cast<int>(table_of_[f]), in.keys[f].data(), IsWide(in.keys[f].dtype()), n,
                          index[f].flat<int32_t>().data()});
    }
    sok::Route route;
    const Fault fault = Find(tables, in, [&](Fault* found) {
      for (int f = 0; f < num_features; ++f) {
        if (!MaySum(in, f)) continue;
        features[f].combiner = ParseCombiner(combiners_[f]);
        features[f].row_splits = Int64(in.row_splits[f]);
        features[f].segments = in.row_splits[f].NumElements() - 1;
      }
      route = RouteKeys({executor}, scratch.get(), route_tables.data(), num_tables, features.data(), num_features,
                        world, static_cast<int>(sizeof(Word)));
      if (!route.is_legal) {
        found->feature = route.bad_feature;
        found->status = {kKeyOutOfRange, static_cast<int64_t>(route.bad_key)};
      } else {
        CheckSizes(route, num_tables, world);
        CheckMemory(ctx, tables, in, std::accumulate(route.floats, route.floats + world, int64_t{0}));
      }
    });
    if (fault.status.status != kFine) {
      for (const RouteFeature& feature : features) std::fill_n(feature.index, feature.n, 0);
      for (int f = 0; f < num_features; ++f) SetHome(ctx, f, num_features, index[f], in.row_splits[f], nullptr);
      return Tell(ctx, fault, in, world);
    }
    std::vector<RoutedPieces> pieces(static_cast<size_t>(num_features));
    for (int f = 0; f < num_features; ++f) {
      if (route.pieces[f] == kByRows) {
        SetHome(ctx, f, num_features, index[f], in.row_splits[f], nullptr);
        continue;
      }
      Tensor splits = AllocateTemp(ctx, tensorflow::DT_INT64, in.row_splits[f].shape());
      pieces[f].row_splits = reinterpret_cast<int64_t*>(splits.flat<int64_t>().data());
      const bool scaled = features[f].combiner != Combiner::kSum;
      pieces[f].scales = SetHome(ctx, f, num_features, index[f].Slice(0, route.pieces[f]), splits,
                                 scaled ? &route.pieces[f] : nullptr);
    }
    int64_t* word_begin = scratch.get()->template Get<int64_t>(world);
    Word* words = OutputMessages<Word>(ctx, in, route, world, num_tables, word_begin);
    WriteRoute({executor}, scratch.get(), route, word_begin, words, pieces.data());
  }

  // What ExchangeCombine is to make of what comes home for a feature. Gives where its scales go, if it has any.
  float* SetHome(OpKernelContext* ctx, int f, int num_features, const Tensor& index, const Tensor& splits,
                 const int64_t* num_scales) const {
    ctx->set_output(3 + f, index);
    if (rows_alone_) return nullptr;
    ctx->set_output(3 + num_features + f, splits);
    Tensor* scales =
        AllocateOutput(ctx, 3 + 2 * num_features + f, CheckedShape({num_scales == nullptr ? 0 : *num_scales}));
    return num_scales == nullptr ? nullptr : scales->flat<float>().data();
  }

  const bool rows_alone_;
  std::vector<WayHome> ways_;  // [T]
};
// Not the weights, of which only the number is wanted.
SOK_HOST_KERNEL("Sok>ExchangeRoute", HostExchangeRouteOp, "handles", "call", "insert", "keys", "row_splits", "words",
                "splits", "asked", "index", "splits_home", "scales");

REGISTER_OP("Sok>ExchangeRouteRows")
    .Input("handles: T * resource")
    .Input("call: int64")
    .Input("insert: bool")
    .Input("keys: Tkeys")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
    .Output("words: Tword")
    .Output("splits: int32")
    .Output("asked: int32")
    .Output("index: F * int32")
    .Attr("F: int >= 1")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ")")
    .Attr("combiners: list(" SOK_POOLERS ")")
    .Attr("counts_ids: bool = true")
    .SOK_EXCHANGE_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables, features;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("F", &features));
      const int keys = static_cast<int>(tables) + 2, n = static_cast<int>(features);
      if (c->num_inputs() != keys + 3 * n) {
        return absl::InvalidArgumentError("`keys` must have one value per feature.");
      }
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(c->UnknownDim()));
      for (int f = 0; f < n; ++f) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(keys + f), 1, &shape));
        c->set_output(3 + f, shape);
      }
      return absl::OkStatus();
    });

SOK_CPU_KERNEL("Sok>ExchangeRouteRows", HostExchangeRouteOp);

}  // namespace
}  // namespace sok
