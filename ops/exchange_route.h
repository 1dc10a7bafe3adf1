// What a rank asks of the others, on every device: keys by owner, or what is wrong with its input (docs/design/exchange.md).
//
// A rank that cannot go on must not stop before a collective, or its peers wait for ever. So what is wrong with this
// rank's input travels in the header of its messages, and every rank raises the same error after the collective.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "exchange_op.h"

namespace sok {

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

inline void Refuse(OpKernelContext* ctx, const std::string& whole_text, int64_t program, int64_t call, int64_t mode,
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

// Reads the arguments, and sees to it that whatever is wrong with the input is said to all. Where distinct keys and their owners
// come from is up to the device's kernel.
class ExchangeRouteOp : public GroupOp {
 public:
  explicit ExchangeRouteOp(OpKernelConstruction* ctx) : GroupOp(ctx) {
    is_wide_ = ctx->output_type(0) == tensorflow::DT_INT64;
    Check(ctx->GetAttr("counts_ids", &counts_ids_));
    Check(ctx->GetAttr("combiners", &combiners_));
    if (combiners_.size() != table_of_.size()) throw InvalidArgument("`combiners` must have one value per feature.");
  }

  void Run(OpKernelContext* ctx) override {
    const Tables tables = GetTables(ctx);
    Inputs in;
    Check(ctx->input_list("keys", &in.keys));
    Check(ctx->input_list("row_splits", &in.row_splits));
    Check(ctx->input_list("weights", &in.weights));
    if (in.keys.size() != static_cast<int>(table_of_.size())) {
      throw InvalidArgument("`keys` must have one tensor per feature.");
    }
    in.call = ScalarArg<int64_t>(ctx->input(tables.size()), "call");
    const bool insert = ScalarArg<bool>(ctx->input(tables.size() + 1), "insert");
    in.mode = ModeOf(insert, exchange_type_);
    int64_t num_keys = 0;
    for (int f = 0; f < in.keys.size(); ++f) {
      num_keys += in.keys[f].NumElements();
      if (insert && counts_ids_) tables[static_cast<size_t>(table_of_[f])]->ids += in.keys[f].NumElements();
    }
    const std::string names = NamesOf(tables);
    const ProfileSpan span("route", names, {num_keys});
    Route(ctx, tables, in);
  }

 protected:
  struct Inputs {
    tensorflow::OpInputList keys, row_splits, weights;
    int64_t call = 0, mode = 0;
  };
  struct Fault {
    InputStatus status;
    int feature = 0;
    std::string refusal;
  };

  // Outputs all there is to say.
  virtual void Route(OpKernelContext* ctx, const Tables& tables, const Inputs& in) const = 0;

  // ways: of each table.
  std::vector<RouteTable> RouteTables(const Tables& tables, const std::vector<WayHome>& ways) const {
    std::vector<RouteTable> all;
    for (size_t t = 0; t < tables.size(); ++t) {
      const TableConfig& config = tables[t]->config();
      const int64_t number = static_cast<int64_t>(t);
      if (copies_.is_copy(number) && copies_.rank_of(number) != config.owner) {
        throw InvalidArgument(config.Label() + ": `copy_of` must be the rank of the copy, " +
                              std::to_string(config.owner) + ".");
      }
      all.push_back({config.dim, config.is_unsigned, config.hashed ? 0 : config.num_legal(), config.owner, ways[t],
                     exchange_type_ == FloatType::kFloat32 ? 4 : 2, copies_.is_copy(number),
                     copies_.AnswersTo(config.rank, number)});
    }
    return all;
  }

  // What is wrong with the input, keys left out. `route` comes after it; what it throws is a fault, since peers wait to be told.
  template <class RouteThem>
  Fault Find(const Tables& tables, const Inputs& in, const RouteThem& route) const {
    Fault fault;
    try {
      for (int f = 0; f < in.keys.size(); ++f) {
        fault.feature = f;
        const std::string reported = ReportedText(in.row_splits[f]);
        if (!reported.empty()) throw InvalidArgument(reported);
        fault.status = Inspect(*tables[table_of_[f]], in.keys[f], in.row_splits[f], in.weights[f], limits_[f]);
        if (fault.status.status != kFine) return fault;
      }
      fault.feature = 0;
      route(&fault);
    } catch (const std::exception& e) {  // peers wait: tell them rather than stop
      fault.refusal = e.what();
      fault.status = {kRefused, 0};
    }
    return fault;
  }

  // Whether rows of the feature may be summed by their owners, as far as it says itself: weights may want a gradient, and that
  // takes rows. (Splits that are missing are for ExchangeCombine to refuse.)
  bool MaySum(const Inputs& in, int f) const {
    return combiners_[f] != "rows" && in.weights[f].NumElements() == 0 && in.row_splits[f].NumElements() > 0;
  }

  // Throws OutOfMemory where ExchangeCombine would find no memory, and nobody to tell it to any more. On the CPU the pool
  // keeps what it gave until then; nothing touches it before. floats: of all answers.
  void CheckMemory(OpKernelContext* ctx, const Tables& tables, const Inputs& in, int64_t floats) const {
    std::vector<Wanted> answers, outputs;
    int64_t all_floats = 0;
    const auto want = [&](int64_t rows, int64_t dim, std::vector<Wanted>* wanted) {
      wanted->push_back({tensorflow::DT_FLOAT, CheckedShape({rows, dim})});
      all_floats += wanted->back().shape.num_elements();
    };
    try {
      want(floats, 1, &answers);
      for (int f = 0; f < in.keys.size(); ++f) {
        if (!copies_.AnswersTo(tables[0]->config().rank, table_of_[f])) continue;
        const int64_t segments = in.row_splits[f].NumElements() - 1;
        const int64_t rows = combiners_[f] == "rows" ? in.keys[f].NumElements() : std::max<int64_t>(segments, 0);
        want(rows, tables[table_of_[f]]->config().dim, &outputs);
      }
      if (all_floats < 1 << 18) return;
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

  // Outputs messages that say what is wrong, and answers that have nothing.
  void Tell(OpKernelContext* ctx, const Fault& fault, const Inputs& in, int world) const {
    std::fill_n(Output(ctx, 2, CheckedShape({world}))->flat<int32_t>().data(), world,
                static_cast<int32_t>(kAnswerHeader));
    if (fault.status.status == kRefused) {
      return Refuse(ctx, fault.refusal, program_, in.call, in.mode, fault.feature, world);
    }
    Tensor* words = Output(ctx, 0, CheckedShape({world * int64_t{kHeaderWords}}));
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    std::fill_n(splits->flat<int32_t>().data(), world, static_cast<int32_t>(kHeaderWords));
    for (int r = 0; r < world; ++r) {
      const int64_t at = r * int64_t{kHeaderWords};
      if (is_wide_) {
        WriteHeader(program_, in.call, in.mode, fault.status, fault.feature, static_cast<int64_t*>(words->data()) + at);
      } else {
        WriteHeader(program_, in.call, in.mode, fault.status, fault.feature, static_cast<int32_t*>(words->data()) + at);
      }
    }
  }

  // Outputs the messages but for what follows their counts, [route.words[r]] for rank r from word_begin[r] on.
  template <class Word>
  Word* OutputMessages(OpKernelContext* ctx, const Inputs& in, const sok::Route& route, int world, int64_t num_tables,
                       int64_t* word_begin) const {
    const int64_t num_counts = CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()));
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    Tensor* asked = Output(ctx, 2, CheckedShape({world}));
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
      Word* to = words + word_begin[r] - num_counts - kHeaderWords;
      to = WriteHeader(program_, in.call, in.mode, {}, 0, to);
      for (int64_t c = 0; c < num_counts; ++c) *to++ = static_cast<Word>(route.counts[r * num_counts + c]);
    }
    return words;
  }

  void CheckSizes(const sok::Route& route, int num_tables, int world) const {
    const int64_t before = kHeaderWords + CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()));
    for (int r = 0; r < world; ++r) {
      if (before + route.words[r] > kPlaceMask) throw InvalidArgument("one message must have less than 2^31 words.");
    }
  }

  std::vector<std::string> combiners_;  // [F]

 private:
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

  bool counts_ids_;
};

}  // namespace sok
