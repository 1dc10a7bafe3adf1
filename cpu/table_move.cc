// Moving rows to a table that is placed otherwise.
#include <algorithm>
#include <mutex>
#include <utility>

#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"

namespace sok {

void EmbeddingTable::ReadKeys(const Cpu& cpu, const uint64_t* keys, int64_t n, const RowTarget& target,
                              bool* changed) const {
  SharedLock lock(mutex_);
  std::vector<std::pair<uint32_t, uint64_t>> rows(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t row = FindRow(keys[i]);
    if (row == kNoRow) throw InvalidArgument(Label() + ": key " + config_.KeyText(keys[i]) + " has no row.");
    rows[static_cast<size_t>(i)] = {row, keys[i]};
    changed[i] = saved_.IsSaved(row);
  }
  Records records;
  CopyAllOut(cpu, rows.data(), n, target, &records);
}

std::vector<EmbeddingTable::Lost> EmbeddingTable::TakeLost() {
  const Lock lock(mutex_);
  tells_losses_ = true;
  return std::exchange(lost_, {});
}

std::vector<uint64_t> EmbeddingTable::SavedErased() const {
  SharedLock lock(mutex_);
  return saved_.saved_erased();
}

void EmbeddingTable::NoteErased(const uint64_t* keys, int64_t n) {
  Lock lock(mutex_);
  if (!saved_.is_on()) return;
  saved_.ReserveErased(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    if (OwnerOf(keys[i]) == config_.rank && FindRow(keys[i]) == kNoRow) saved_.MarkErased(keys[i]);
}

void EmbeddingTable::Succeed(const EmbeddingTable& before, const PolicyCounts& counts) {
  std::lock(mutex_, before.mutex_);
  Lock mine(mutex_, std::adopt_lock), theirs(before.mutex_, std::adopt_lock);
  // A table that never had a row has given nobody an id of one.
  if (before.num_rows_ > 0 || before.losses_ > 0 || before.epoch_ > 0) epoch_ = first_epoch_ = before.epoch_ + 1;
  ++losses_;
  made_ = counts.made;
  refused_ = counts.refused;
  evicted_ = counts.evicted;
  step = before.step.load();
}

}  // namespace sok
