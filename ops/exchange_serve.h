// What owners make of what they are asked for, on every device: messages are read on the host (docs/design/exchange.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "exchange_op.h"

namespace sok {

// What all ranks ask of an owner.
struct Requests {
  Tensor answer_splits;  // [world] int32
  Tensor counts;         // [world, CountsPerRank] int64
  std::vector<Asked> all;
  std::vector<const void*> lengths;  // of each of these, the words that say how long its pieces are; by rows: not used
  std::vector<const void*> keys;     // and those that are its keys
  std::vector<int64_t> num_keys;     // [T], of each table
  int64_t num_splits = 0;            // of the pieces of all, rows + 1 for each of `all` that has some
  AnswerLayout layout;
};

// Reads the messages, and sees to it that whatever goes wrong is said to those who wait for an answer. Where rows come
// from is up to the device's kernel.
class ExchangeServeOp : public GroupOp {
 public:
  // is_ahead: before the turn of the step, for ExchangePeek and ExchangeReadAhead: no row is made, and what is wrong is left for that
  // turn to say.
  explicit ExchangeServeOp(OpKernelConstruction* ctx, bool is_ahead = false) : GroupOp(ctx), is_ahead_(is_ahead) {
    int num_tables;
    tensorflow::DataType word;
    Check(ctx->GetAttr("T", &num_tables));
    Check(ctx->GetAttr("Tword", &word));
    Check(ctx->GetAttr("dims", &dims_));
    if (ctx->HasAttr("num_askers")) Check(ctx->GetAttr("num_askers", &num_askers_));
    is_wide_ = word == tensorflow::DT_INT64;
    if (static_cast<int>(dims_.size()) != num_tables) throw InvalidArgument("`dims` must have one value per table.");
  }

  void Run(OpKernelContext* ctx) override {
    const Tables tables = GetTables(ctx);
    for (size_t t = 0; t < tables.size(); ++t) tables[t]->CheckDim(dims_[t]);
    const int at = static_cast<int>(tables.size());
    const Tensor &words = ctx->input(at), &splits = ctx->input(at + 1);
    CheckRank(words, 1, "words");
    CheckShape(splits, {Askers(tables)}, "splits");
    const int64_t call = ScalarArg<int64_t>(ctx->input(at + 2), "call");
    const bool insert = ScalarArg<bool>(ctx->input(at + 3), "insert");
    if (is_wide_) {
      Run(ctx, tables, reinterpret_cast<const int64_t*>(words.flat<int64_t>().data()), call, insert);
    } else {
      Run(ctx, tables, words.flat<int32_t>().data(), call, insert);
    }
  }

 protected:
  // For Peek: whether rows of these tables are worth sending ahead.
  virtual bool MaySend(const Tables&) const { return true; }

  // Outputs all there is to say, or throws. Of ExchangePeek the outputs from the third on are not there.
  virtual void Serve(OpKernelContext* ctx, const Tables& tables, const Requests& requests, bool insert) const = 0;

  // Outputs answers that hold bad news.
  virtual void OutputBadNews(OpKernelContext* ctx, const std::vector<float>& answers) const = 0;

  // Row splits [rows + 1] of the pieces of request number i. Throws InvalidArgument where they make no sense.
  void PieceSplits(const Requests& requests, size_t i, int64_t* splits) const {
    if (is_wide_) return SumLengths(static_cast<const int64_t*>(requests.lengths[i]), requests.all[i], splits);
    SumLengths(static_cast<const int32_t*>(requests.lengths[i]), requests.all[i], splits);
  }

  // The keys [keys] of request number i, as 64-bit words.
  void ReadKeys(const Requests& requests, size_t i, bool is_unsigned, uint64_t* keys) const {
    const int64_t n = requests.all[i].keys;
    if (is_wide_) {
      if (n > 0) std::memcpy(keys, requests.keys[i], static_cast<size_t>(n) * sizeof(uint64_t));
      return;
    }
    const auto* words = static_cast<const int32_t*>(requests.keys[i]);
    for (int64_t k = 0; k < n; ++k) keys[k] = KeyOf(words[k], is_unsigned);
  }

  const std::vector<int64_t>& dims() const { return dims_; }
  bool is_ahead() const { return is_ahead_; }

  template <class Word>
  static uint64_t KeyOf(Word word, bool is_unsigned) {
    return is_unsigned ? static_cast<uint64_t>(static_cast<std::make_unsigned_t<Word>>(word))
                       : static_cast<uint64_t>(static_cast<int64_t>(word));
  }

  // Answers all who ask with bad news.
  virtual void AnswerBadNews(OpKernelContext* ctx, int world, AnswerStatus status, const std::string& text) const {
    std::vector<float> answer(kAnswerHeader, 0.0f), answers;
    answer[0] = static_cast<float>(status);
    answer[1] = static_cast<float>(text.size());
    for (const char c : text) answer.push_back(static_cast<float>(static_cast<unsigned char>(c)));
    answer.push_back(0.0f);  // to spare: an answer in 16 bit may look one value shorter than it is (exchange_wire.h)
    for (int r = 0; r < world; ++r) answers.insert(answers.end(), answer.begin(), answer.end());
    OutputBadNews(ctx, answers);
    const int64_t width = CountsPerRank(static_cast<int64_t>(dims_.size()), static_cast<int64_t>(table_of_.size()));
    Tensor* answer_splits = Output(ctx, 1, CheckedShape({world}));
    std::fill_n(answer_splits->flat<int32_t>().data(), world, static_cast<int32_t>(answer.size()));
    if (is_ahead_) return;
    Tensor* counts = Output(ctx, 2, CheckedShape({world, width}));
    for (size_t t = 0; t <= dims_.size(); ++t) Output(ctx, 3 + static_cast<int>(t), TensorShape({0}));
    counts->flat<int64_t>().setZero();
  }

 private:
  // How many ask: all workers of the job, or as many as an attribute says, of a table that lies on a parameter server.
  int Askers(const Tables& tables) const {
    return num_askers_ > 0 ? static_cast<int>(num_askers_) : tables[0]->config().world_size;
  }

  template <class Word>
  struct Message {
    const Word* words;
    int64_t size;
    const Word* counts;  // [CountsPerRank]
  };

  template <class Word>
  void Run(OpKernelContext* ctx, const Tables& tables, const Word* words, int64_t call, bool insert) const {
    const std::string names = NamesOf(tables);
    const ProfileSpan span("find", names, {ctx->input(static_cast<int>(tables.size())).NumElements()});
    if (is_ahead_) return Peek(ctx, tables, words, call, insert);
    const auto messages = ReadHeaders(ctx, tables, words, call, insert);
    // From here on peers wait for an answer, so whatever goes wrong is one.
    AnswerStatus status = kInternal;
    std::string text;
    try {
      return Serve(ctx, tables, Read(ctx, tables, messages), insert);
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

  // Answers with the rows as they are, or with nothing where there is a reason.
  template <class Word>
  void Peek(OpKernelContext* ctx, const Tables& tables, const Word* words, int64_t call, bool insert) const {
    try {
      if (MaySend(tables))
        return Serve(ctx, tables, Read(ctx, tables, ReadHeaders(ctx, tables, words, call, insert)), false);
    } catch (const std::exception&) {  // raised, or answered, at the turn of the step
    }
    AnswerBadNews(ctx, Askers(tables), kBadState, "");
  }

  // Raises what any rank has said of itself: all ranks see the same headers and raise the same.
  template <class Word>
  std::vector<Message<Word>> ReadHeaders(OpKernelContext* ctx, const Tables& tables, const Word* words, int64_t call,
                                         bool insert) const {
    const Tensor& splits = ctx->input(static_cast<int>(tables.size()) + 1);
    const TableConfig& first = tables[0]->config();
    const int world = Askers(tables);
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
    if (differs(kModeWord, ModeOf(insert, exchange_type_))) RaiseOtherMode(first, messages);
    return messages;
  }

  // For messages whose modes differ.
  template <class Word>
  [[noreturn]] static void RaiseOtherMode(const TableConfig& first, const std::vector<Message<Word>>& messages) {
    const char* const kTypes[] = {"float32", "float16", "bfloat16"};
    std::string inserts, types;
    bool same = true;
    for (const auto& m : messages) {
      const int64_t mode = m.words[kModeWord];
      const bool is_known = mode >= 0 && mode < 6;
      const char* comma = inserts.empty() ? "" : ", ";
      inserts += comma + std::to_string(InsertOf(mode) ? 1 : 0);
      types += comma + (is_known ? std::string(kTypes[mode / 2]) : std::to_string(mode));
      same = same && InsertOf(mode) == InsertOf(messages[0].words[kModeWord]);
    }
    if (!same) {
      throw FailedPrecondition(first.Label() +
                               ": `training` must be the same on all workers. Received, by rank: " + inserts + ".");
    }
    throw FailedPrecondition(
        first.Label() +
        ": rows must travel in the same type on all workers, that of `exchange_dtype` or of a layer's "
        "dtype policy. Received, by rank: " +
        types + ".");
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
  Requests Read(OpKernelContext* ctx, const Tables& tables, const std::vector<Message<Word>>& messages) const {
    const int64_t world = static_cast<int64_t>(messages.size()), num_tables = static_cast<int64_t>(tables.size());
    const int64_t width = CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()));
    Tensor answer_splits = AllocateTemp(ctx, tensorflow::DT_INT32, CheckedShape({world}));
    Tensor counts = AllocateTemp(ctx, tensorflow::DT_INT64, CheckedShape({world, width}));
    int64_t* count = reinterpret_cast<int64_t*>(counts.flat<int64_t>().data());
    std::vector<const Word*> at(static_cast<size_t>(world * width));  // where the words of each count begin
    for (int64_t r = 0; r < world; ++r) ReadCounts(messages[r], r, width, count + r * width, &at[r * width]);
    Requests requests{answer_splits,
                      counts,
                      AllAsked(count, world, num_tables, table_of_),
                      {},
                      {},
                      {},
                      0,
                      AnswerLayout(count, world, dims_, table_of_, copies_, AnswerLayout::kAnswers)};
    const AnswerLayout& layout = requests.layout;
    for (int64_t r = 0; r < world; ++r) {
      if (layout.end(r) - layout.begin(r) > kPlaceMask) {
        throw InvalidArgument("an answer would have 2^31 floats or more.");
      }
      answer_splits.flat<int32_t>()(r) = static_cast<int32_t>(layout.end(r) - layout.begin(r));
    }
    requests.num_keys.resize(static_cast<size_t>(num_tables));
    for (const Asked& asked : requests.all) {
      const Word* const* words = &at[asked.rank * width + asked.column];
      requests.lengths.push_back(words[0]);
      requests.keys.push_back(asked.feature < 0 ? words[0] : words[1]);
      requests.num_keys[asked.table] += asked.keys;
      if (asked.feature >= 0) requests.num_splits += asked.rows + 1;
    }
    for (int64_t t = 0; t < num_tables; ++t) {
      if (requests.num_keys[t] > kPlaceMask) {
        throw InvalidArgument(tables[t]->config().Label() +
                              ": 2^31 keys or more were asked of this worker in one lookup.");
      }
    }
    return requests;
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

  std::vector<int64_t> dims_;
  int64_t num_askers_ = 0;
  const bool is_ahead_;
};

}  // namespace sok
