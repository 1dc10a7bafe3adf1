// What ranks say to one another: keys to their owners, rows back, and bad news in time (docs/design/exchange.md).
//
// A rank that cannot go on must not stop before a collective, or its peers wait for ever. So what is wrong with this
// rank's input travels in the header of its messages, and every rank raises the same error after the collective.
#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "input_status.h"
#include "op.h"
#include "sok/partition.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {
namespace {

// First float of a header row of answers.
enum ServeStatus { kServed = 0, kFull = 1, kNoMemory = 2 };

struct InputStatus {
  int64_t status = kFine;
  int64_t detail = 0;
};

// What row_splits hold: segments, nothing (shape [0]: keys are not grouped), or a report that the input is bad:
// [-status, detail], written by SparseToCsr and CheckInput in place of splits that make no sense.
struct Splits {
  const int64_t* begin = nullptr;
  int64_t segments = 0;
  InputStatus status;
};

Splits ReadSplits(const Tensor& row_splits, int64_t n) {
  CheckRank(row_splits, 1, "row_splits");
  Splits splits;
  if (row_splits.NumElements() == 0) return splits;
  if (row_splits.NumElements() == 2 && Int64(row_splits)[0] < 0) {
    splits.status = {-Int64(row_splits)[0], Int64(row_splits)[1]};
    return splits;
  }
  splits.segments = CheckRowSplits(row_splits, n);
  splits.begin = Int64(row_splits);
  return splits;
}

struct InputLimits {
  int64_t slot_num = 1;
  int64_t max_nnz = 0;          // keys per segment; 0: unlimited
  int64_t max_feature_num = 0;  // keys per sample; 0: unlimited

  explicit InputLimits(OpKernelConstruction* ctx) {
    Check(ctx->GetAttr("slot_num", &slot_num));
    Check(ctx->GetAttr("max_nnz", &max_nnz));
    Check(ctx->GetAttr("max_feature_num", &max_feature_num));
  }

  InputStatus Inspect(const EmbeddingTable& table, const uint64_t* keys, int64_t n, const Splits& row_splits) const {
    if (row_splits.status.status != kFine) return row_splits.status;
    for (int64_t i = 0; i < n; ++i)
      if (!table.IsLegal(keys[i])) return {kKeyOutOfRange, static_cast<int64_t>(keys[i])};
    const int64_t* begin = row_splits.begin;
    for (int64_t s = 0; max_nnz > 0 && s < row_splits.segments; ++s)
      if (begin[s + 1] - begin[s] > max_nnz) return {kTooManyInSegment, s};
    for (int64_t s = 0; max_feature_num > 0 && s < row_splits.segments; s += slot_num)
      if (begin[std::min(s + slot_num, row_splits.segments)] - begin[s] > max_feature_num) {
        return {kTooManyInSample, s / slot_num};
      }
    return {};
  }

  [[noreturn]] void Raise(const EmbeddingTable& table, int from, const InputStatus& bad) const {
    const std::string who = table.config().world_size == 1 ? "" : "input of rank " + std::to_string(from) + ": ";
    const std::string where = table.Label() + ": " + who;
    const std::string at = std::to_string(bad.detail);
    switch (bad.status) {
      case kKeyOutOfRange:
        try {
          table.CheckKey(static_cast<uint64_t>(bad.detail));
        } catch (const InvalidArgument& e) {
          throw InvalidArgument(who.empty() ? e.what() : who + e.what());
        }
        break;
      case kTooManyInSegment:
        throw InvalidArgument(where + "sample " + std::to_string(bad.detail / slot_num) + ", feature " +
                              std::to_string(bad.detail % slot_num) + " has more than max_nnz = " +
                              std::to_string(max_nnz) + " keys. Raise max_nnz, or cut the input.");
      case kTooManyInSample:
        throw InvalidArgument(where + "sample " + at + " has more than max_feature_num = " +
                              std::to_string(max_feature_num) + " keys. Raise max_feature_num, or cut the input.");
      case kBadSplits:
        throw InvalidArgument(where + "`row_splits` must start with 0, never fall, and end with the number of keys.");
      case kRowOutOfRange:
        throw InvalidArgument(where + "the row index of key number " + at +
                              " is outside the dense_shape. Check the SparseTensor's indices and dense_shape.");
      case kRowsNotWhole:
        throw InvalidArgument(where + "the number of rows must be batch * slot_num, a multiple of " +
                              std::to_string(slot_num) + ". Received: " + at + ".");
      case kWrongSlotNum:
        throw InvalidArgument(where + "every sample must have slot_num = " + std::to_string(slot_num) +
                              " features. Received: " + at + ".");
      case kUneven:
        throw InvalidArgument(where + "every feature must have the same number of ids (nnz_per_slot), without gaps.");
      case kWeightsDiffer:
        throw InvalidArgument(where + "`weights` must have one weight for each id, at the same places as the ids.");
    }
    throw InvalidArgument(where + "unknown status " + std::to_string(bad.status) +
                          ". All workers must run the same version of sok and the same program.");
  }
};

bool IsWide(tensorflow::DataType key) { return key == tensorflow::DT_INT64 || key == tensorflow::DT_UINT64; }

REGISTER_OP("Sok>CheckInput")
    .Input("row_splits: int64")
    .Input("ok: bool")
    .Input("detail: int64")
    .Output("checked_splits: int64")
    .Attr("problem: {'rows_not_whole', 'wrong_slot_num', 'uneven', 'weights_differ'}")
    .SetShapeFn([](InferenceContext* c) {
      // Splits, or a report of two numbers: but whatever follows a report is never run.
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

class CheckInputOp : public OpKernel {
 public:
  explicit CheckInputOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string problem;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("problem", &problem));
    status_ = problem == "rows_not_whole"   ? kRowsNotWhole
              : problem == "wrong_slot_num" ? kWrongSlotNum
              : problem == "uneven"         ? kUneven
                                            : kWeightsDiffer;
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const Tensor& row_splits = ctx->input(0);
      const bool is_report = row_splits.NumElements() == 2 && Int64(row_splits)[0] < 0;
      if (ScalarArg<bool>(ctx->input(1), "ok") || is_report) {
        ctx->set_output(0, row_splits);
        return;
      }
      Tensor* report;
      Check(ctx->allocate_output(0, TensorShape({2}), &report));
      report->flat<int64_t>()(0) = -status_;
      report->flat<int64_t>()(1) = ScalarArg<int64_t>(ctx->input(2), "detail");
    });
  }

 private:
  KeyStatus status_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>CheckInput").Device(tensorflow::DEVICE_CPU), CheckInputOp);

REGISTER_OP("Sok>RouteKeys")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("row_splits: int64")
    .Output("words: Tword")
    .Output("splits: int32")
    .Output("index: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("Tword: {int64, int32}")
    .Attr("slot_num: int >= 1 = 1")
    .Attr("max_nnz: int >= 0 = 0")
    .Attr("max_feature_num: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      c->set_output(2, keys);
      return absl::OkStatus();
    });

class RouteKeysOp : public OpKernel {
 public:
  explicit RouteKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] { limits_ = std::make_unique<InputLimits>(ctx); });
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const EmbeddingTable& table = resource->table();
      const Tensor& keys = ctx->input(1);
      resource->CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      if (IsWide(keys.dtype()) != (ctx->expected_output_dtype(0) == tensorflow::DT_INT64)) {
        throw InvalidArgument("`Tword` must be int64 for 64-bit keys and int32 for 32-bit ones.");
      }
      const int64_t n = keys.NumElements();
      const ProfileSpan span("route", table.config().name, {n});
      const int world = table.config().world_size;
      Splits row_splits;
      try {
        row_splits = ReadSplits(ctx->input(2), n);
      } catch (const InvalidArgument&) {
        row_splits.status = {kBadSplits, 0};  // peers wait: tell them rather than stop
      }
      const TfExecutor executor(ctx);
      const ScratchLease scratch;
      const uint64_t* key_words = KeyWords(keys, scratch.get());
      Tensor *words, *splits, *index;
      Check(ctx->allocate_output(2, TensorShape({n}), &index));
      int64_t* index_out = reinterpret_cast<int64_t*>(index->flat<int64_t>().data());

      const InputStatus status = limits_->Inspect(table, key_words, n, row_splits);
      Route route;
      if (status.status == kFine) {
        route = RouteKeys({executor}, scratch.get(), key_words, n, world, table.config().is_unsigned, index_out);
      } else {
        int64_t* none = scratch.get()->Get<int64_t>(world);
        std::fill(none, none + world, 0);
        route.counts = none;
        std::fill(index_out, index_out + n, 0);
      }
      Check(ctx->allocate_output(0, TensorShape({world * kHeaderWords + route.num_unique}), &words));
      Check(ctx->allocate_output(1, TensorShape({world}), &splits));
      for (int r = 0; r < world; ++r) splits->flat<int32_t>()(r) = static_cast<int32_t>(kHeaderWords + route.counts[r]);
      if (words->dtype() == tensorflow::DT_INT64) {
        Write<int64_t>(route, status, world, words);
      } else {
        Write<int32_t>(route, status, world, words);
      }
    });
  }

 private:
  template <class Word>
  static void Write(const Route& route, const InputStatus& status, int world, Tensor* words) {
    Word* out = words->flat<Word>().data();
    const uint64_t* key = route.keys;
    for (int r = 0; r < world; ++r) {
      *out++ = static_cast<Word>(status.status);
      *out++ = static_cast<Word>(status.detail);
      for (int64_t i = 0; i < route.counts[r]; ++i) *out++ = static_cast<Word>(*key++);
    }
  }

  std::unique_ptr<InputLimits> limits_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>RouteKeys").Device(tensorflow::DEVICE_CPU), RouteKeysOp);

REGISTER_OP("Sok>ValidateCsr")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("row_splits: int64")
    .Output("checked_keys: Tkey")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("slot_num: int >= 1 = 1")
    .Attr("max_nnz: int >= 0 = 0")
    .Attr("max_feature_num: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

class ValidateCsrOp : public OpKernel {
 public:
  explicit ValidateCsrOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] { limits_ = std::make_unique<InputLimits>(ctx); });
  }
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const Tensor& keys = ctx->input(1);
      resource->CheckKeyType(keys);
      CheckRank(keys, 1, "keys");
      const ScratchLease scratch;
      const Splits row_splits = ReadSplits(ctx->input(2), keys.NumElements());
      const EmbeddingTable& table = resource->table();
      const ProfileSpan span("route", table.config().name, {keys.NumElements()});
      const InputStatus status = limits_->Inspect(table, KeyWords(keys, scratch.get()), keys.NumElements(), row_splits);
      if (status.status != kFine) limits_->Raise(table, table.config().rank, status);
      ctx->set_output(0, keys);
    });
  }

 private:
  std::unique_ptr<InputLimits> limits_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ValidateCsr").Device(tensorflow::DEVICE_CPU), ValidateCsrOp);

REGISTER_OP("Sok>ServeKeys")
    .Input("handle: resource")
    .Input("words: Tword")
    .Input("splits: int32")
    .Input("insert: bool")
    .Output("rows: float")
    .Output("row_ids: int64")
    .Output("row_splits: int32")
    .Attr("Tword: {int64, int32}")
    .Attr("dim: int >= 1")
    .Attr("slot_num: int >= 1 = 1")
    .Attr("max_nnz: int >= 0 = 0")
    .Attr("max_feature_num: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      ShapeHandle unused, splits;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &splits));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      const DimensionHandle answers = c->UnknownDim();
      c->set_output(0, c->Matrix(answers, dim));
      c->set_output(1, c->Vector(answers));
      c->set_output(2, splits);
      return absl::OkStatus();
    });

class ServeKeysOp : public OpKernel {
 public:
  explicit ServeKeysOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      Check(ctx->GetAttr("dim", &dim_));
      limits_ = std::make_unique<InputLimits>(ctx);
    });
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      EmbeddingTable& table = resource->table();
      resource->CheckDim(dim_);
      const Tensor &words = ctx->input(1), &splits = ctx->input(2);
      CheckRank(words, 1, "words");
      CheckShape(splits, TensorShape({table.config().world_size}), "splits");
      if (IsWide(resource->key_dtype()) != (words.dtype() == tensorflow::DT_INT64)) {
        throw InvalidArgument(table.Label() + ": `words` must be int64 for 64-bit keys and int32 for 32-bit ones.");
      }
      const bool insert = ScalarArg<bool>(ctx->input(3), "insert");
      if (words.dtype() == tensorflow::DT_INT64) {
        Serve<int64_t>(ctx, &table, words, splits, insert);
      } else {
        Serve<int32_t>(ctx, &table, words, splits, insert);
      }
    });
  }

 private:
  template <class Word>
  void Serve(OpKernelContext* ctx, EmbeddingTable* table, const Tensor& words, const Tensor& splits, bool insert) {
    const int world = table->config().world_size;
    const bool is_unsigned = table->config().is_unsigned;
    const Word* in = words.flat<Word>().data();
    int64_t total = 0;
    for (int r = 0; r < world; ++r) {
      const int32_t size = splits.flat<int32_t>()(r);
      if (size < kHeaderWords)
        throw InvalidArgument(table->Label() + ": message of rank " + std::to_string(r) + " has no header.");
      total += size;
    }
    if (total != words.NumElements()) {
      throw InvalidArgument(table->Label() + ": `splits` must sum to the number of words, " +
                            std::to_string(words.NumElements()) + ". Received: " + std::to_string(total) + ".");
    }
    auto key_of = [is_unsigned](Word word) {
      return is_unsigned ? static_cast<uint64_t>(static_cast<std::make_unsigned_t<Word>>(word))
                         : static_cast<uint64_t>(static_cast<int64_t>(word));
    };
    int64_t at = 0;
    for (int r = 0; r < world; ++r) {
      if (in[at] != kFine) limits_->Raise(*table, r, {in[at], static_cast<int64_t>(key_of(in[at + 1]))});
      at += splits.flat<int32_t>()(r);
    }

    const ScratchLease scratch;
    const int64_t n = total - world * kHeaderWords, answers = n + world;
    const ProfileSpan span("find", table->config().name, {n, n, answers * dim_ * int64_t{sizeof(float)}});
    uint64_t* keys = scratch.get()->Get<uint64_t>(n);
    int64_t* place = scratch.get()->Get<int64_t>(n);
    Tensor *rows, *row_ids, *row_splits;
    Check(ctx->allocate_output(0, TensorShape({answers, dim_}), &rows));
    Check(ctx->allocate_output(1, TensorShape({answers}), &row_ids));
    Check(ctx->allocate_output(2, splits.shape(), &row_splits));
    float* out = rows->flat<float>().data();
    int64_t* ids = reinterpret_cast<int64_t*>(row_ids->flat<int64_t>().data());
    std::vector<int64_t> headers;
    int64_t count = 0, answer = 0;
    at = 0;
    for (int r = 0; r < world; ++r) {
      const int64_t size = splits.flat<int32_t>()(r);
      row_splits->flat<int32_t>()(r) = static_cast<int32_t>(size - kHeaderWords + 1);
      headers.push_back(answer);
      ids[answer] = -1;
      std::fill(out + answer * dim_, out + (answer + 1) * dim_, static_cast<float>(kServed));
      ++answer;
      for (int64_t i = kHeaderWords; i < size; ++i) {
        keys[count] = key_of(in[at + i]);
        place[count++] = answer++;
      }
      at += size;
    }

    const TfExecutor executor(ctx);
    ServeStatus status = kServed;
    try {
      table->Lookup({executor}, scratch.get(), keys, n, insert, place, out, ids);
    } catch (const TableFull&) {
      status = kFull;
    } catch (const OutOfMemory&) {
      status = kNoMemory;
    }
    if (status == kServed) return;
    // Peers wait for these rows: answer with the news, in the promised shape.
    std::fill(out, out + answers * dim_, 0.0f);
    std::fill(ids, ids + answers, -1);
    for (const int64_t header : headers) out[header * dim_] = static_cast<float>(status);
  }

  int64_t dim_ = 1;
  std::unique_ptr<InputLimits> limits_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>ServeKeys").Device(tensorflow::DEVICE_CPU), ServeKeysOp);

REGISTER_OP("Sok>CheckServed")
    .Input("handle: resource")
    .Input("rows: float")
    .Input("splits: int32")
    .Output("checked_rows: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

class CheckServedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const EmbeddingTable& table = resource->table();
      const Tensor &rows = ctx->input(1), &splits = ctx->input(2);
      CheckRank(rows, 2, "rows");
      CheckShape(splits, TensorShape({table.config().world_size}), "splits");
      resource->CheckDim(rows.dim_size(1));
      int64_t at = 0;
      for (int r = 0; r < table.config().world_size; ++r) {
        const int64_t size = splits.flat<int32_t>()(r);
        if (size < 1 || at + size > rows.dim_size(0)) throw InvalidArgument("`splits` does not fit `rows`.");
        const float status = rows.flat<float>()(at * rows.dim_size(1));
        at += size;
        if (status == static_cast<float>(kServed)) continue;
        if (status == static_cast<float>(kNoMemory)) {
          throw OutOfMemory(table.Label() + ": rank " + std::to_string(r) + " has no memory for new rows.");
        }
        throw TableFull(table.Label() + ": the shard of rank " + std::to_string(r) + " is full: all " +
                        std::to_string(table.config().capacity) +
                        " rows are in use and there are new keys. It stored nothing of this step. Raise "
                        "max_vocabulary_size_per_gpu (the capacity of each worker's shard).");
      }
      ctx->set_output(0, rows);
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>CheckServed").Device(tensorflow::DEVICE_CPU), CheckServedOp);

}  // namespace
}  // namespace sok
