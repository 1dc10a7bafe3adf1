// What ranks say to one another: keys to their owners, rows back, and bad news in time (docs/design/exchange.md).
//
// A rank that cannot go on must not stop before a collective, or its peers wait for ever. So what is wrong with this
// rank's input travels in the header of its messages, and every rank raises the same error after the collective.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "exchange_op.h"

namespace sok {
namespace {

using tensorflow::OpInputList;

template <class Word>
Word* WriteHeader(int64_t program, int64_t call, int64_t mode, const InputStatus& status, int64_t feature, Word* out) {
  const int64_t header[] = {kMagic, program, call, mode, status.status, feature, status.detail};
  static_assert(sizeof(header) / sizeof(header[0]) == kHeaderWords);
  for (const int64_t word : header) *out++ = static_cast<Word>(word);
  return out;
}

// The same message to each of `world` ranks: what is wrong, in words.
template <class Word>
void WriteRefusal(const std::string& text, int64_t program, int64_t call, int64_t mode, int64_t feature, int world,
                  Tensor* words) {
  Word* out = words->flat<Word>().data();
  for (int r = 0; r < world; ++r) {
    const InputStatus status{kRefused, static_cast<int64_t>(text.size())};
    out = WriteHeader(program, call, mode, status, feature, out);
    for (const char c : text) *out++ = static_cast<Word>(static_cast<unsigned char>(c));
  }
}

void Refuse(OpKernelContext* ctx, const std::string& whole_text, int64_t program, int64_t call, int64_t mode,
            int64_t feature, int world) {
  const std::string text = Cut(whole_text);
  const int64_t size = kHeaderWords + static_cast<int64_t>(text.size());
  Tensor* words = Output(ctx, 0, CheckedShape({world * size}));
  Tensor* splits = Output(ctx, 1, CheckedShape({world}));
  std::fill_n(splits->flat<int32_t>().data(), world, static_cast<int32_t>(size));
  if (words->dtype() == tensorflow::DT_INT64) {
    WriteRefusal<int64_t>(text, program, call, mode, feature, world, words);
  } else {
    WriteRefusal<int32_t>(text, program, call, mode, feature, world, words);
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

class ExchangeRouteOp : public GroupOp {
 public:
  explicit ExchangeRouteOp(OpKernelConstruction* ctx) : GroupOp(ctx) {
    is_wide_ = ctx->output_type(0) == tensorflow::DT_INT64;
    std::vector<std::string> ways;
    Check(ctx->GetAttr("ways", &ways));
    for (const std::string& way : ways) ways_.push_back(ParseWayHome(way));
    Check(ctx->GetAttr("counts_ids", &counts_ids_));
    Check(ctx->GetAttr("combiners", &combiners_));
    if (combiners_.size() != table_of_.size()) throw InvalidArgument("`combiners` must have one value per feature.");
  }

  void Run(OpKernelContext* ctx) override {
    const Tables tables = GetTables(ctx);
    if (ways_.size() != tables.size()) throw InvalidArgument("`ways` must have one value per table.");
    Inputs in;
    Check(ctx->input_list("keys", &in.keys));
    Check(ctx->input_list("row_splits", &in.row_splits));
    Check(ctx->input_list("weights", &in.weights));
    if (in.keys.size() != static_cast<int>(table_of_.size())) {
      throw InvalidArgument("`keys` must have one tensor per feature.");
    }
    const int64_t call = ScalarArg<int64_t>(ctx->input(tables.size()), "call");
    const bool insert = ScalarArg<bool>(ctx->input(tables.size() + 1), "insert");
    const int64_t mode = ModeOf(insert, exchange_type_);
    int64_t num_keys = 0;
    for (int f = 0; f < in.keys.size(); ++f) {
      num_keys += in.keys[f].NumElements();
      if (insert && counts_ids_) tables[static_cast<size_t>(table_of_[f])]->ids += in.keys[f].NumElements();
    }
    const std::string names = NamesOf(tables);
    const ProfileSpan span("route", names, {num_keys});
    if (is_wide_) {
      Run<int64_t>(ctx, tables, in, call, mode);
    } else {
      Run<int32_t>(ctx, tables, in, call, mode);
    }
  }

 private:
  struct Inputs {
    OpInputList keys, row_splits, weights;
  };
  struct Fault {
    InputStatus status;
    int feature = 0;
    std::string refusal;
  };

  template <class Word>
  void Run(OpKernelContext* ctx, const Tables& tables, const Inputs& in, int64_t call, int64_t mode) const {
    const int num_features = in.keys.size(), num_tables = static_cast<int>(tables.size());
    const int world = tables[0]->config().world_size;
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    std::vector<RouteTable> route_tables;
    for (int t = 0; t < num_tables; ++t) {
      const TableConfig& config = tables[t]->config();
      if (copies_.is_copy(t) && copies_.rank_of(t) != config.owner) {
        throw InvalidArgument(config.Label() + ": `copy_of` must be the rank of the copy, " +
                              std::to_string(config.owner) + ".");
      }
      route_tables.push_back({config.dim, config.is_unsigned, config.hashed ? 0 : config.num_legal(), config.owner,
                              ways_[t], exchange_type_ == FloatType::kFloat32 ? 4 : 2, copies_.is_copy(t),
                              copies_.AnswersTo(config.rank, t)});
    }
    std::vector<Tensor> index;
    std::vector<RouteFeature> features;
    for (int f = 0; f < num_features; ++f) {
      const int64_t n = in.keys[f].NumElements();
      index.push_back(AllocateTemp(ctx, tensorflow::DT_INT32, CheckedShape({n})));
      features.push_back({static_cast<int>(table_of_[f]), in.keys[f].data(), IsWide(in.keys[f].dtype()), n,
                          index[f].flat<int32_t>().data()});
    }
    Route route;
    const Fault fault = Find(ctx, {executor}, scratch.get(), tables, route_tables, in, &features,
                             static_cast<int>(sizeof(Word)), &route);
    Tensor* asked = Output(ctx, 2, CheckedShape({world}));
    if (fault.status.status != kFine) {
      for (const RouteFeature& feature : features) std::fill_n(feature.index, feature.n, 0);
      std::fill_n(asked->flat<int32_t>().data(), world, static_cast<int32_t>(kAnswerHeader));
      for (int f = 0; f < num_features; ++f) SetHome(ctx, f, num_features, index[f], in.row_splits[f], nullptr);
      if (fault.status.status == kRefused) {
        return Refuse(ctx, fault.refusal, program_, call, mode, fault.feature, world);
      }
      return TellFault<Word>(ctx, fault, call, mode, world);
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
    const int64_t num_counts = CountsPerRank(num_tables, num_features);
    int64_t* word_begin = scratch.get()->template Get<int64_t>(world);
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    int64_t size = 0;
    for (int r = 0; r < world; ++r) {
      const int64_t message = kHeaderWords + num_counts + route.words[r];
      word_begin[r] = size + kHeaderWords + num_counts;
      size += message;
      splits->flat<int32_t>()(r) = static_cast<int32_t>(message);
      asked->flat<int32_t>()(r) = static_cast<int32_t>(route.floats[r]);
    }
    const Tensor message = AllocateToSend(ctx, ctx->expected_output_dtype(0), CheckedShape({size}));
    ctx->set_output(0, message);
    Word* words = static_cast<Word*>(message.data());
    for (int r = 0; r < world; ++r) {
      Word* to = WriteHeader(program_, call, mode, {}, 0, words + word_begin[r] - num_counts - kHeaderWords);
      for (int64_t c = 0; c < num_counts; ++c) *to++ = static_cast<Word>(route.counts[r * num_counts + c]);
    }
    WriteRoute({executor}, scratch.get(), route, word_begin, words, pieces.data());
  }

  // Looks at the input and routes it; what is wrong comes as a fault, since peers wait to be told.
  Fault Find(OpKernelContext* ctx, const Cpu& cpu, Scratch* scratch, const Tables& tables,
             const std::vector<RouteTable>& route_tables, const Inputs& in, std::vector<RouteFeature>* features,
             int word_bytes, Route* route) const {
    const int num_tables = static_cast<int>(tables.size()), num_features = static_cast<int>(features->size());
    Fault fault;
    try {
      for (int f = 0; f < num_features; ++f) {
        fault.feature = f;
        const std::string reported = ReportedText(in.row_splits[f]);
        if (!reported.empty()) throw InvalidArgument(reported);
        fault.status = Inspect(*tables[table_of_[f]], in.keys[f], in.row_splits[f], in.weights[f], limits_[f]);
        if (fault.status.status != kFine) return fault;
        // Weights may want a gradient, and that takes rows. (Splits that are missing are for ExchangeCombine to refuse.)
        const bool by_rows = combiners_[f] == "rows" || in.weights[f].NumElements() > 0;
        if (by_rows || in.row_splits[f].NumElements() == 0) continue;
        RouteFeature& feature = (*features)[f];
        feature.combiner = ParseCombiner(combiners_[f]);
        feature.row_splits = Int64(in.row_splits[f]);
        feature.segments = in.row_splits[f].NumElements() - 1;
      }
      fault.feature = 0;
      *route = RouteKeys(cpu, scratch, route_tables.data(), num_tables, features->data(), num_features,
                         tables[0]->config().world_size, word_bytes);
      if (!route->is_legal) {
        fault.feature = route->bad_feature;
        fault.status = {kKeyOutOfRange, static_cast<int64_t>(route->bad_key)};
      } else {
        CheckSizes(*route, num_tables, tables[0]->config().world_size);
        CheckMemory(ctx, tables, in, *route, tables[0]->config().world_size);
      }
    } catch (const std::exception& e) {  // peers wait: tell them rather than stop
      fault.refusal = e.what();
      fault.status = {kRefused, 0};
    }
    return fault;
  }

  void CheckSizes(const Route& route, int num_tables, int world) const {
    const int64_t before = kHeaderWords + CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()));
    for (int r = 0; r < world; ++r) {
      if (before + route.words[r] > kPlaceMask) throw InvalidArgument("one message must have less than 2^31 words.");
    }
  }

  // Throws OutOfMemory where ExchangeCombine would find no memory, and nobody to tell it to any more. On the CPU the pool
  // keeps what it gave until then; nothing touches it before.
  void CheckMemory(OpKernelContext* ctx, const Tables& tables, const Inputs& in, const Route& route, int world) const {
    std::vector<Wanted> answers, outputs;
    int64_t floats = 0;
    const auto want = [&](int64_t rows, int64_t dim, std::vector<Wanted>* wanted) {
      wanted->push_back({tensorflow::DT_FLOAT, CheckedShape({rows, dim})});
      floats += wanted->back().shape.num_elements();
    };
    try {
      want(std::accumulate(route.floats, route.floats + world, int64_t{0}), 1, &answers);
      for (int f = 0; f < in.keys.size(); ++f) {
        if (!copies_.AnswersTo(tables[0]->config().rank, table_of_[f])) continue;
        const int64_t segments = in.row_splits[f].NumElements() - 1;
        const int64_t rows = combiners_[f] == "rows" ? in.keys[f].NumElements() : std::max<int64_t>(segments, 0);
        want(rows, tables[table_of_[f]]->config().dim, &outputs);
      }
      if (floats < 1 << 18) return;
      if (ctx->op_device_context() == nullptr) {
        const auto all = {AllocateTogether(ctx, answers), AllocateTogether(ctx, outputs)};
        return;
      }
      outputs.insert(outputs.end(), answers.begin(), answers.end());
      std::vector<Tensor> all(outputs.size());
      for (size_t i = 0; i < all.size(); ++i) Check(ctx->allocate_temp(outputs[i].dtype, outputs[i].shape, &all[i]));
    } catch (const OutOfMemory& e) {
      throw OutOfMemory("no memory for what the lookup gives; look up less at once (" + std::string(e.what()) + ").");
    }
  }

  // What ExchangeCombine is to make of what comes home for a feature. Gives where its scales go, if it has any.
  static float* SetHome(OpKernelContext* ctx, int f, int num_features, const Tensor& index, const Tensor& splits,
                        const int64_t* num_scales) {
    ctx->set_output(3 + f, index);
    ctx->set_output(3 + num_features + f, splits);
    Tensor* scales =
        AllocateOutput(ctx, 3 + 2 * num_features + f, CheckedShape({num_scales == nullptr ? 0 : *num_scales}));
    return num_scales == nullptr ? nullptr : scales->flat<float>().data();
  }

  template <class Word>
  void TellFault(OpKernelContext* ctx, const Fault& fault, int64_t call, int64_t mode, int world) const {
    Tensor* words = Output(ctx, 0, CheckedShape({world * int64_t{kHeaderWords}}));
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    Word* out = reinterpret_cast<Word*>(words->data());
    for (int r = 0; r < world; ++r) out = WriteHeader(program_, call, mode, fault.status, fault.feature, out);
    std::fill_n(splits->flat<int32_t>().data(), world, static_cast<int32_t>(kHeaderWords));
  }

  // Throws InvalidArgument for what has no status of its own.
  static InputStatus Inspect(const TableResource& table, const Tensor& keys, const Tensor& row_splits,
                             const Tensor& weights, const InputLimits& limits) {
    try {
      table.CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      CheckRank(row_splits, 1, "row_splits");
      const int64_t n = keys.NumElements();
      if (IsReport(row_splits)) return ReadSplits(row_splits, n).status;
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

  std::vector<std::string> combiners_;  // [F]
  std::vector<WayHome> ways_;           // [T]
  bool counts_ids_;
};
// Not the weights, of which only the number is wanted.
SOK_HOST_KERNEL("Sok>ExchangeRoute", ExchangeRouteOp, "handles", "call", "insert", "keys", "row_splits", "words",
                "splits", "asked", "index", "splits_home", "scales");

}  // namespace
}  // namespace sok
