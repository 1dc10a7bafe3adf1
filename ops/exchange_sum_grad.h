// The gradient of ExchangeServe: which addends there are, on every device.
#pragma once

#include <cstdint>
#include <vector>

#include "exchange_op.h"

namespace sok {

// What one rank sends for one thing that it asked: by rows a gradient for each key, else one for each piece.
struct AskedGrad {
  int64_t table = 0, n = 0;
  const int64_t* row_ids = nullptr;     // [n]
  const float* values = nullptr;        // [n, dim] or [segments, dim]
  const int64_t* row_splits = nullptr;  // [segments + 1] of the pieces; null: by rows
  int64_t segments = 0;
};

// Of the inputs only `counts` is read here; the others may lie on a device.
class ExchangeSumGradOp : public GuardedOp {
 public:
  explicit ExchangeSumGradOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("dims", &dims_));
    Check(ctx->GetAttr("table_of", &table_of_));
    Check(ctx->GetAttr("capacities", &capacities_));
    int64_t num_tables;
    Check(ctx->GetAttr("T", &num_tables));
    if (static_cast<int64_t>(dims_.size()) != num_tables)
      throw InvalidArgument("`dims` must have one value per table.");
    if (!capacities_.empty() && capacities_.size() != dims_.size())
      throw InvalidArgument("`capacities` must have one value per table, or none.");
    CheckDims(dims_);
    copies_ = Copies(ctx, num_tables);
    for (const int64_t table : table_of_) {
      if (table < 0 || table >= static_cast<int64_t>(dims_.size())) {
        throw InvalidArgument("`table_of` must name one of the tables.");
      }
    }
  }

 protected:
  int num_tables() const { return static_cast<int>(dims_.size()); }
  const std::vector<int64_t>& dims() const { return dims_; }
  // Of each table, what its row numbers are below, or nothing.
  const std::vector<int64_t>& capacities() const { return capacities_; }

  // All there is, table after table. Throws InvalidArgument for inputs whose sizes do not fit.
  std::vector<AskedGrad> Grads(OpKernelContext* ctx) const {
    const Tensor &packed = ctx->input(0), &counts = ctx->input(1), &piece_splits = ctx->input(2);
    CheckRank(packed, 1, "packed");
    CheckRank(counts, 2, "counts");
    CheckRank(piece_splits, 1, "piece_splits");
    const int64_t world = counts.dim_size(0), width = counts.dim_size(1);
    if (world < 1 || width != CountsPerRank(num_tables(), static_cast<int64_t>(table_of_.size()))) {
      throw InvalidArgument("`counts` must have one column per table and two per feature.");
    }
    const int64_t* count = Int64(counts);
    for (int64_t c = 0; c < world * width; ++c) {
      if (count[c] < 0 || count[c] > kPlaceMask) throw InvalidArgument("`counts` must lie in [0, 2^31).");
    }
    const AnswerLayout layout(count, world, dims_, table_of_, copies_, AnswerLayout::kGradients);
    if (layout.end(world - 1) != packed.NumElements()) {
      throw InvalidArgument("`packed` does not have the gradients that `counts` say.");
    }
    std::vector<int64_t> ids_left;
    for (int t = 0; t < num_tables(); ++t) {
      CheckRank(ctx->input(3 + t), 1, "row_ids");
      ids_left.push_back(ctx->input(3 + t).NumElements());
    }
    std::vector<AskedGrad> grads;
    const int64_t* splits = Int64(piece_splits);
    int64_t splits_left = piece_splits.NumElements();
    for (const Asked& asked : AllAsked(count, world, num_tables(), table_of_)) {
      const Tensor& row_ids = ctx->input(3 + static_cast<int>(asked.table));
      AskedGrad grad;
      grad.table = asked.table;
      grad.n = asked.keys;
      grad.row_ids = Int64(row_ids) + (row_ids.NumElements() - ids_left[asked.table]);
      grad.values = packed.flat<float>().data() + layout.begin(asked.rank, asked.column);
      ids_left[asked.table] -= asked.keys;
      if (ids_left[asked.table] < 0) throw InvalidArgument("`row_ids` must have one value for each key.");
      if (asked.feature >= 0) {
        splits_left -= asked.rows + 1;
        if (splits_left < 0) throw InvalidArgument("`piece_splits` do not fit `counts`.");
        grad.row_splits = splits;
        grad.segments = asked.rows;
        splits += asked.rows + 1;
      }
      grads.push_back(grad);
    }
    for (const int64_t left : ids_left) {
      if (left != 0) throw InvalidArgument("`row_ids` must have one value for each key.");
    }
    if (splits_left != 0) throw InvalidArgument("`piece_splits` do not fit `counts`.");
    return grads;
  }

 private:
  std::vector<int64_t> table_of_, dims_, capacities_;
  Copies copies_;
};

}  // namespace sok
