// Rows of tables over files that are read before the step of their batch. Nothing is an error that the step will meet.
#include <map>
#include <string>
#include <vector>

#include "exchange_serve.h"

namespace sok {
namespace {

using KeysByTable = std::map<TableStore*, std::vector<uint64_t>>;

void ReadAhead(OpKernelContext* ctx, const KeysByTable& keys, int64_t batches) {
  const TfExecutor executor(ctx);
  for (const auto& [table, of_table] : keys) {
    const ProfileSpan span("read_ahead", table->config().name, {static_cast<int64_t>(of_table.size())});
    table->ReadAhead({executor}, of_table.data(), static_cast<int64_t>(of_table.size()), batches);
  }
}

// For how many batches at a time rows are read ahead.
int64_t BatchesOf(OpKernelConstruction* ctx) {
  int64_t batches;
  Check(ctx->GetAttr("batches", &batches));
  if (batches < 1) throw InvalidArgument("`batches` must be at least 1. Received: " + std::to_string(batches) + ".");
  return batches;
}

// The rows that one worker's features will ask for.
REGISTER_OP("Sok>ReadAhead")
    .Input("handles: N * resource")
    .Input("keys: Tkeys")
    .Attr("N: int >= 1")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ") >= 1")
    .Attr("batches: int >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

class ReadAheadOp final : public GuardedOp {
 public:
  explicit ReadAheadOp(OpKernelConstruction* ctx) : GuardedOp(ctx), batches_(BatchesOf(ctx)) {}

 private:
  void Run(OpKernelContext* ctx) override {
    tensorflow::OpInputList handles, keys;
    Check(ctx->input_list("handles", &handles));
    Check(ctx->input_list("keys", &keys));
    if (handles.size() != keys.size()) throw InvalidArgument("`keys` must have one tensor per table.");
    std::vector<RefCountPtr<TableResource>> tables;
    KeysByTable by_table;
    const ScratchLease scratch;
    for (int i = 0; i < keys.size(); ++i) {
      tables.push_back(TableArg(ctx, i));
      tables.back()->CheckKeyType(keys[i]);
      std::vector<uint64_t>& all = by_table[&tables.back()->store()];
      const uint64_t* words = KeyWords(keys[i], scratch.get());
      all.insert(all.end(), words, words + keys[i].NumElements());
    }
    ReadAhead(ctx, by_table, batches_);
  }

  const int64_t batches_;
};
SOK_HOST_KERNEL("Sok>ReadAhead", ReadAheadOp, "handles", "keys");

// The rows that an ExchangeServe of the same messages will answer with.
REGISTER_OP("Sok>ExchangeReadAhead")
    .Input("handles: T * resource")
    .Input("words: Tword")
    .Input("splits: int32")
    .Input("call: int64")
    .Input("insert: bool")
    .SOK_EXCHANGE_ATTRS.Attr("dims: list(int)")
    .Attr("batches: int >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

class ExchangeReadAheadOp final : public ExchangeServeOp {
 public:
  explicit ExchangeReadAheadOp(OpKernelConstruction* ctx) : ExchangeServeOp(ctx, true), batches_(BatchesOf(ctx)) {}

 private:
  void Serve(OpKernelContext* ctx, const Tables& tables, const Requests& requests, bool) const override {
    KeysByTable by_table;
    for (size_t i = 0; i < requests.all.size(); ++i) {
      TableStore* table = &tables[requests.all[i].table]->store();
      if (!table->config().storage.has_file()) continue;
      std::vector<uint64_t>& all = by_table[table];
      all.resize(all.size() + static_cast<size_t>(requests.all[i].keys));
      ReadKeys(requests, i, table->config().is_unsigned, all.data() + all.size() - requests.all[i].keys);
    }
    ReadAhead(ctx, by_table, batches_);
  }
  void AnswerBadNews(OpKernelContext*, int, AnswerStatus, const std::string&) const override {}
  void OutputBadNews(OpKernelContext*, const std::vector<float>&) const override {}

  const int64_t batches_;
};
SOK_HOST_KERNEL("Sok>ExchangeReadAhead", ExchangeReadAheadOp, "handles", "words", "splits", "call", "insert");

}  // namespace
}  // namespace sok
