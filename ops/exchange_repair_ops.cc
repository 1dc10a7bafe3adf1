// Rows that went home ahead of their step: the owner sends those again that have changed since, and the asker puts them
// where they belong (docs/design/exchange.md).
#include "sok/exchange_repair.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "exchange_op.h"
#include "shapes.h"

namespace sok {
namespace {

// Where each answer begins: [world + 1]. Throws InvalidArgument, naming the splits.
std::vector<int64_t> BeginsOf(const Tensor& splits, int64_t world, const Tensor& floats, const char* name) {
  CheckRank(floats, 1, name);
  CheckShape(splits, {world}, name);
  std::vector<int64_t> begin{0};
  for (int64_t r = 0; r < world; ++r) {
    const int64_t size = splits.flat<int32_t>()(r);
    if (size < kAnswerHeader || begin.back() + size > floats.NumElements()) break;
    begin.push_back(begin.back() + size);
  }
  if (static_cast<int64_t>(begin.size()) != world + 1 || begin.back() != floats.NumElements()) {
    throw InvalidArgument(std::string("the splits of `") + name + "` do not fit it.");
  }
  return begin;
}

bool IsServed(const float* answer) { return answer[0] == static_cast<float>(kServed); }

// For each rank a repair of what it was sent ahead, or the whole answer: if nothing went ahead, or it is bad news, or the
// repair would be longer. Counts the rows in their tables. Stale: nothing is repaired.
REGISTER_OP("Sok>ExchangeRepair")
    .Input("handles: T * resource")
    .Input("answers: float")
    .Input("splits: int32")
    .Input("counts: int64")
    .Input("ahead: float")
    .Input("ahead_splits: int32")
    .Output("repairs: float")
    .Output("repair_splits: int32")
    .Attr("T: int >= 1")
    .Attr("table_of: list(int)")
    .Attr("copy_of: list(int) = []")
    .Attr("dims: list(int)")
    .Attr("is_stale: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(1, c->Vector(c->UnknownDim()));
      return VectorShape(c);
    });

class ExchangeRepairOp : public GuardedOp {
 public:
  explicit ExchangeRepairOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    int64_t num_tables;
    Check(ctx->GetAttr("T", &num_tables));
    Check(ctx->GetAttr("table_of", &table_of_));
    Check(ctx->GetAttr("dims", &dims_));
    Check(ctx->GetAttr("is_stale", &is_stale_));
    CheckDims(dims_);
    copies_ = Copies(ctx, num_tables);
    if (static_cast<int64_t>(dims_.size()) != num_tables) {
      throw InvalidArgument("`dims` must have one value per table.");
    }
    for (const int64_t table : table_of_) {
      if (table < 0 || table >= num_tables) throw InvalidArgument("`table_of` must name one of the tables.");
    }
  }

  void Run(OpKernelContext* ctx) override {
    const int at = static_cast<int>(dims_.size());
    const Tensor &answers = ctx->input(at), &counts = ctx->input(at + 2), &ahead = ctx->input(at + 3);
    CheckRank(ctx->input(at + 1), 1, "splits");
    const int64_t world = ctx->input(at + 1).NumElements();
    const std::vector<int64_t> begin = BeginsOf(ctx->input(at + 1), world, answers, "answers");
    const std::vector<int64_t> begin_ahead = BeginsOf(ctx->input(at + 4), world, ahead, "ahead");
    const ProfileSpan span("repair", name(), {-1, -1, static_cast<int64_t>(answers.TotalBytes())}, "op");
    const float *now = answers.flat<float>().data(), *before = ahead.flat<float>().data();
    std::vector<AnswerTwice> twice;
    std::vector<bool> is_whole;
    for (int64_t r = 0; r < world; ++r) {
      twice.push_back({now + begin[r], before + begin_ahead[r]});
      is_whole.push_back(!IsServed(twice[r].now) || !IsServed(twice[r].ahead) ||
                         begin[r + 1] - begin[r] != begin_ahead[r + 1] - begin_ahead[r]);
    }
    std::vector<int64_t> tables;
    std::vector<AnswerRows> rows = RowsOf(counts, world, begin, is_whole, &tables);
    std::vector<std::vector<RepairRun>> runs(static_cast<size_t>(world));
    const TfExecutor executor(ctx);
    if (!is_stale_) runs = FindChanges({executor}, twice, &rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto table = TableArg(ctx, static_cast<int>(tables[i]));
      table->rows_ahead += rows[i].rows;
      table->rows_repaired += rows[i].changed;
    }
    Write(ctx, world, begin, twice, runs, is_whole);
  }

 private:
  // What has gone ahead of each rank's answer, and of which table it is.
  std::vector<AnswerRows> RowsOf(const Tensor& counts, int64_t world, const std::vector<int64_t>& begin,
                                 const std::vector<bool>& is_whole, std::vector<int64_t>* tables) const {
    const int64_t num_tables = static_cast<int64_t>(dims_.size());
    const int64_t width = CountsPerRank(num_tables, static_cast<int64_t>(table_of_.size()));
    CheckShape(counts, {world, width}, "counts");
    const int64_t* count = Int64(counts);
    for (int64_t c = 0; c < world * width; ++c) {
      if (count[c] < 0 || count[c] > kPlaceMask) throw InvalidArgument("`counts` must lie in [0, 2^31).");
    }
    const AnswerLayout layout(count, world, dims_, table_of_, copies_, AnswerLayout::kAnswers);
    std::vector<AnswerRows> rows;
    for (int64_t r = 0; r < world; ++r) {
      if (is_whole[r]) continue;
      if (layout.end(r) - layout.begin(r) != begin[r + 1] - begin[r]) {
        throw InvalidArgument("`answers` does not have the rows that `counts` say.");
      }
      for (int64_t k = 0; k < 2 * width; ++k) {
        const int64_t c = k % width;
        const bool is_table = c < num_tables, are_copies = k >= width;  // the last of an answer
        if (count[r * width + c] == 0 || (!is_table && (c - num_tables) % 2 != 0)) continue;
        const int64_t table = is_table ? c : table_of_[(c - num_tables) / 2];
        if (copies_.is_copy(table) != are_copies || !copies_.AnswersTo(r, table)) continue;
        tables->push_back(table);
        rows.push_back({r, layout.begin(r, c) - layout.begin(r), count[r * width + c],
                        dims_[static_cast<size_t>(tables->back())]});
      }
    }
    return rows;
  }

  static void Write(OpKernelContext* ctx, int64_t world, const std::vector<int64_t>& begin,
                    const std::vector<AnswerTwice>& twice, const std::vector<std::vector<RepairRun>>& runs,
                    std::vector<bool> is_whole) {
    std::vector<int64_t> at{0};
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    for (int64_t r = 0; r < world; ++r) {
      const int64_t all = begin[r + 1] - begin[r], size = is_whole[r] ? all : RepairSize(runs[r]);
      is_whole[r] = is_whole[r] || size > all;
      splits->flat<int32_t>()(r) = static_cast<int32_t>(std::min(size, all));
      at.push_back(at.back() + std::min(size, all));
    }
    const Tensor repairs = AllocateToSend(ctx, tensorflow::DT_FLOAT, CheckedShape({at.back()}));
    ctx->set_output(0, repairs);
    for (int64_t r = 0; r < world; ++r) {
      float* out = const_cast<float*>(repairs.flat<float>().data()) + at[r];
      if (is_whole[r]) {
        std::copy_n(twice[r].now, begin[r + 1] - begin[r], out);
      } else {
        WriteRepair(twice[r].now, runs[r], out);
      }
    }
  }

  std::vector<int64_t> table_of_, dims_;
  Copies copies_;
  bool is_stale_ = false;
};
SOK_CPU_KERNEL("Sok>ExchangeRepair", ExchangeRepairOp);

// The answers that ExchangeRepair began with, of what came ahead of them and of what came in the step.
REGISTER_OP("Sok>ExchangeMend")
    .Input("ahead: float")
    .Input("ahead_splits: int32")
    .Input("repairs: float")
    .Input("repair_splits: int32")
    .Output("answers: float")
    .Output("splits: int32")
    .SetShapeFn(MessagesShape);

class ExchangeMendOp : public GuardedOp {
 public:
  explicit ExchangeMendOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {}
  void Run(OpKernelContext* ctx) override {
    const Tensor &ahead = ctx->input(0), &repairs = ctx->input(2);
    CheckRank(ctx->input(1), 1, "ahead_splits");
    const int64_t world = ctx->input(1).NumElements();
    const std::vector<int64_t> begin_ahead = BeginsOf(ctx->input(1), world, ahead, "ahead");
    const std::vector<int64_t> begin = BeginsOf(ctx->input(3), world, repairs, "repairs");
    const ProfileSpan span("mend", name(), {-1, -1, static_cast<int64_t>(ahead.TotalBytes())}, "op");
    const float *before = ahead.flat<float>().data(), *now = repairs.flat<float>().data();
    std::vector<Part> parts;
    std::vector<int64_t> at{0};
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    for (int64_t r = 0; r < world; ++r) {
      const bool is_repair = IsServed(now + begin[r]) && now[begin[r] + kRepairMark] == 1.0f;
      if (is_repair && !IsServed(before + begin_ahead[r])) {
        throw InvalidArgument("the repair of rows that went ahead does not fit them.");
      }
      const float* from = is_repair ? before + begin_ahead[r] : now + begin[r];
      const int64_t size = is_repair ? begin_ahead[r + 1] - begin_ahead[r] : begin[r + 1] - begin[r];
      splits->flat<int32_t>()(r) = static_cast<int32_t>(size);
      for (int64_t first = 0; first < size; first += kFloatsPerPart) {
        parts.push_back({from + first, at.back() + first, std::min(kFloatsPerPart, size - first)});
      }
      at.push_back(at.back() + size);
    }
    Tensor answers = AllocateTemp(ctx, tensorflow::DT_FLOAT, CheckedShape({at.back()}));
    float* out = answers.flat<float>().data();
    const TfExecutor executor(ctx);
    Cpu{executor}.executor.For(static_cast<int64_t>(parts.size()), kFloatsPerPart, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) std::copy_n(parts[p].from, parts[p].size, out + parts[p].to);
    });
    for (int64_t r = 0; r < world; ++r) {
      if (IsServed(now + begin[r]) && now[begin[r] + kRepairMark] == 1.0f) {
        ApplyRepair(now + begin[r], begin[r + 1] - begin[r], out + at[r], at[r + 1] - at[r]);
      }
    }
    ctx->set_output(0, answers);
  }

 private:
  static constexpr int64_t kFloatsPerPart = int64_t{1} << 16;
  struct Part {
    const float* from;
    int64_t to, size;
  };
};
SOK_CPU_KERNEL("Sok>ExchangeMend", ExchangeMendOp);

}  // namespace
}  // namespace sok
