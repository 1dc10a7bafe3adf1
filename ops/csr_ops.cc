// From indices of a sparse matrix or cube, in any order, to row splits.
#include <algorithm>
#include <cstdint>

#include "input_limits.h"
#include "op.h"
#include "sok/segment_sum.h"

namespace sok {
namespace {

bool IsCount(int64_t rows) { return rows >= 0 && rows <= INT32_MAX; }

REGISTER_OP("Sok>SparseToCsr")
    .Input("row: int64")  // [N], or the indices of a matrix [N, 2], or of a cube [N, 3]: of sample, slot and place
    .Input("keys: Tkey")
    .Input("weights: float")
    .Input("num_rows: int64")
    .Output("row_splits: int64")
    .Output("csr_keys: Tkey")
    .Output("csr_weights: float")
    .Output("order: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("slot_num: int >= 1 = 1")
    .Attr("wants_order: bool = true")  // false: `order` is empty
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle row, keys;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &row));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      const int64_t columns = !c->RankKnown(row) || c->Rank(row) == 1 ? 2 : c->Value(c->Dim(row, 1));
      if ((c->RankKnown(row) && c->Rank(row) > 2) ||
          (columns != 2 && columns != 3 && columns != InferenceContext::kUnknownDim)) {
        return absl::InvalidArgumentError("`row` must have rank 1, or 2 or 3 columns.");
      }
      // A number that makes no sense is for the kernel to report.
      const Tensor* num_rows = c->input_tensor(3);
      const bool is_known = num_rows != nullptr && IsCount(num_rows->scalar<int64_t>()());
      const DimensionHandle splits = is_known ? c->MakeDim(num_rows->scalar<int64_t>()() + 1) : c->UnknownDim();
      c->set_output(0, c->Vector(splits));
      c->set_output(1, keys);
      c->set_output(2, c->input(2));
      bool wants_order;
      TF_RETURN_IF_ERROR(c->GetAttr("wants_order", &wants_order));
      c->set_output(3, wants_order ? keys : c->Vector(0));
      return absl::OkStatus();
    });

class SparseToCsrOp : public GuardedOp {
 public:
  explicit SparseToCsrOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("slot_num", &slot_num_));
    Check(ctx->GetAttr("wants_order", &wants_order_));
    if (slot_num_ > INT32_MAX) throw InvalidArgument("`slot_num` must be below 2^31.");
  }
  void Run(OpKernelContext* ctx) override {
    const Tensor &row = ctx->input(0), &keys = ctx->input(1), &weights = ctx->input(2);
    const int64_t columns = row.dims() == 2 ? row.dim_size(1) : 1;
    if (row.dims() < 1 || row.dims() > 2 || (row.dims() == 2 && columns != 2 && columns != 3)) {
      throw InvalidArgument("`row` must have rank 1, or 2 or 3 columns. Received: shape " + row.shape().DebugString() +
                            ".");
    }
    const int64_t n = row.dim_size(0);
    CheckShape(keys, TensorShape({n}), "keys");
    WeightsOrNull(weights, n);
    const int64_t segments = ScalarArg<int64_t>(ctx->input(3), "num_rows");
    if (!IsCount(segments)) return Report(ctx, {kBadNumRows, segments});
    const int64_t* at = Int64(row);
    if (columns == 1) return Split(ctx, [at](int64_t i) { return at[i]; }, n, segments);
    if (columns == 2) return Split(ctx, [at](int64_t i) { return at[2 * i]; }, n, segments);
    // A slot beyond slot_num would land in the next sample: no segment is -1.
    const int64_t slots = slot_num_;
    const auto segment = [at, slots](int64_t i) {
      const int64_t sample = at[3 * i], slot = at[3 * i + 1];
      return slot < 0 || slot >= slots || sample < 0 || sample > INT32_MAX ? -1 : sample * slots + slot;
    };
    Split(ctx, segment, n, segments);
  }

 private:
  // segment(i): that of key i.
  template <class Segment>
  void Split(OpKernelContext* ctx, const Segment& segment, int64_t n, int64_t segments) const {
    Tensor splits;
    try {
      Check(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({segments + 1}), &splits));
    } catch (const std::exception&) {  // peers wait: the lookup tells them
      return Report(ctx, {kBadNumRows, segments});
    }
    auto* split = reinterpret_cast<int64_t*>(splits.flat<int64_t>().data());
    int64_t last = -1;  // segments up to this one have begun
    bool sorted = true;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t s = segment(i);
      if (s < 0 || s >= segments) return Report(ctx, {kRowOutOfRange, i});
      sorted = sorted && s >= last;
      for (; last < s; ++last) split[last + 1] = i;
    }
    for (; last < segments; ++last) split[last + 1] = n;
    if (sorted && !wants_order_) {  // the usual case: nothing moves
      ctx->set_output(0, splits);
      ctx->set_output(1, ctx->input(1));
      ctx->set_output(2, ctx->input(2));
      Output(ctx, 3, TensorShape({0}));
      return;
    }
    Move(ctx, segment, n, segments, splits);
  }

  template <class Segment>
  void Move(OpKernelContext* ctx, const Segment& segment, int64_t n, int64_t segments, Tensor splits) const {
    const Tensor &keys = ctx->input(1), &weights = ctx->input(2);
    const ScratchLease scratch;
    const uint32_t *offsets, *positions;
    try {
      int64_t* rows = scratch.get()->Get<int64_t>(n);
      for (int64_t i = 0; i < n; ++i) rows[i] = segment(i);
      SortById(scratch.get(), rows, n, segments, &offsets, &positions);
    } catch (const std::exception&) {
      return Report(ctx, {kBadNumRows, segments});
    }
    std::copy(offsets, offsets + segments + 1, splits.flat<int64_t>().data());
    ctx->set_output(0, splits);
    Tensor* order = Output(ctx, 3, TensorShape({wants_order_ ? n : 0}));
    if (wants_order_) std::copy(positions, positions + n, order->flat<int64_t>().data());
    Tensor* csr_keys = Output(ctx, 1, keys.shape());
    Tensor* csr_weights = Output(ctx, 2, weights.shape());
    const uint64_t* words = KeyWords(keys, scratch.get());
    uint64_t* moved = scratch.get()->Get<uint64_t>(n);
    for (int64_t i = 0; i < n; ++i) moved[i] = words[positions[i]];
    StoreKeys(moved, n, csr_keys);
    const float* w = weights.flat<float>().data();
    for (int64_t i = 0; i < weights.NumElements(); ++i) csr_weights->flat<float>()(i) = w[positions[i]];
  }

  static void Report(OpKernelContext* ctx, const InputStatus& bad) {
    WriteReport(ctx, 0, bad);
    for (const int index : {1, 2, 3}) Output(ctx, index, TensorShape({0}));
  }

  int64_t slot_num_ = 1;
  bool wants_order_ = true;
};
SOK_HOST_KERNEL("Sok>SparseToCsr", SparseToCsrOp, "row", "keys", "weights", "num_rows", "row_splits", "csr_keys",
                "csr_weights", "order");

}  // namespace
}  // namespace sok
