// What ranks say to one another: keys to their owners, rows back, and bad news in time (docs/design/exchange.md).
//
// A rank that cannot go on must not stop before a collective, or its peers wait for ever. So what is wrong with this
// rank's input travels in the header of its messages, and every rank raises the same error after the collective.
#include <algorithm>
#include <string>
#include <vector>

#include "exchange_op.h"
#include "output_pool.h"

namespace sok {
namespace {

using tensorflow::OpInputList;

template <class Word>
Word* WriteHeader(int64_t program, int64_t call, bool insert, const InputStatus& status, int64_t feature, Word* out) {
  const int64_t header[] = {kMagic, program, call, insert ? 1 : 0, status.status, feature, status.detail};
  static_assert(sizeof(header) / sizeof(header[0]) == kHeaderWords);
  for (const int64_t word : header) *out++ = static_cast<Word>(word);
  return out;
}

// The same message to each of `world` ranks: what is wrong, in words.
template <class Word>
void WriteRefusal(const std::string& text, int64_t program, int64_t call, bool insert, int64_t feature, int world,
                  Tensor* words) {
  Word* out = words->flat<Word>().data();
  for (int r = 0; r < world; ++r) {
    const InputStatus status{kRefused, static_cast<int64_t>(text.size())};
    out = WriteHeader(program, call, insert, status, feature, out);
    for (const char c : text) *out++ = static_cast<Word>(static_cast<unsigned char>(c));
  }
}

void Refuse(OpKernelContext* ctx, const std::string& whole_text, int64_t program, int64_t call, bool insert,
            int64_t feature, int world) {
  const std::string text = Cut(whole_text);
  const int64_t size = kHeaderWords + static_cast<int64_t>(text.size());
  Tensor *words, *splits;
  Check(ctx->allocate_output(0, CheckedShape({world * size}), &words));
  Check(ctx->allocate_output(1, TensorShape({world}), &splits));
  std::fill_n(splits->flat<int32_t>().data(), world, static_cast<int32_t>(size));
  if (words->dtype() == tensorflow::DT_INT64) {
    WriteRefusal<int64_t>(text, program, call, insert, feature, world, words);
  } else {
    WriteRefusal<int32_t>(text, program, call, insert, feature, world, words);
  }
}

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

class ExchangeRefuseOp : public OpKernel {
 public:
  explicit ExchangeRefuseOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("program", &program_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &world_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("text", &text_));
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const int64_t call = ScalarArg<int64_t>(ctx->input(0), "call");
      Refuse(ctx, text_, program_, call, ScalarArg<bool>(ctx->input(1), "insert"), 0, static_cast<int>(world_));
    });
  }

 private:
  int64_t program_, world_;
  std::string text_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeRefuse").Device(tensorflow::DEVICE_CPU), ExchangeRefuseOp);

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
    .Attr("F: int >= 1")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ")")
    .SOK_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables, features;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("F", &features));
      const int keys = static_cast<int>(tables) + 2;
      if (c->num_inputs() != keys + 3 * features) {
        return absl::InvalidArgumentError("`keys` must have one tensor per feature.");
      }
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      c->set_output(2, c->Vector(c->UnknownDim()));
      for (int f = 0; f < features; ++f) {
        ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(keys + f), 1, &shape));
        c->set_output(3 + f, shape);
      }
      return absl::OkStatus();
    });

class ExchangeRouteOp : public GroupOp {
 public:
  explicit ExchangeRouteOp(OpKernelConstruction* ctx) : GroupOp(ctx) {
    is_wide_ = ctx->output_type(0) == tensorflow::DT_INT64;
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tables tables = GetTables(ctx);
      const int world = tables[0]->table().config().world_size;
      OpInputList keys, row_splits, weights;
      Check(ctx->input_list("keys", &keys));
      Check(ctx->input_list("row_splits", &row_splits));
      Check(ctx->input_list("weights", &weights));
      const int num_features = keys.size();
      if (num_features != static_cast<int>(table_of_.size())) {
        throw InvalidArgument("`keys` must have one tensor per feature.");
      }
      const int64_t call = ScalarArg<int64_t>(ctx->input(tables.size()), "call");
      const bool insert = ScalarArg<bool>(ctx->input(tables.size() + 1), "insert");
      const TfExecutor executor(ctx);
      const ScratchLease scratch;

      std::vector<RouteTable> route_tables;
      for (const auto& table : tables) {
        const TableConfig& config = table->table().config();
        route_tables.push_back({config.dim, config.is_unsigned, config.hashed ? 0 : config.num_legal(), config.owner});
      }
      std::vector<RouteFeature> features(num_features);
      for (int f = 0; f < num_features; ++f) {
        const int64_t n = keys[f].NumElements();
        Tensor* index = AllocateOutput(ctx, 3 + f, TensorShape({n}));
        features[f] = {static_cast<int>(table_of_[f]), keys[f].data(), IsWide(keys[f].dtype()), n,
                       index->flat<int32_t>().data()};
      }
      int64_t num_keys = 0;
      for (const Tensor& k : keys) num_keys += k.NumElements();
      const std::string names = NamesOf(tables);
      const ProfileSpan span("route", names, {num_keys});
      InputStatus bad;
      int bad_feature = 0;
      std::string refusal;
      Route route;
      try {
        for (int f = 0; f < num_features && bad.status == kFine; ++f) {
          bad_feature = f;
          bad = Inspect(*tables[table_of_[f]], keys[f], row_splits[f], weights[f], limits_[f]);
        }
        if (bad.status == kFine) {
          bad_feature = 0;
          route = RouteKeys({executor}, scratch.get(), route_tables.data(), static_cast<int>(tables.size()),
                            features.data(), num_features, world);
          if (!route.is_legal) {
            bad_feature = route.bad_feature;
            bad = {kKeyOutOfRange, static_cast<int64_t>(route.bad_key)};
          }
        }
      } catch (const std::exception& e) {  // peers wait: tell them rather than stop
        refusal = e.what();
        bad.status = kRefused;
      }
      Tensor* asked;
      Check(ctx->allocate_output(2, TensorShape({world}), &asked));
      if (bad.status != kFine) {
        for (const RouteFeature& feature : features) std::fill_n(feature.index, feature.n, 0);
        std::fill_n(asked->flat<int32_t>().data(), world, static_cast<int32_t>(kAnswerHeader));
        if (bad.status == kRefused) return Refuse(ctx, refusal, program_, call, insert, bad_feature, world);
        route = {};
      }
      Tensor* splits;
      const int64_t count_words = bad.status == kFine ? static_cast<int64_t>(tables.size()) : 0;
      Tensor* words = AllocateOutput(ctx, 0, CheckedShape({world * (kHeaderWords + count_words) + route.num_keys}));
      Check(ctx->allocate_output(1, TensorShape({world}), &splits));
      int64_t* key_begin = scratch.get()->Get<int64_t>(world);
      int64_t at = 0;
      for (int r = 0; r < world; ++r) {
        const int64_t begin = at;
        int64_t floats = kAnswerHeader;
        at += kHeaderWords + count_words;
        key_begin[r] = at;
        for (int64_t t = 0; t < count_words; ++t) {
          const int64_t count = route.counts[r * count_words + t];
          at += count;
          floats += count * route_tables[t].dim;
        }
        splits->flat<int32_t>()(r) = static_cast<int32_t>(at - begin);
        asked->flat<int32_t>()(r) = static_cast<int32_t>(floats);
      }
      const auto write = [&](auto* out) {
        for (int r = 0; r < world; ++r) {
          auto* to =
              WriteHeader(program_, call, insert, bad, bad_feature, out + key_begin[r] - count_words - kHeaderWords);
          for (int64_t t = 0; t < count_words; ++t) *to++ = route.counts[r * count_words + t];
        }
        if (bad.status == kFine) WriteRoute({executor}, scratch.get(), route, key_begin, out);
      };
      if (is_wide_) {
        write(reinterpret_cast<int64_t*>(words->flat<int64_t>().data()));
      } else {
        write(words->flat<int32_t>().data());
      }
    });
  }

 private:
  // Throws InvalidArgument for what has no status of its own.
  static InputStatus Inspect(const TableResource& table, const Tensor& keys, const Tensor& row_splits,
                             const Tensor& weights, const InputLimits& limits) {
    try {
      table.CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      CheckRank(row_splits, 1, "row_splits");
      const int64_t n = keys.NumElements();
      if (row_splits.NumElements() == 2 && Int64(row_splits)[0] < 0) {
        return ReadSplits(row_splits, n).status;
      }
      WeightsOrNull(weights, n);
      Splits splits;
      try {
        splits = ReadSplits(row_splits, n);
      } catch (const InvalidArgument&) {
        return {kBadSplits, 0};
      }
      return limits.Inspect(splits);
    } catch (const InvalidArgument& e) {
      throw InvalidArgument(table.Name() + e.what());
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeRoute").Device(tensorflow::DEVICE_CPU), ExchangeRouteOp);

}  // namespace
}  // namespace sok
