// Owners answer what they were asked for, and hand the gradients of their rows on (docs/design/exchange.md).
#include <algorithm>
#include <string>
#include <vector>

#include "exchange_copies.h"
#include "exchange_serve.h"
#include "exchange_sum_grad.h"
#include "shapes.h"
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
    .SOK_EXCHANGE_ATTRS.Attr("dims: list(int)")
    .Attr("capacities: list(int) = []")  // for the gradient
    .Attr("num_askers: int >= 0 = 0")    // whose messages come; 0: all workers
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

class CpuExchangeServeOp : public ExchangeServeOp {
 public:
  using ExchangeServeOp::ExchangeServeOp;

 private:
  void Serve(OpKernelContext* ctx, const Tables& tables, const Requests& requests, bool insert) const override {
    const AnswerLayout& layout = requests.layout;
    const int64_t world = requests.answer_splits.NumElements();
    const int num_tables = static_cast<int>(tables.size());
    Tensor answers = AllocateToSend(ctx, tensorflow::DT_FLOAT, CheckedShape({layout.end(world - 1)}));
    float* out = answers.flat<float>().data();
    for (int64_t r = 0; r < world; ++r) std::fill_n(out + layout.begin(r), kAnswerHeader, 0.0f);
    static_assert(kServed == 0);

    std::vector<Tensor> row_ids;
    std::vector<int64_t*> ids;
    for (int t = 0; t < num_tables; ++t) {
      row_ids.push_back(AllocateTemp(ctx, tensorflow::DT_INT64, CheckedShape({requests.num_keys[t]})));
      ids.push_back(reinterpret_cast<int64_t*>(row_ids[t].flat<int64_t>().data()));
    }
    Tensor piece_splits = AllocateTemp(ctx, tensorflow::DT_INT64, CheckedShape({requests.num_splits}));
    int64_t* splits = reinterpret_cast<int64_t*>(piece_splits.flat<int64_t>().data());
    const ScratchLease scratch;
    std::vector<EmbeddingTable::Feature> features;
    for (size_t i = 0; i < requests.all.size(); ++i) {
      const Asked& asked = requests.all[i];
      EmbeddingTable::Feature feature;
      feature.table = &tables[asked.table]->table();
      feature.n = asked.keys;
      feature.segments = asked.rows;
      if (asked.feature >= 0) {
        PieceSplits(requests, i, splits);
        feature.row_splits = splits;
        splits += asked.rows + 1;
      }
      const bool is_answered = copies_.AnswersTo(asked.rank, asked.table);
      if (!is_answered) feature.row_splits = nullptr;  // the rank has a copy: its keys are to have rows here as there
      feature.keys = KeysOf(requests, i, feature.table->config().is_unsigned, scratch.get());
      feature.output = is_answered ? out + layout.begin(asked.rank, asked.column) : nullptr;
      feature.row_ids = ids[asked.table];
      ids[asked.table] += feature.n;
      features.push_back(feature);
    }
    const TfExecutor executor(ctx);
    EmbeddingTable::LookupGroup({executor}, scratch.get(), features.data(), static_cast<int64_t>(features.size()),
                                insert);
    ctx->set_output(0, answers);
    ctx->set_output(1, requests.answer_splits);
    if (is_ahead()) return;
    ctx->set_output(2, requests.counts);
    ctx->set_output(3, piece_splits);
    for (int t = 0; t < num_tables; ++t) ctx->set_output(4 + t, row_ids[t]);
  }

  void OutputBadNews(OpKernelContext* ctx, const std::vector<float>& answers) const override {
    Tensor* output = Output(ctx, 0, CheckedShape({static_cast<int64_t>(answers.size())}));
    std::copy(answers.begin(), answers.end(), output->flat<float>().data());
  }

  // 64-bit words in place.
  const uint64_t* KeysOf(const Requests& requests, size_t i, bool is_unsigned, Scratch* scratch) const {
    if (is_wide_) return static_cast<const uint64_t*>(requests.keys[i]);
    uint64_t* keys = scratch->Get<uint64_t>(requests.all[i].keys);
    ReadKeys(requests, i, is_unsigned, keys);
    return keys;
  }
};
SOK_CPU_KERNEL("Sok>ExchangeServe", CpuExchangeServeOp);

// What ExchangeServe would answer now, with no row made; where that is bad news, or rows change that no gradient touches, so
// that all would be sent again, an answer that says that it is none.
REGISTER_OP("Sok>ExchangePeek")
    .Input("handles: T * resource")
    .Input("words: Tword")
    .Input("splits: int32")
    .Input("call: int64")
    .Input("insert: bool")
    .Output("answers: float")
    .Output("answer_splits: int32")
    .SOK_EXCHANGE_ATTRS.Attr("dims: list(int)")
    .Attr("is_stale: bool = false")  // nothing is sent again, so rows that move are sent as well
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

class ExchangePeekOp final : public CpuExchangeServeOp {
 public:
  explicit ExchangePeekOp(OpKernelConstruction* ctx) : CpuExchangeServeOp(ctx, true) {
    Check(ctx->GetAttr("is_stale", &is_stale_));
  }

 private:
  bool MaySend(const Tables& tables) const override {
    return is_stale_ || std::none_of(tables.begin(), tables.end(),
                                     [](const auto& table) { return table->table().MovesUntouchedRows(); });
  }

  bool is_stale_ = false;
};
SOK_CPU_KERNEL("Sok>ExchangePeek", ExchangePeekOp);

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
    .Attr("copy_of: list(int) = []")
    .Attr("dims: list(int)")
    .Attr("capacities: list(int) = []")
    .SetShapeFn([](InferenceContext* c) {
      int64_t tables;
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("T", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      if (static_cast<int64_t>(dims.size()) != tables) {
        return absl::InvalidArgumentError("`dims` must have one value per table.");
      }
      return DistinctRowsShape(c, dims);
    });

class CpuExchangeSumGradOp final : public ExchangeSumGradOp {
 public:
  using ExchangeSumGradOp::ExchangeSumGradOp;

  void Run(OpKernelContext* ctx) override {
    const ProfileSpan span("backward", name(), {-1, -1, static_cast<int64_t>(ctx->input(0).TotalBytes())}, "op");
    std::vector<std::vector<RowAddends>> addends(dims().size());
    for (const AskedGrad& grad : Grads(ctx)) {
      if (grad.row_splits != nullptr && !AreSplits(grad.row_splits, grad.segments, grad.n)) {
        throw InvalidArgument("`piece_splits` do not fit `counts`.");
      }
      RowAddends a;
      a.n = grad.n;
      a.row_ids = grad.row_ids;
      a.values = grad.values;
      a.row_splits = grad.row_splits;
      a.segments = grad.segments;
      addends[grad.table].push_back(a);
    }
    std::vector<RowSums> tables;
    for (int t = 0; t < num_tables(); ++t) {
      tables.push_back({dims()[t], addends[t].data(), static_cast<int64_t>(addends[t].size())});
    }
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    SumRows({executor}, scratch.get(), tables.data(), num_tables(), [&](int64_t table, int64_t rows) {
      const int t = static_cast<int>(table);
      RowSumsTarget target;
      target.row_ids = reinterpret_cast<int64_t*>(AllocateOutput(ctx, t, CheckedShape({rows}))->flat<int64_t>().data());
      target.sums = AllocateOutput(ctx, num_tables() + t, CheckedShape({rows, dims()[t]}))->flat<float>().data();
      return target;
    });
  }

 private:
  static bool AreSplits(const int64_t* splits, int64_t rows, int64_t keys) {
    for (int64_t p = 0; p < rows; ++p)
      if (splits[p + 1] < splits[p]) return false;
    return splits[0] == 0 && splits[rows] == keys;
  }
};
SOK_CPU_KERNEL("Sok>ExchangeSumGrad", CpuExchangeSumGradOp);

// Of gradients in the layout of the answers, those that are sent: rows of copies, which came from this rank's own, get theirs
// on all ranks.
REGISTER_OP("Sok>ExchangeToCopies")
    .Input("packed: float")
    .Input("splits: int32")
    .Input("counts: int64")  // of ExchangeServe
    .Output("sent: float")
    .Output("sent_splits: int32")
    .Output("expected: int32")  // what each rank sends here
    .Attr("rank: int >= 0")
    .Attr("table_of: list(int)")
    .Attr("copy_of: list(int) = []")
    .Attr("dims: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(2, c->input(1));
      return MessagesShape(c);
    });

class CpuExchangeToCopiesOp final : public ExchangeToCopiesOp {
 public:
  using ExchangeToCopiesOp::ExchangeToCopiesOp;

  void Run(OpKernelContext* ctx) override {
    constexpr int64_t kFloats = int64_t{1} << 16;
    const ProfileSpan span("backward", name(), {-1, -1, static_cast<int64_t>(ctx->input(0).TotalBytes())}, "op");
    const std::vector<Piece> whole = Pieces(ctx);
    std::vector<Piece> pieces;
    for (const Piece& piece : whole) {
      for (int64_t first = 0; first < piece.size; first += kFloats) {
        pieces.push_back({piece.from + first, piece.to + first, std::min(kFloats, piece.size - first)});
      }
    }
    Tensor sent = AllocateToSend(ctx, tensorflow::DT_FLOAT, CheckedShape({SizeOf(whole)}));
    const float* from = ctx->input(0).flat<float>().data();
    float* to = sent.flat<float>().data();
    const TfExecutor executor(ctx);
    Cpu{executor}.executor.For(static_cast<int64_t>(pieces.size()), kFloats, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) std::copy_n(from + pieces[p].from, pieces[p].size, to + pieces[p].to);
    });
    ctx->set_output(0, sent);
  }
};
SOK_CPU_KERNEL("Sok>ExchangeToCopies", CpuExchangeToCopiesOp);

}  // namespace
}  // namespace sok
