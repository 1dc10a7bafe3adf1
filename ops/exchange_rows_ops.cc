// Owners answer what they were asked for, and hand the gradients of their rows on (docs/design/exchange.md).
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "exchange_op.h"
#include "sok/sum_rows.h"

namespace sok {
namespace {

REGISTER_OP("Sok>ExchangeServe")
    .Input("handles: T * resource")
    .Input("words: Tword")
    .Input("splits: int32")
    .Input("call: int64")
    .Input("insert: bool")
    .Output("answers: float")
    .Output("answer_splits: int32")
    .Output("counts: int64")
    .Output("piece_splits: int64")
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
      std::vector<int64_t> table_of;
      TF_RETURN_IF_ERROR(c->GetAttr("table_of", &table_of));
      c->set_output(2, c->Matrix(c->Dim(splits, 0), CountsPerRank(tables, static_cast<int64_t>(table_of.size()))));
      c->set_output(3, c->Vector(c->UnknownDim()));
      for (int t = 0; t < tables; ++t) c->set_output(4 + t, c->Vector(c->UnknownDim()));
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
      CheckShape(splits, TensorShape({tables[0]->config().world_size}), "splits");
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
    const Word* counts;  // [CountsPerRank]
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
      text = tables[0]->config().Label() + ": no memory for the answers of a lookup.";
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
    const TableConfig& first = tables[0]->config();
    const int world = first.world_size;
    std::vector<Message<Word>> messages;
    int64_t at = 0;
    const int64_t num_words = ctx->input(static_cast<int>(tables.size())).NumElements();
    for (int r = 0; r < world; ++r) {
      const int64_t size = splits.flat<int32_t>()(r);
      if (size < 0 || at + size > num_words) break;
      messages.push_back({words + at, size, words + at + kHeaderWords});
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
      throw InvalidArgument(tables[0]->config().Label() + ": input of rank " + std::to_string(from) + ": " + text);
    }
    const size_t f = feature >= 0 && feature < static_cast<int64_t>(table_of_.size()) ? feature : 0;
    const TableConfig& table = tables[table_of_[f]]->config();
    limits_[f].Raise(table, from, {status, static_cast<int64_t>(KeyOf(detail, table.is_unsigned))});
  }

  template <class Word>
  static uint64_t KeyOf(Word word, bool is_unsigned) {
    return is_unsigned ? static_cast<uint64_t>(static_cast<std::make_unsigned_t<Word>>(word))
                       : static_cast<uint64_t>(static_cast<int64_t>(word));
  }

  template <class Word>
  void Serve(OpKernelContext* ctx, const Tables& tables, const std::vector<Message<Word>>& messages, bool insert) {
    const int64_t world = static_cast<int64_t>(messages.size()), num_tables = static_cast<int64_t>(tables.size());
    const int64_t width = CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()));
    Tensor answer_splits, counts;
    Check(ctx->allocate_temp(tensorflow::DT_INT32, TensorShape({world}), &answer_splits));
    Check(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({world, width}), &counts));
    int64_t* count = reinterpret_cast<int64_t*>(counts.flat<int64_t>().data());
    std::vector<const Word*> asked_at(static_cast<size_t>(world * width));  // where the words of each count begin
    for (int64_t r = 0; r < world; ++r) ReadCounts(messages[r], r, width, count + r * width, &asked_at[r * width]);
    const AnswerLayout layout(count, world, dims_, table_of_);
    Tensor answers = AllocateTemp(ctx, tensorflow::DT_FLOAT, CheckedShape({layout.end(world - 1)}));
    float* out = answers.flat<float>().data();
    for (int64_t r = 0; r < world; ++r) {
      if (layout.end(r) - layout.begin(r) > kPlaceMask) {
        throw InvalidArgument("an answer would have 2^31 floats or more.");
      }
      answer_splits.flat<int32_t>()(r) = static_cast<int32_t>(layout.end(r) - layout.begin(r));
      std::fill_n(out + layout.begin(r), kAnswerHeader, 0.0f);
    }
    static_assert(kServed == 0);

    const std::vector<Asked> all = AllAsked(count, world, num_tables, table_of_);
    std::vector<int64_t> num_keys(static_cast<size_t>(num_tables));
    int64_t num_splits = 0;
    for (const Asked& asked : all) {
      num_keys[asked.table] += asked.keys;
      if (asked.feature >= 0) num_splits += asked.rows + 1;
    }
    std::vector<Tensor> row_ids;
    std::vector<int64_t*> ids;
    for (int64_t t = 0; t < num_tables; ++t) {
      if (num_keys[t] > kPlaceMask) {
        throw InvalidArgument(tables[t]->config().Label() +
                              ": 2^31 keys or more were asked of this worker in one lookup.");
      }
      row_ids.push_back(AllocateTemp(ctx, tensorflow::DT_INT64, TensorShape({num_keys[t]})));
      ids.push_back(reinterpret_cast<int64_t*>(row_ids[t].flat<int64_t>().data()));
    }
    Tensor piece_splits = AllocateTemp(ctx, tensorflow::DT_INT64, TensorShape({num_splits}));
    int64_t* splits = reinterpret_cast<int64_t*>(piece_splits.flat<int64_t>().data());
    const ScratchLease scratch;
    std::vector<EmbeddingTable::Feature> features;
    for (const Asked& asked : all) {
      const Word* const* words = &asked_at[asked.rank * width + asked.column];
      EmbeddingTable::Feature feature;
      feature.table = &tables[asked.table]->table();
      feature.n = asked.keys;
      feature.segments = asked.rows;
      if (asked.feature >= 0) {
        SumLengths(words[0], asked, splits);
        feature.row_splits = splits;
        splits += asked.rows + 1;
      }
      const bool is_unsigned = feature.table->config().is_unsigned;
      feature.keys = KeysOf(asked.feature < 0 ? words[0] : words[1], feature.n, is_unsigned, scratch.get());
      feature.output = out + layout.begin(asked.rank, asked.column);
      feature.row_ids = ids[asked.table];
      ids[asked.table] += feature.n;
      features.push_back(feature);
    }
    const TfExecutor executor(ctx);
    Find({executor}, scratch.get(), std::move(features), insert);
    ctx->set_output(0, answers);
    ctx->set_output(1, answer_splits);
    ctx->set_output(2, counts);
    ctx->set_output(3, piece_splits);
    for (int t = 0; t < num_tables; ++t) ctx->set_output(4 + t, row_ids[t]);
  }

  // The counts of a message [width], and where what they count lies: all of it inside the message.
  template <class Word>
  static void ReadCounts(const Message<Word>& message, int64_t from, int64_t width, int64_t* counts, const Word** at) {
    int64_t left = message.size - kHeaderWords - width;
    const Word* next = message.counts + width;
    for (int64_t c = 0; c < width && left >= 0; ++c) {
      counts[c] = message.counts[c];
      at[c] = next;
      if (counts[c] < 0 || counts[c] > left) left = -1;
      if (left < 0) break;
      left -= counts[c];
      next += counts[c];
    }
    if (left != 0) throw InvalidArgument("message of rank " + std::to_string(from) + " is cut off.");
  }

  // Row splits of the pieces of a feature: splits [rows + 1].
  template <class Word>
  static void SumLengths(const Word* lengths, const Asked& asked, int64_t* splits) {
    splits[0] = 0;
    for (int64_t p = 0; p < asked.rows; ++p) {
      if (lengths[p] < 1 || lengths[p] > asked.keys - splits[p]) {
        throw InvalidArgument("message of rank " + std::to_string(asked.rank) + " has a piece of " +
                              std::to_string(lengths[p]) + " keys where at most " +
                              std::to_string(asked.keys - splits[p]) + " are left.");
      }
      splits[p + 1] = splits[p] + lengths[p];
    }
    if (splits[asked.rows] != asked.keys) {
      throw InvalidArgument("message of rank " + std::to_string(asked.rank) + " has keys that are in no piece.");
    }
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
    uint64_t* keys = scratch->Get<uint64_t>(missing);
    int64_t at = 0;
    for (const auto* f = begin; f != end; ++f)
      for (int64_t i = 0; i < f->n; ++i)
        if (f->row_ids[i] < 0) keys[at++] = f->keys[i];
    begin->table->Lookup(cpu, scratch, keys, missing, true, nullptr, scratch->Get<float>(missing * begin->table->dim()),
                         scratch->Get<int64_t>(missing));
    EmbeddingTable::LookupGroup(cpu, scratch, begin, end - begin, true);
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
    Tensor *answers, *answer_splits, *counts, *piece_splits, *row_ids;
    const int64_t width = CountsPerRank(static_cast<int64_t>(dims_.size()), static_cast<int64_t>(table_of_.size()));
    Check(ctx->allocate_output(0, TensorShape({world * size}), &answers));
    Check(ctx->allocate_output(1, TensorShape({world}), &answer_splits));
    Check(ctx->allocate_output(2, TensorShape({world, width}), &counts));
    Check(ctx->allocate_output(3, TensorShape({0}), &piece_splits));
    for (size_t t = 0; t < dims_.size(); ++t) {
      Check(ctx->allocate_output(4 + static_cast<int>(t), TensorShape({0}), &row_ids));
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

// The gradient of ExchangeServe: for each table the rows that were read for all ranks, each once, with what came back
// for it, summed where it lies in the gradients.
REGISTER_OP("Sok>ExchangeSumGrad")
    .Input("packed: float")
    .Input("counts: int64")
    .Input("piece_splits: int64")
    .Input("row_ids: T * int64")
    .Output("unique_row_ids: T * int64")
    .Output("sums: T * float")
    .Attr("T: int >= 1")
    .Attr("table_of: list(int)")
    .Attr("dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int64_t>(dims.size()) != tables) {
        return absl::InvalidArgumentError("`dims` must have one value per table.");
      }
      for (int t = 0; t < tables; ++t) {
        const DimensionHandle rows = c->UnknownDim();
        c->set_output(t, c->Vector(rows));
        c->set_output(static_cast<int>(tables) + t, c->Matrix(rows, dims[t]));
      }
      return absl::OkStatus();
    });

class ExchangeSumGradOp : public OpKernel {
 public:
  explicit ExchangeSumGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      Check(ctx->GetAttr("dims", &dims_));
      Check(ctx->GetAttr("table_of", &table_of_));
      for (const int64_t dim : dims_)
        if (dim < 1) throw InvalidArgument("`dims` must be at least 1.");
      for (const int64_t table : table_of_) {
        if (table < 0 || table >= static_cast<int64_t>(dims_.size())) {
          throw InvalidArgument("`table_of` must name one of the tables.");
        }
      }
    });
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor &packed = ctx->input(0), &counts = ctx->input(1), &piece_splits = ctx->input(2);
      const ProfileSpan span("backward", name(), {-1, -1, static_cast<int64_t>(packed.TotalBytes())}, "op");
      const int num_tables = static_cast<int>(dims_.size());
      CheckRank(packed, 1, "packed");
      CheckRank(counts, 2, "counts");
      CheckRank(piece_splits, 1, "piece_splits");
      const int64_t world = counts.dim_size(0), width = counts.dim_size(1);
      if (world < 1 || width != CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()))) {
        throw InvalidArgument("`counts` must have one column per table and two per feature.");
      }
      const int64_t* count = Int64(counts);
      for (int64_t c = 0; c < world * width; ++c) {
        if (count[c] < 0 || count[c] > kPlaceMask) throw InvalidArgument("`counts` must lie in [0, 2^31).");
      }
      const AnswerLayout layout(count, world, dims_, table_of_);
      if (layout.end(world - 1) != packed.NumElements()) {
        throw InvalidArgument("`packed` does not have the gradients that `counts` say.");
      }
      std::vector<std::vector<RowAddends>> addends(static_cast<size_t>(num_tables));
      std::vector<int64_t> ids_left;
      for (int t = 0; t < num_tables; ++t) {
        CheckRank(ctx->input(3 + t), 1, "row_ids");
        ids_left.push_back(ctx->input(3 + t).NumElements());
      }
      const int64_t* splits = Int64(piece_splits);
      int64_t splits_left = piece_splits.NumElements();
      for (const Asked& asked : AllAsked(count, world, num_tables, table_of_)) {
        const Tensor& row_ids = ctx->input(3 + static_cast<int>(asked.table));
        RowAddends a;
        a.n = asked.keys;
        a.row_ids = Int64(row_ids) + (row_ids.NumElements() - ids_left[asked.table]);
        a.values = packed.flat<float>().data() + layout.begin(asked.rank, asked.column);
        ids_left[asked.table] -= asked.keys;
        if (ids_left[asked.table] < 0) throw InvalidArgument("`row_ids` must have one value for each key.");
        if (asked.feature >= 0) {
          splits_left -= asked.rows + 1;
          if (splits_left < 0 || !AreSplits(splits, asked.rows, asked.keys)) {
            throw InvalidArgument("`piece_splits` do not fit `counts`.");
          }
          a.row_splits = splits;
          a.segments = asked.rows;
          splits += asked.rows + 1;
        }
        addends[asked.table].push_back(a);
      }
      std::vector<RowSums> tables;
      for (int t = 0; t < num_tables; ++t) {
        if (ids_left[t] != 0) throw InvalidArgument("`row_ids` must have one value for each key.");
        tables.push_back({dims_[t], addends[t].data(), static_cast<int64_t>(addends[t].size())});
      }
      if (splits_left != 0) throw InvalidArgument("`piece_splits` do not fit `counts`.");
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      SumRows({executor}, scratch.get(), tables.data(), num_tables, [&](int64_t table, int64_t rows) {
        const int t = static_cast<int>(table);
        RowSumsTarget target;
        target.row_ids =
            reinterpret_cast<int64_t*>(AllocateOutput(ctx, t, TensorShape({rows}))->flat<int64_t>().data());
        target.sums = AllocateOutput(ctx, num_tables + t, TensorShape({rows, dims_[t]}))->flat<float>().data();
        return target;
      });
    });
  }

 private:
  static bool AreSplits(const int64_t* splits, int64_t rows, int64_t keys) {
    for (int64_t p = 0; p < rows; ++p)
      if (splits[p + 1] < splits[p]) return false;
    return splits[0] == 0 && splits[rows] == keys;
  }

  std::vector<int64_t> table_of_, dims_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ExchangeSumGrad").Device(tensorflow::DEVICE_CPU), ExchangeSumGradOp);

}  // namespace
}  // namespace sok
