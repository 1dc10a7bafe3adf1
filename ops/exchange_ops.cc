// What ranks say to one another: keys to their owners, rows back, and bad news in time (docs/design/exchange.md).
//
// A rank that cannot go on must not stop before a collective, or its peers wait for ever. So what is wrong with this
// rank's input travels in the header of its messages, and every rank raises the same error after the collective.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "input_limits.h"
#include "op.h"
#include "output_pool.h"
#include "sok/exchange.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpOutputList;

// The words before the keys of a message. All ranks get the same from one.
enum HeaderWord {
  kMagicWord,    // kMagic
  kProgramWord,  // the group's tables, as one number
  kCallWord,     // which call this is
  kInsertWord,   // 0 or 1
  kStatusWord,   // KeyStatus
  kFeatureWord,  // whose input it is about
  kDetailWord,
  kHeaderWords
};
constexpr int64_t kMagic = 0x534f4b32;  // "SOK2": changes when the layout does

// First float of an answer. The second is the length of a text that follows the header: one float for each byte.
enum AnswerStatus { kServed, kFull, kNoMemory, kBadRequest, kBadState, kInternal };
constexpr int64_t kMaxText = 2000;

template <class Word>
Word* WriteHeader(int64_t program, int64_t call, bool insert, const InputStatus& status, int64_t feature, Word* out) {
  const int64_t header[] = {kMagic, program, call, insert ? 1 : 0, status.status, feature, status.detail};
  static_assert(sizeof(header) / sizeof(header[0]) == kHeaderWords);
  for (const int64_t word : header) *out++ = static_cast<Word>(word);
  return out;
}

// Not an output yet: what goes wrong on the way is answered with other outputs.
Tensor AllocateTemp(OpKernelContext* ctx, tensorflow::DataType dtype, const TensorShape& shape) {
  const int64_t bytes = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  if (bytes >= int64_t{1} << 20) return TensorInBlock(PooledBlock::Take(bytes), 0, dtype, shape);
  Tensor tensor;
  Check(ctx->allocate_temp(dtype, shape, &tensor));
  return tensor;
}

std::string Cut(const std::string& text) { return text.substr(0, kMaxText); }

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

bool IsWide(tensorflow::DataType key) { return key == tensorflow::DT_INT64 || key == tensorflow::DT_UINT64; }

// For the profile: the tables' names, where one runs.
std::string NamesOf(const std::vector<RefCountPtr<TableResource>>& tables) {
  std::string names;
  for (size_t t = 0; ProfileRuns() && t < tables.size(); ++t) {
    names += (t > 0 ? "," : "") + tables[t]->table().config().name;
  }
  return names;
}

// The tables and features of a group, as attributes say.
class GroupOp : public OpKernel {
 public:
  explicit GroupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      Check(ctx->GetAttr("program", &program_));
      std::vector<int64_t> slot_num, max_nnz, max_feature_num;
      Check(ctx->GetAttr("table_of", &table_of_));
      Check(ctx->GetAttr("slot_num", &slot_num));
      Check(ctx->GetAttr("max_nnz", &max_nnz));
      Check(ctx->GetAttr("max_feature_num", &max_feature_num));
      const size_t n = table_of_.size();
      if (slot_num.size() != n || max_nnz.size() != n || max_feature_num.size() != n) {
        throw InvalidArgument(
            "`table_of`, `slot_num`, `max_nnz` and `max_feature_num` must have one value per feature.");
      }
      for (size_t f = 0; f < n; ++f) {
        if (slot_num[f] < 1) throw InvalidArgument("`slot_num` must be at least 1.");
        limits_.push_back({slot_num[f], max_nnz[f], max_feature_num[f]});
      }
    });
  }

 protected:
  using Tables = std::vector<RefCountPtr<TableResource>>;

  Tables GetTables(OpKernelContext* ctx) const {
    const int num_tables = ctx->num_inputs() == 0 ? 0 : NumTables(ctx);
    Tables tables;
    bool any_wide = false;
    for (int t = 0; t < num_tables; ++t) {
      tables.push_back(TableArg(ctx, t));
      any_wide = any_wide || IsWide(tables[t]->key_dtype());
      if (tables[t]->table().config().world_size != tables[0]->table().config().world_size ||
          tables[t]->table().config().rank != tables[0]->table().config().rank) {
        throw InvalidArgument("all tables of a group must belong to the same workers.");
      }
    }
    for (const int64_t table : table_of_)
      if (table < 0 || table >= num_tables) throw InvalidArgument("`table_of` must name one of the tables.");
    if (any_wide != is_wide_) {
      throw InvalidArgument(tables[0]->table().Label() +
                            ": words must be int64 if a table of the group has 64-bit keys, else int32.");
    }
    return tables;
  }

  static int NumTables(OpKernelContext* ctx) {
    int begin, end;
    Check(ctx->op_kernel().InputRange("handles", &begin, &end));
    return end - begin;
  }

  int64_t program_ = 0;
  bool is_wide_ = true;
  std::vector<int64_t> table_of_;  // [F]
  std::vector<InputLimits> limits_;
};

#define SOK_GROUP_ATTRS              \
  Attr("T: int >= 1")                \
      .Attr("Tword: {int64, int32}") \
      .Attr("program: int = 0")      \
      .Attr("table_of: list(int)")   \
      .Attr("slot_num: list(int)")   \
      .Attr("max_nnz: list(int)")    \
      .Attr("max_feature_num: list(int)")

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
        const uint64_t bound = static_cast<uint64_t>(config.capacity) * static_cast<uint64_t>(config.world_size);
        route_tables.push_back({config.dim, config.is_unsigned, config.hashed ? 0 : bound});
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

REGISTER_OP("Sok>ExchangeServe")
    .Input("handles: T * resource")
    .Input("words: Tword")
    .Input("splits: int32")
    .Input("call: int64")
    .Input("insert: bool")
    .Output("answers: float")
    .Output("answer_splits: int32")
    .Output("counts: int64")
    .Output("row_ids: T * int64")
    .SOK_GROUP_ATTRS.Attr("dims: list(int)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      ShapeHandle unused, splits;
      const int words = static_cast<int>(tables);
      TF_RETURN_IF_ERROR(c->WithRank(c->input(words), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(words + 1), 1, &splits));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(words + 2), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(words + 3), 0, &unused));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, splits);
      c->set_output(2, c->Matrix(c->Dim(splits, 0), tables));
      for (int t = 0; t < tables; ++t) c->set_output(3 + t, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

class ExchangeServeOp : public GroupOp {
 public:
  explicit ExchangeServeOp(OpKernelConstruction* ctx) : GroupOp(ctx) {
    Guard(ctx, [&] {
      int num_tables;
      tensorflow::DataType word;
      Check(ctx->GetAttr("T", &num_tables));
      Check(ctx->GetAttr("Tword", &word));
      Check(ctx->GetAttr("dims", &dims_));
      is_wide_ = word == tensorflow::DT_INT64;
      if (static_cast<int>(dims_.size()) != num_tables) throw InvalidArgument("`dims` must have one value per table.");
    });
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tables tables = GetTables(ctx);
      for (size_t t = 0; t < tables.size(); ++t) tables[t]->CheckDim(dims_[t]);
      const int at = static_cast<int>(tables.size());
      const Tensor &words = ctx->input(at), &splits = ctx->input(at + 1);
      CheckRank(words, 1, "words");
      CheckShape(splits, TensorShape({tables[0]->table().config().world_size}), "splits");
      const int64_t call = ScalarArg<int64_t>(ctx->input(at + 2), "call");
      const bool insert = ScalarArg<bool>(ctx->input(at + 3), "insert");
      if (is_wide_) {
        Run(ctx, tables, reinterpret_cast<const int64_t*>(words.flat<int64_t>().data()), call, insert);
      } else {
        Run(ctx, tables, words.flat<int32_t>().data(), call, insert);
      }
    });
  }

 private:
  template <class Word>
  struct Message {
    const Word* words;
    int64_t size;
    const Word* counts;  // [T]
    const Word* keys;
  };

  template <class Word>
  void Run(OpKernelContext* ctx, const Tables& tables, const Word* words, int64_t call, bool insert) {
    const std::string names = NamesOf(tables);
    const ProfileSpan span("find", names, {ctx->input(static_cast<int>(tables.size())).NumElements()});
    const auto messages = ReadHeaders(ctx, tables, words, call, insert);
    // From here on peers wait for an answer, so whatever goes wrong is one.
    AnswerStatus status = kInternal;
    std::string text;
    try {
      return Serve(ctx, tables, messages, insert);
    } catch (const TableFull& e) {
      status = kFull;
      text = e.what();
    } catch (const OutOfMemory& e) {
      status = kNoMemory;
      text = e.what();
    } catch (const std::bad_alloc&) {
      status = kNoMemory;
      text = tables[0]->table().Label() + ": no memory for the answers of a lookup.";
    } catch (const InvalidArgument& e) {
      status = kBadRequest;
      text = e.what();
    } catch (const FailedPrecondition& e) {
      status = kBadState;
      text = e.what();
    } catch (const std::exception& e) {
      text = e.what();
    } catch (...) {
      text = "unknown exception";
    }
    AnswerBadNews(ctx, static_cast<int>(messages.size()), status, Cut(text));
  }

  // Raises what any rank has said of itself: all ranks see the same headers and raise the same.
  template <class Word>
  std::vector<Message<Word>> ReadHeaders(OpKernelContext* ctx, const Tables& tables, const Word* words, int64_t call,
                                         bool insert) {
    const Tensor& splits = ctx->input(static_cast<int>(tables.size()) + 1);
    const EmbeddingTable& first = tables[0]->table();
    const int world = first.config().world_size;
    std::vector<Message<Word>> messages;
    int64_t at = 0;
    const int64_t num_words = ctx->input(static_cast<int>(tables.size())).NumElements();
    for (int r = 0; r < world; ++r) {
      const int64_t size = splits.flat<int32_t>()(r);
      if (size < 0 || at + size > num_words) break;
      messages.push_back({words + at, size, words + at + kHeaderWords, words + at + kHeaderWords + tables.size()});
      at += size;
    }
    if (static_cast<int>(messages.size()) != world || at != num_words) {
      throw InvalidArgument(first.Label() + ": `splits` must sum to the number of words, " + std::to_string(num_words) +
                            ".");
    }
    for (int r = 0; r < world; ++r) {
      if (messages[r].size >= kHeaderWords && messages[r].words[kMagicWord] == static_cast<Word>(kMagic)) continue;
      throw InvalidArgument(first.Label() + ": the message of rank " + std::to_string(r) +
                            " has another form. All workers must run the same version of sok.");
    }
    const auto differs = [&](HeaderWord word, int64_t mine) {
      return std::any_of(messages.begin(), messages.end(),
                         [&](const auto& m) { return m.words[word] != static_cast<Word>(mine); });
    };
    const auto by_rank = [&](HeaderWord word) {
      std::string text;
      for (const auto& m : messages) text += (text.empty() ? "" : ", ") + std::to_string(m.words[word]);
      return text;
    };
    if (differs(kProgramWord, program_)) {
      throw FailedPrecondition(
          first.Label() + ": the workers look up different tables in one exchange. All must run the same program.");
    }
    if (differs(kCallWord, call)) {
      throw FailedPrecondition(
          first.Label() + ": the workers are in different calls of this lookup: by rank, call " + by_rank(kCallWord) +
          ". One of them has left a call out, perhaps after an error. All must run the same program.");
    }
    for (int r = 0; r < world; ++r) RaiseBadInput(tables, messages[r], r);
    if (differs(kInsertWord, insert ? 1 : 0)) {
      throw FailedPrecondition(first.Label() + ": `training` must be the same on all workers. Received, by rank: " +
                               by_rank(kInsertWord) + ".");
    }
    return messages;
  }

  template <class Word>
  void RaiseBadInput(const Tables& tables, const Message<Word>& message, int from) const {
    const int64_t status = message.words[kStatusWord], feature = message.words[kFeatureWord];
    const Word detail = message.words[kDetailWord];
    if (status == kFine) return;
    if (status == kRefused) {
      std::string text;
      for (int64_t i = kHeaderWords; i < message.size; ++i) text += static_cast<char>(message.words[i]);
      throw InvalidArgument(tables[0]->table().Label() + ": input of rank " + std::to_string(from) + ": " + text);
    }
    const size_t f = feature >= 0 && feature < static_cast<int64_t>(table_of_.size()) ? feature : 0;
    const EmbeddingTable& table = tables[table_of_[f]]->table();
    limits_[f].Raise(table, from, {status, static_cast<int64_t>(KeyOf(detail, table.config().is_unsigned))});
  }

  template <class Word>
  static uint64_t KeyOf(Word word, bool is_unsigned) {
    return is_unsigned ? static_cast<uint64_t>(static_cast<std::make_unsigned_t<Word>>(word))
                       : static_cast<uint64_t>(static_cast<int64_t>(word));
  }

  template <class Word>
  void Serve(OpKernelContext* ctx, const Tables& tables, const std::vector<Message<Word>>& messages, bool insert) {
    const int world = static_cast<int>(messages.size()), num_tables = static_cast<int>(tables.size());
    Tensor answers, answer_splits, counts;
    Check(ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({world}), &answer_splits));
    Check(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({world, num_tables}), &counts));
    const ScratchLease scratch;
    int64_t* row_begin = scratch.get()->Get<int64_t>(int64_t{world} * num_tables);  // floats before (rank, table)
    int64_t floats = 0;
    for (int r = 0; r < world; ++r) {
      const int64_t begin = floats;
      int64_t words = kHeaderWords + num_tables;
      floats += kAnswerHeader;
      for (int t = 0; t < num_tables; ++t) {
        const int64_t count = messages[r].size < words ? -1 : messages[r].counts[t];
        if (count < 0) throw InvalidArgument("message of rank " + std::to_string(r) + " is cut off.");
        counts.matrix<int64_t>()(r, t) = count;
        row_begin[r * num_tables + t] = floats;
        floats += count * dims_[t];
        words += count;
      }
      if (words != messages[r].size) throw InvalidArgument("message of rank " + std::to_string(r) + " is cut off.");
      if (floats - begin > kPlaceMask) throw InvalidArgument("an answer would have 2^31 floats or more.");
      answer_splits.flat<int32_t>()(r) = static_cast<int32_t>(floats - begin);
    }
    answers = AllocateTemp(ctx, tensorflow::DT_FLOAT, CheckedShape({floats}));
    float* out = answers.flat<float>().data();
    for (int r = 0; r < world; ++r) std::fill_n(out + row_begin[r * num_tables] - kAnswerHeader, kAnswerHeader, 0.0f);
    static_assert(kServed == 0);

    std::vector<const Word*> next;  // keys not yet served, by rank
    for (const auto& message : messages) next.push_back(message.keys);
    std::vector<EmbeddingTable::Feature> features;
    std::vector<Tensor> row_ids(num_tables);
    for (int t = 0; t < num_tables; ++t) {
      int64_t n = 0;
      for (int r = 0; r < world; ++r) n += counts.matrix<int64_t>()(r, t);
      row_ids[t] = AllocateTemp(ctx, tensorflow::DT_INT64, TensorShape({n}));
      int64_t* ids = reinterpret_cast<int64_t*>(row_ids[t].flat<int64_t>().data());
      EmbeddingTable* table = &tables[t]->table();
      for (int r = 0; r < world; ++r) {
        EmbeddingTable::Feature feature;
        feature.table = table;
        feature.n = feature.segments = counts.matrix<int64_t>()(r, t);
        feature.keys = KeysOf(next[r], feature.n, table->config().is_unsigned, scratch.get());
        feature.output = out + row_begin[r * num_tables + t];
        feature.row_ids = ids;
        features.push_back(feature);
        next[r] += feature.n;
        ids += feature.n;
      }
    }
    const TfExecutor executor(ctx);
    Find({executor}, scratch.get(), std::move(features), insert);
    ctx->set_output(0, answers);
    ctx->set_output(1, answer_splits);
    ctx->set_output(2, counts);
    for (int t = 0; t < num_tables; ++t) ctx->set_output(3 + t, row_ids[t]);
  }

  // Looks all features up; those of one table lie side by side. New keys of a table are added for all ranks or for none.
  static void Find(const Cpu& cpu, Scratch* scratch, std::vector<EmbeddingTable::Feature> features, bool insert) {
    // A shard that may become full is first searched, and then gets what is missing in one piece.
    auto is_tight = [](const EmbeddingTable::Feature* begin, const EmbeddingTable::Feature* end) {
      int64_t n = 0;
      for (const auto* f = begin; f != end; ++f) n += f->n;
      const EmbeddingTable* table = begin->table;
      return table->config().hashed && table->size() + n > table->config().capacity;
    };
    std::vector<EmbeddingTable::Feature> tight;
    for (size_t f = 0; insert && f < features.size();) {
      size_t end = f;
      while (end < features.size() && features[end].table == features[f].table) ++end;
      if (is_tight(&features[f], features.data() + end)) {
        tight.insert(tight.end(), features.begin() + f, features.begin() + end);
        features.erase(features.begin() + f, features.begin() + end);
      } else {
        f = end;
      }
    }
    EmbeddingTable::LookupGroup(cpu, scratch, features.data(), static_cast<int64_t>(features.size()), insert);
    EmbeddingTable::LookupGroup(cpu, scratch, tight.data(), static_cast<int64_t>(tight.size()), false);
    for (size_t f = 0; f < tight.size();) {
      const size_t begin = f;
      while (f < tight.size() && tight[f].table == tight[begin].table) ++f;
      AddMissing(cpu, scratch, &tight[begin], tight.data() + f);
    }
  }

  static void AddMissing(const Cpu& cpu, Scratch* scratch, const EmbeddingTable::Feature* begin,
                         const EmbeddingTable::Feature* end) {
    int64_t missing = 0;
    for (const auto* f = begin; f != end; ++f) missing += std::count(f->row_ids, f->row_ids + f->n, -1);
    if (missing == 0) return;
    const int64_t dim = begin->table->dim();
    uint64_t* keys = scratch->Get<uint64_t>(missing);
    int64_t* row_ids = scratch->Get<int64_t>(missing);
    float* rows = scratch->Get<float>(missing * dim);
    int64_t at = 0;
    for (const auto* f = begin; f != end; ++f)
      for (int64_t i = 0; i < f->n; ++i)
        if (f->row_ids[i] < 0) keys[at++] = f->keys[i];
    begin->table->Lookup(cpu, scratch, keys, missing, true, nullptr, rows, row_ids);
    at = 0;
    for (const auto* f = begin; f != end; ++f) {
      for (int64_t i = 0; i < f->n; ++i) {
        if (f->row_ids[i] >= 0) continue;
        std::memcpy(f->output + i * dim, rows + at * dim, static_cast<size_t>(dim) * sizeof(float));
        f->row_ids[i] = row_ids[at++];
      }
    }
  }

  // Words as keys; 64-bit ones in place.
  template <class Word>
  static const uint64_t* KeysOf(const Word* words, int64_t n, bool is_unsigned, Scratch* scratch) {
    if constexpr (sizeof(Word) == sizeof(uint64_t)) {
      return reinterpret_cast<const uint64_t*>(words);
    } else {
      uint64_t* keys = scratch->Get<uint64_t>(n);
      for (int64_t i = 0; i < n; ++i) keys[i] = KeyOf(words[i], is_unsigned);
      return keys;
    }
  }

  void AnswerBadNews(OpKernelContext* ctx, int world, AnswerStatus status, const std::string& text) const {
    const int64_t size = kAnswerHeader + static_cast<int64_t>(text.size());
    Tensor *answers, *answer_splits, *counts, *row_ids;
    Check(ctx->allocate_output(0, TensorShape({world * size}), &answers));
    Check(ctx->allocate_output(1, TensorShape({world}), &answer_splits));
    Check(ctx->allocate_output(2, TensorShape({world, static_cast<int64_t>(dims_.size())}), &counts));
    for (size_t t = 0; t < dims_.size(); ++t) {
      Check(ctx->allocate_output(3 + static_cast<int>(t), TensorShape({0}), &row_ids));
    }
    counts->flat<int64_t>().setZero();
    float* out = answers->flat<float>().data();
    for (int r = 0; r < world; ++r) {
      std::fill_n(out, kAnswerHeader, 0.0f);
      out[0] = static_cast<float>(status);
      out[1] = static_cast<float>(text.size());
      out += kAnswerHeader;
      for (const char c : text) *out++ = static_cast<float>(static_cast<unsigned char>(c));
      answer_splits->flat<int32_t>()(r) = static_cast<int32_t>(size);
    }
  }

  std::vector<int64_t> dims_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeServe").Device(tensorflow::DEVICE_CPU), ExchangeServeOp);

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
  PooledFeature Feature(int f, const Tensor& index, const Tensor& row_splits, const Tensor& weights,
                        int64_t size) const {
    CheckRank(index, 1, "index");
    PooledFeature feature;
    feature.n = index.NumElements();
    feature.index = index.flat<int32_t>().data();
    feature.dim = dims_[f];
    feature.combiner = combiners_[f];
    feature.segments = feature.n;
    feature.weights = WeightsOrNull(weights, feature.n);
    if (is_pooled_[f]) {
      feature.segments = CheckRowSplits(row_splits, feature.n);
      feature.row_splits = Int64(row_splits);
    }
    if (!PlacesFit(feature, size)) throw InvalidArgument("`index` must lie inside the answers.");
    return feature;
  }

  std::vector<PooledFeature> Features(OpKernelContext* ctx, int64_t size) const {
    OpInputList index, row_splits, weights;
    Check(ctx->input_list("index", &index));
    Check(ctx->input_list("row_splits", &row_splits));
    Check(ctx->input_list("weights", &weights));
    if (index.size() != static_cast<int>(dims_.size()))
      throw InvalidArgument("`dims` must have one value per feature.");
    std::vector<PooledFeature> features;
    for (int f = 0; f < index.size(); ++f) features.push_back(Feature(f, index[f], row_splits[f], weights[f], size));
    return features;
  }

  std::vector<int64_t> dims_;  // [F]
  std::vector<bool> is_pooled_;
  std::vector<Combiner> combiners_;
};

#define SOK_POOL_ATTRS \
  Attr("F: int >= 1").Attr("combiners: list({'sum', 'mean', 'sqrtn', 'rows'})").Attr("dims: list(int)")

REGISTER_OP("Sok>ExchangeCombine")
    .Input("answers: float")
    .Input("splits: int32")
    .Input("asked: int32")
    .Input("index: F * int32")
    .Input("row_splits: F * int64")
    .Input("weights: F * float")
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
      std::vector<float*> outputs;
      for (size_t f = 0; f < features.size(); ++f) {
        const TensorShape shape = CheckedShape({features[f].segments, features[f].dim});
        Tensor* output = AllocateOutput(ctx, static_cast<int>(f), shape);
        outputs.push_back(output->flat<float>().data());
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
      if (feature.weights == nullptr) return;  // no weights, or no keys
      const TfExecutor executor(ctx);
      CombineAnswersGradWeights({executor}, answers.flat<float>().data(), feature, grad.flat<float>().data(),
                                out->flat<float>().data());
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeCombineGradWeights").Device(tensorflow::DEVICE_CPU),
                        ExchangeCombineGradWeightsOp);

REGISTER_OP("Sok>ExchangeSplitGrad")
    .Input("packed: float")
    .Input("counts: int64")
    .Output("values: T * float")
    .Attr("T: int >= 1")
    .Attr("dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int64_t>(dims.size()) != tables) {
        return absl::InvalidArgumentError("`dims` must have one value per table.");
      }
      for (int t = 0; t < tables; ++t) c->set_output(t, c->Matrix(c->UnknownDim(), dims[t]));
      return absl::OkStatus();
    });

class ExchangeSplitGradOp : public OpKernel {
 public:
  explicit ExchangeSplitGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor &packed = ctx->input(0), &counts = ctx->input(1);
      const ProfileSpan span("backward", name(), {-1, -1, static_cast<int64_t>(packed.TotalBytes())}, "op");
      const int64_t num_tables = static_cast<int64_t>(dims_.size());
      CheckRank(packed, 1, "packed");
      CheckRank(counts, 2, "counts");
      if (counts.dim_size(1) != num_tables) throw InvalidArgument("`counts` must have one column per table.");
      const int64_t world = counts.dim_size(0);
      const int64_t* count = Int64(counts);
      int64_t floats = 0;
      std::vector<int64_t> rows(num_tables, 0);
      for (int64_t r = 0; r < world; ++r) {
        floats += kAnswerHeader;
        for (int64_t t = 0; t < num_tables; ++t) {
          if (count[r * num_tables + t] < 0) throw InvalidArgument("`counts` must not be negative.");
          rows[t] += count[r * num_tables + t];
          floats += count[r * num_tables + t] * dims_[t];
        }
      }
      if (floats != packed.NumElements())
        throw InvalidArgument("`packed` does not have the gradients that `counts` say.");
      std::vector<float*> to;
      for (int64_t t = 0; t < num_tables; ++t) {
        Tensor* values = AllocateOutput(ctx, static_cast<int>(t), CheckedShape({rows[t], dims_[t]}));
        to.push_back(values->flat<float>().data());
      }
      struct Piece {
        const float* from;
        float* to;
        int64_t floats;
      };
      std::vector<Piece> pieces;
      const float* from = packed.flat<float>().data();
      for (int64_t r = 0; r < world; ++r) {
        from += kAnswerHeader;
        for (int64_t t = 0; t < num_tables; ++t) {
          const int64_t size = count[r * num_tables + t] * dims_[t];
          pieces.push_back({from, to[t], size});
          from += size;
          to[t] += size;
        }
      }
      const int64_t num_pieces = static_cast<int64_t>(pieces.size());
      TfExecutor(ctx).For(num_pieces, floats / num_pieces + 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
          std::memcpy(pieces[p].to, pieces[p].from, static_cast<size_t>(pieces[p].floats) * sizeof(float));
        }
      });
    });
  }

 private:
  std::vector<int64_t> dims_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeSplitGrad").Device(tensorflow::DEVICE_CPU), ExchangeSplitGradOp);

}  // namespace
}  // namespace sok
