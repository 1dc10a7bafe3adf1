// Tables that change their placement: rows, slots and notes of changes, out of one table and into another.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "op.h"
#include "shapes.h"
#include "table_resource.h"

namespace sok {
namespace {

using SlotSetInfo = TableStore::SlotSetInfo;
using tensorflow::tstring;

// Slot sets as text, for workers that run the same library.
class Words {
 public:
  template <class T>
  void Put(const T& value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void PutText(const std::string& text) {
    Put<uint64_t>(text.size());
    text_ += text;
  }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

class WordReader {
 public:
  explicit WordReader(const tstring& text) : text_(text) {}
  template <class T>
  T Get() {
    T value;
    Need(sizeof(T));
    std::memcpy(&value, text_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::string Text() {
    const uint64_t size = Get<uint64_t>();
    Need(size);
    at_ += size;
    return text_.substr(at_ - size, size);
  }
  bool AtEnd() const { return at_ == text_.size(); }

 private:
  void Need(uint64_t bytes) const {
    if (bytes > text_.size() - at_) throw InvalidArgument("`sets` is cut off.");
  }
  const std::string text_;
  size_t at_ = 0;
};

std::string ToWords(const std::vector<SlotSetInfo>& sets) {
  Words out;
  for (const SlotSetInfo& set : sets) {
    out.PutText(set.name);
    out.PutText(RuleName(set.rule.rule));
    out.Put<RuleSettings>(set.rule);
    out.Put(set.calls);
    out.Put<uint64_t>(set.missed.size());
    for (const AlphaRun& run : set.missed) out.Put(run);
  }
  return out.Take();
}

std::vector<SlotSetInfo> SetsArg(OpKernelContext* ctx, int index) {
  WordReader in(ScalarArg<tstring>(ctx->input(index), "sets"));
  std::vector<SlotSetInfo> sets;
  while (!in.AtEnd()) {
    SlotSetInfo set;
    set.name = in.Text();
    set.rule.rule = ParseRule(in.Text());
    static_cast<RuleSettings&>(set.rule) = in.Get<RuleSettings>();
    set.calls = in.Get<int64_t>();
    const uint64_t runs = in.Get<uint64_t>();
    for (uint64_t i = 0; i < runs; ++i) set.missed.push_back(in.Get<AlphaRun>());
    sets.push_back(std::move(set));
  }
  return sets;
}

int64_t FloatsOf(const std::vector<SlotSetInfo>& sets, int64_t dim) {
  int64_t floats = dim;
  for (const SlotSetInfo& set : sets) floats += set.rule.slot_floats(dim);
  return floats;
}

// The slot sets of a table, with what they have missed since the save before; and the floats of a row with its slots.
REGISTER_OP("Sok>TableSets")
    .Input("handle: resource")
    .Output("sets: string")
    .Output("floats: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

void TableSets(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  const std::vector<SlotSetInfo> sets = resource->table().Changes().sets;
  ScalarOutput<tstring>(ctx, 0) = ToWords(sets);
  ScalarOutput<int64_t>(ctx, 1) = FloatsOf(sets, resource->config().dim);
}
SOK_HOST_KERNEL("Sok>TableSets", FunctionOp<TableSets>, "handle", "sets", "floats");

// Of each key its row and all its slots, in the order of TableSets; and whether it has changed since the save before, as of the
// save that was begun.
REGISTER_OP("Sok>TableReadKeys")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Output("values: float")
    .Output("changed: bool")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      c->set_output(0, c->Matrix(c->Dim(keys, 0), c->UnknownDim()));
      c->set_output(1, keys);
      return absl::OkStatus();
    });

void TableReadKeys(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  EmbeddingTable& table = resource->table();
  resource->CheckKeyType(ctx->input(1));
  CheckRank(ctx->input(1), 1, "keys");
  const int64_t n = ctx->input(1).NumElements(), dim = table.config().dim;
  const std::vector<SlotSetInfo> sets = table.SlotSets();
  const int64_t floats = FloatsOf(sets, dim);
  Tensor *values = Output(ctx, 0, CheckedShape({n, floats})), *changed = Output(ctx, 1, CheckedShape({n}));
  const ScratchLease scratch;
  TableStore::RowTarget target;
  target.keys = scratch.get()->Get<uint64_t>(n);
  target.rows = scratch.get()->Get<float>(n * dim);
  std::vector<std::pair<const float*, int64_t>> columns = {{target.rows, dim}};
  for (const SlotSetInfo& set : sets) {
    const int64_t width = set.rule.slot_floats(dim);
    target.slots.push_back(scratch.get()->Get<float>(n * width));
    columns.emplace_back(target.slots.back(), width);
  }
  const TfExecutor executor(ctx);
  table.ReadKeys({executor}, KeyWords(ctx->input(1), scratch.get()), n, target, changed->flat<bool>().data());
  float* out = values->flat<float>().data();
  for (int64_t i = 0; i < n; ++i) {
    for (const auto& [from, width] : columns) out = std::copy_n(from + i * width, width, out);
  }
}
SOK_HOST_KERNEL("Sok>TableReadKeys", FunctionOp<TableReadKeys>, "handle", "keys", "values", "changed");

// Rows that have changed since the save before, as of the save that was begun: keys, and of each what TableReadKeys gives.
REGISTER_OP("Sok>TableReadChanges")
    .Input("handle: resource")
    .Output("keys: key_dtype")
    .Output("values: float")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Matrix(c->UnknownDim(), c->UnknownDim()));
      return absl::OkStatus();
    });

// Keeps what it is given, in pieces: how many rows will come is not known before.
class ChangesSink : public TableStore::RowSink {
 public:
  explicit ChangesSink(int64_t dim) : dim_(dim) {}

  int64_t Begin(int64_t, const std::vector<SlotSetInfo>& sets) override {
    widths_ = {dim_};
    for (const SlotSetInfo& set : sets) widths_.push_back(set.rule.slot_floats(dim_));
    floats_ = FloatsOf(sets, dim_);
    return std::max<int64_t>(1, kPieceFloats / floats_);
  }
  TableStore::RowTarget Allocate(int64_t n) override {
    pieces_.push_back(
        {std::vector<uint64_t>(static_cast<size_t>(n)), std::vector<float>(static_cast<size_t>(n * floats_))});
    rows_ += n;
    TableStore::RowTarget target;
    target.keys = pieces_.back().keys.data();
    target.rows = pieces_.back().values.data();
    float* next = target.rows + n * widths_[0];
    for (size_t set = 1; set < widths_.size(); ++set) {
      target.slots.push_back(next);
      next += n * widths_[set];
    }
    return target;
  }
  void Commit() override {}

  int64_t rows() const { return rows_; }
  int64_t floats() const { return floats_; }
  // keys [rows], values [rows, floats]: of each row its columns, then the slots of each set. Gives back memory on the way.
  void MoveTo(uint64_t* keys, float* values) {
    for (Piece& piece : pieces_) {
      const auto n = static_cast<int64_t>(piece.keys.size());
      keys = std::copy(piece.keys.begin(), piece.keys.end(), keys);
      int64_t at = 0;
      for (const int64_t width : widths_) {
        const float* from = piece.values.data() + n * at;
        for (int64_t i = 0; i < n; ++i) std::copy_n(from + i * width, width, values + i * floats_ + at);
        at += width;
      }
      values += n * floats_;
      piece = {};
    }
  }

 private:
  static constexpr int64_t kPieceFloats = 1 << 20;
  struct Piece {
    std::vector<uint64_t> keys;
    std::vector<float> values;  // the rows of all, then the slots of all of each set
  };
  const int64_t dim_;
  int64_t floats_ = 0, rows_ = 0;
  std::vector<int64_t> widths_;
  std::vector<Piece> pieces_;
};

void TableReadChanges(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  resource->CheckKeyType(Tensor(ctx->expected_output_dtype(0), TensorShape({0})));
  ChangesSink sink(resource->config().dim);
  const TfExecutor executor(ctx);
  resource->table().ReadChanges({executor}, &sink);
  Tensor* keys = Output(ctx, 0, CheckedShape({sink.rows()}));
  Tensor* values = Output(ctx, 1, CheckedShape({sink.rows(), sink.floats()}));
  std::vector<uint64_t> words(static_cast<size_t>(sink.rows()));
  sink.MoveTo(words.data(), values->flat<float>().data());
  StoreKeys(words.data(), sink.rows(), keys);
}
SOK_HOST_KERNEL("Sok>TableReadChanges", FunctionOp<TableReadChanges>, "handle", "keys", "values");

// Keys that were erased since the save before, as of the save that was begun.
REGISTER_OP("Sok>TableErasedKeys")
    .Input("handle: resource")
    .Output("keys: key_dtype")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn(VectorShape);

void TableErasedKeys(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  resource->CheckKeyType(Tensor(ctx->expected_output_dtype(0), TensorShape({0})));
  const std::vector<uint64_t> words = resource->table().SavedErased();
  const auto n = static_cast<int64_t>(words.size());
  StoreKeys(words.data(), n, Output(ctx, 0, CheckedShape({n})));
}
SOK_HOST_KERNEL("Sok>TableErasedKeys", FunctionOp<TableErasedKeys>, "handle", "keys");

// Makes an empty table one that will hold what others held: with their slot sets, and if `base` names a save, with what has been
// called since that. `save` names what is taken: what comes twice under one name counts once.
REGISTER_OP("Sok>TableTakeSets")
    .Input("handle: resource")
    .Input("sets: string")
    .Input("base: string")
    .Input("save: string")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

void TableTakeSets(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  EmbeddingTable& table = resource->table();
  std::vector<SlotSetInfo> sets = SetsArg(ctx, 1);
  const std::string base = ScalarArg<tstring>(ctx->input(2), "base");
  if (base.empty()) {
    for (SlotSetInfo& set : sets) set.missed.clear();
  } else if (table.Changes().base.empty()) {
    table.BeginSave();
    table.EndSave(base);
  }
  table.SkipCalls(ScalarArg<tstring>(ctx->input(3), "save"), sets);
}
SOK_HOST_KERNEL("Sok>TableTakeSets", FunctionOp<TableTakeSets>, "handle", "sets", "base", "save");

// Stores what TableReadKeys has read, of a table with these sets; `columns` as in TableLoad.
REGISTER_OP("Sok>TableStoreKeys")
    .Input("handle: resource")
    .Input("sets: string")
    .Input("keys: Tkey")
    .Input("values: float")
    .Input("changed: bool")
    .Input("columns: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

void TableStoreKeys(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  EmbeddingTable& table = resource->table();
  const std::vector<SlotSetInfo> sets = SetsArg(ctx, 1);
  resource->CheckKeyType(ctx->input(2));
  CheckRank(ctx->input(2), 1, "keys");
  const int64_t n = ctx->input(2).NumElements();
  TableStore::RowValues values;
  if (ctx->input(5).NumElements() != 0) {
    CheckShape(ctx->input(5), TensorShape({4}), "columns");
    const auto given = ctx->input(5).vec<int64_t>();
    values.columns = {given(0), given(1), given(2), given(3)};
  }
  const TableStore::Columns& columns = values.columns;
  const int64_t own = table.config().dim, dim = columns.dim > 0 ? columns.dim : own;
  if (columns.dim > 0 && (columns.n < 1 || columns.from < 0 || columns.n > dim - columns.from || columns.to < 0 ||
                          columns.n > own - columns.to)) {
    throw InvalidArgument(table.Label() + ": `columns` lie beyond its rows, or beyond those that come.");
  }
  CheckShape(ctx->input(3), {n, FloatsOf(sets, dim)}, "values");
  CheckShape(ctx->input(4), {n}, "changed");
  const ScratchLease scratch;
  std::vector<std::pair<float*, int64_t>> parts = {{scratch.get()->Get<float>(n * dim), dim}};
  for (const SlotSetInfo& set : sets) {
    const int64_t width = set.rule.slot_floats(dim);
    parts.emplace_back(scratch.get()->Get<float>(n * width), width);
    values.slots.push_back(parts.back().first);
  }
  const float* from = ctx->input(3).flat<float>().data();
  for (int64_t i = 0; i < n; ++i) {
    for (const auto& [to, width] : parts) {
      std::copy_n(from, width, to + i * width);
      from += width;
    }
  }
  values.keys = KeyWords(ctx->input(2), scratch.get());
  values.rows = parts[0].first;
  values.n = n;
  values.changed = ctx->input(4).flat<bool>().data();
  const TfExecutor executor(ctx);
  table.Restore({executor}, scratch.get(), sets, values);
}
SOK_HOST_KERNEL("Sok>TableStoreKeys", FunctionOp<TableStoreKeys>, "handle", "sets", "keys", "values", "changed",
                "columns");

// Keys that count as erased since the save before, where they are this rank's.
REGISTER_OP("Sok>TableNoteErased")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

void TableNoteErased(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  resource->CheckKeyType(ctx->input(1));
  CheckRank(ctx->input(1), 1, "keys");
  const ScratchLease scratch;
  resource->table().NoteErased(KeyWords(ctx->input(1), scratch.get()), ctx->input(1).NumElements());
}
SOK_HOST_KERNEL("Sok>TableNoteErased", FunctionOp<TableNoteErased>, "handle", "keys");

// The table takes the place of `before`, which is none any more. stats: made, refused, evicted.
REGISTER_OP("Sok>TableSucceed")
    .Input("handle: resource")
    .Input("before: resource")
    .Input("stats: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

void TableSucceed(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0), before = TableArg(ctx, 1);
  CheckShape(ctx->input(2), TensorShape({3}), "stats");
  const int64_t* stats = Int64(ctx->input(2));
  PolicyCounts counts;
  counts.made = stats[0];
  counts.refused = stats[1];
  counts.evicted = stats[2];
  resource->table().Succeed(before->table(), counts);
  resource->ids = before->ids.load();
  before->Leave();
}
SOK_HOST_KERNEL("Sok>TableSucceed", FunctionOp<TableSucceed>, "handle", "before", "stats");

}  // namespace
}  // namespace sok
