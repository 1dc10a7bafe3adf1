#include "detail/held_rows.h"

#include <algorithm>
#include <utility>

namespace sok {
namespace {

constexpr int64_t kBlockFloats = int64_t{8} << 20;

}  // namespace

int64_t HeldRows::Begin(int64_t num_rows, const std::vector<TableStore::SlotSetInfo>& sets) {
  num_rows_ = num_rows;
  sets_ = sets;
  row_floats_ = dim_;
  for (const TableStore::SlotSetInfo& set : sets_) row_floats_ += set.rule.slot_floats(dim_);
  return std::max<int64_t>(1, kBlockFloats / row_floats_);
}

void HeldRows::Erased(const std::vector<uint64_t>& keys) {
  is_delta_ = true;
  erased_ = keys;
}

TableStore::RowTarget HeldRows::Allocate(int64_t n) {
  Block block;
  block.n = n;
  block.keys.reset(new uint64_t[static_cast<size_t>(n)]);
  block.values.reset(new float[static_cast<size_t>(n * row_floats_)]);
  blocks_.push_back(std::move(block));
  bytes_ += BytesOf(blocks_.back());
  return TargetOf(blocks_.back(), 0);
}

int64_t HeldRows::BytesOf(const Block& block) const {
  return block.n * (static_cast<int64_t>(sizeof(uint64_t)) + row_floats_ * static_cast<int64_t>(sizeof(float)));
}

TableStore::RowTarget HeldRows::TargetOf(const Block& block, int64_t first) const {
  TableStore::RowTarget target{block.keys.get() + first, block.values.get() + first * dim_, {}};
  float* slots = block.values.get() + block.n * dim_;
  for (const TableStore::SlotSetInfo& set : sets_) {
    const int64_t floats = set.rule.slot_floats(dim_);
    target.slots.push_back(slots + first * floats);
    slots += block.n * floats;
  }
  return target;
}

void HeldRows::GiveTo(TableStore::RowSink* sink) {
  const int64_t rows_per_batch = sink->Begin(num_rows_, sets_);
  if (is_delta_) sink->Erased(erased_);
  for (Block& block : blocks_) {
    for (int64_t first = 0; first < block.n; first += rows_per_batch) {
      const int64_t count = std::min(rows_per_batch, block.n - first);
      const TableStore::RowTarget from = TargetOf(block, first), to = sink->Allocate(count);
      std::copy_n(from.keys, count, to.keys);
      std::copy_n(from.rows, count * dim_, to.rows);
      for (size_t s = 0; s < sets_.size(); ++s) {
        const int64_t floats = count * sets_[s].rule.slot_floats(dim_);
        if (floats > 0) std::copy_n(from.slots[s], floats, to.slots[s]);
      }
      sink->Commit();
    }
    bytes_ -= BytesOf(block);
    block = Block();
  }
}

}  // namespace sok
