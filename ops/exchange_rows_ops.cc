// Owners answer what they were asked for, and hand the gradients of their rows on (docs/design/exchange.md).
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "exchange_op.h"
#include "output_pool.h"

namespace sok {
namespace {

// Not an output yet: what goes wrong on the way is answered with other outputs.
Tensor AllocateTemp(OpKernelContext* ctx, tensorflow::DataType dtype, const TensorShape& shape) {
  const int64_t bytes = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  if (bytes >= int64_t{1} << 20) return TensorInBlock(PooledBlock::Take(bytes), 0, dtype, shape);
  Tensor tensor;
  Check(ctx->allocate_temp(dtype, shape, &tensor));
  return tensor;
}

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
