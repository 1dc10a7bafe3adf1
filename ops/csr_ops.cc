// From (segment of each key, any order) to row splits.
#include "input_limits.h"
#include "op.h"
#include "sok/segment_sum.h"

namespace sok {
namespace {

bool IsCount(int64_t rows) { return rows >= 0 && rows <= INT32_MAX; }

REGISTER_OP("Sok>SparseToCsr")
    .Input("row: int64")
    .Input("keys: Tkey")
    .Input("weights: float")
    .Input("num_rows: int64")
    .Output("row_splits: int64")
    .Output("csr_keys: Tkey")
    .Output("csr_weights: float")
    .Output("order: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle row, keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &row));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      // A number that makes no sense is for the kernel to report.
      const Tensor* num_rows = c->input_tensor(3);
      const bool is_known = num_rows != nullptr && IsCount(num_rows->scalar<int64_t>()());
      const DimensionHandle splits = is_known ? c->MakeDim(num_rows->scalar<int64_t>()() + 1) : c->UnknownDim();
      c->set_output(0, c->Vector(splits));
      c->set_output(1, keys);
      c->set_output(2, c->input(2));
      c->set_output(3, row);
      return absl::OkStatus();
    });

class SparseToCsrOp : public GuardedOp {
 public:
  using GuardedOp::GuardedOp;
  void Run(OpKernelContext* ctx) override {
    const Tensor &row = ctx->input(0), &keys = ctx->input(1), &weights = ctx->input(2);
    CheckRank(row, 1, "row");
    const int64_t n = row.NumElements();
    CheckShape(keys, TensorShape({n}), "keys");
    const float* w = WeightsOrNull(weights, n);
    const int64_t segments = ScalarArg<int64_t>(ctx->input(3), "num_rows");
    if (!IsCount(segments)) return Report(ctx, {kBadNumRows, segments});
    const int64_t* rows = Int64(row);
    bool sorted = true;
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] < 0 || rows[i] >= segments) return Report(ctx, {kRowOutOfRange, i});
      sorted = sorted && (i == 0 || rows[i - 1] <= rows[i]);
    }
    const ScratchLease scratch;
    const uint32_t *offsets, *positions;
    Tensor splits;
    try {
      Check(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({segments + 1}), &splits));
      SortById(scratch.get(), rows, n, segments, &offsets, &positions);
    } catch (const std::exception&) {  // peers wait: the lookup tells them
      return Report(ctx, {kBadNumRows, segments});
    }
    ctx->set_output(0, splits);
    Tensor* order = Output(ctx, 3, TensorShape({n}));
    std::copy(offsets, offsets + segments + 1, splits.flat<int64_t>().data());
    std::copy(positions, positions + n, order->flat<int64_t>().data());
    if (sorted) {  // the usual case: nothing moves
      ctx->set_output(1, keys);
      ctx->set_output(2, weights);
      return;
    }
    Tensor* csr_keys = Output(ctx, 1, keys.shape());
    Tensor* csr_weights = Output(ctx, 2, weights.shape());
    const uint64_t* words = KeyWords(keys, scratch.get());
    uint64_t* moved = scratch.get()->Get<uint64_t>(n);
    for (int64_t i = 0; i < n; ++i) moved[i] = words[positions[i]];
    StoreKeys(moved, n, csr_keys);
    if (w != nullptr)
      for (int64_t i = 0; i < n; ++i) csr_weights->flat<float>()(i) = w[positions[i]];
  }

 private:
  static void Report(OpKernelContext* ctx, const InputStatus& bad) {
    WriteReport(ctx, 0, bad);
    for (const int index : {1, 2, 3}) Output(ctx, index, TensorShape({0}));
  }
};
SOK_HOST_KERNEL("Sok>SparseToCsr", SparseToCsrOp, "row", "keys", "weights", "num_rows", "row_splits", "csr_keys",
                "csr_weights", "order");

}  // namespace
}  // namespace sok
