// Gradients of copies, which are computed once and go to all ranks, on every device (docs/design/exchange.md).
#pragma once

#include <cstdint>
#include <vector>

#include "exchange_op.h"

namespace sok {

// Of the inputs `packed` may lie on a device.
class ExchangeToCopiesOp : public GuardedOp {
 public:
  explicit ExchangeToCopiesOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("rank", &rank_));
    Check(ctx->GetAttr("dims", &dims_));
    Check(ctx->GetAttr("table_of", &table_of_));
    CheckDims(dims_);
    const int64_t num_tables = static_cast<int64_t>(dims_.size());
    copies_ = Copies(ctx, num_tables);
    for (const int64_t table : table_of_) {
      if (table < 0 || table >= num_tables) throw InvalidArgument("`table_of` must name one of the tables.");
    }
  }

 protected:
  struct Piece {
    int64_t from, to, size;
  };

  // What is to be copied of `packed` to make what is sent: what is for each rank, and, for the others, what is for this
  // rank's own copies behind it. Outputs the sizes.
  std::vector<Piece> Pieces(OpKernelContext* ctx) const {
    const Tensor &packed = ctx->input(0), &splits = ctx->input(1), &counts = ctx->input(2);
    CheckRank(packed, 1, "packed");
    CheckRank(splits, 1, "splits");
    const int64_t world = splits.NumElements();
    const int64_t width = CountsPerRank(static_cast<int64_t>(dims_.size()), static_cast<int64_t>(table_of_.size()));
    CheckShape(counts, {world, width}, "counts");
    const int64_t* count = Int64(counts);
    for (int64_t c = 0; c < world * width; ++c) {
      if (count[c] < 0 || count[c] > kPlaceMask) throw InvalidArgument("`counts` must lie in [0, 2^31).");
    }
    if (rank_ >= world) throw InvalidArgument("`rank` must be one of those that `splits` has.");
    // What this rank asked of itself is what it asked of all other copies.
    const AnswerLayout layout(count, world, dims_, table_of_, copies_, AnswerLayout::kGradients);
    const int64_t own = layout.end(rank_) - layout.begin(rank_), of_copies = layout.end(rank_) - layout.copies(rank_);
    Tensor *sent_splits = Output(ctx, 1, CheckedShape({world})), *expected = Output(ctx, 2, CheckedShape({world}));
    std::vector<Piece> pieces;
    int64_t from = 0, to = 0, own_end = 0;
    for (int64_t r = 0; r < world; ++r) {
      const int64_t size = splits.flat<int32_t>()(r);
      if (size < kAnswerHeader || size > packed.NumElements() - from || (r == rank_ && size != own)) {
        throw InvalidArgument("`splits` does not fit `packed` and `counts`.");
      }
      pieces.push_back({from, to, size});
      from += size;
      to += size;
      if (r == rank_) own_end = from;
      const int64_t more = r == rank_ ? 0 : of_copies, comes = layout.end(r) - layout.begin(r);
      if (more > 0) pieces.push_back({-1, to, more});
      to += more;
      if (size + more > kPlaceMask || comes > kPlaceMask) {
        throw InvalidArgument("a message of gradients would have 2^31 floats or more.");
      }
      sent_splits->flat<int32_t>()(r) = static_cast<int32_t>(size + more);
      expected->flat<int32_t>()(r) = static_cast<int32_t>(comes);
    }
    if (from != packed.NumElements()) throw InvalidArgument("`splits` does not fit `packed` and `counts`.");
    for (Piece& piece : pieces) {
      if (piece.from < 0) piece.from = own_end - piece.size;
    }
    return pieces;
  }

  static int64_t SizeOf(const std::vector<Piece>& pieces) { return pieces.back().to + pieces.back().size; }

 private:
  int64_t rank_ = 0;
  std::vector<int64_t> table_of_, dims_;
  Copies copies_;
};

}  // namespace sok
