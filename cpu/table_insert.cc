// Rows for keys that are new to an EmbeddingTable.
#include <algorithm>

#include "remove_row.h"
#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/reserve_more.h"
#include "table_snapshot.h"
#include "tasks.h"

namespace sok {
namespace {

constexpr int64_t kFillBlock = 32;  // rows that are filled at a time
constexpr int64_t kKeysPerInsertTask = 8192;

}  // namespace

// What must be there before a row can be written.
void EmbeddingTable::MakeRoom(int64_t row) {
  if (!rows_.Has(row)) {
    for (const auto& set : sets_) {
      if (set->rule.decays()) set->stamps.Touch(row);
      if (set->is_beside) set->beside.Touch(row);
    }
    if (keeps_keys_) row_keys_.Touch(row);
    if (by_bucket_) by_bucket_->Touch(row);
    if (rows_.tier() != nullptr) rows_.tier()->SetBeside(BytesBeside());
  }
  rows_.Touch(row);
}

void EmbeddingTable::InitRows(const MadeRow* fresh, int64_t n) {
  uint64_t keys[kFillBlock];
  float* records[kFillBlock];
  for (int64_t begin = 0; begin < n; begin += kFillBlock) {
    const int64_t count = std::min(kFillBlock, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const auto [row, key] = fresh[begin + i];
      keys[i] = key;
      records[i] = rows_.Record(row);
      for (const auto& set : sets_) {
        set->rule.FillSlots(config_.dim, set->SlotsOf(row, records[i]));
        if (set->rule.decays()) *set->Stamp(row) = static_cast<uint32_t>(set->history.calls());
      }
    }
    FillRows(config_.initializer, keys, count, config_.dim, records);
  }
}

EmbeddingTable::MadeRows EmbeddingTable::InsertHashed(const Cpu& cpu, Scratch* scratch, const uint64_t* keys,
                                                      const int64_t* missing, int64_t m, uint32_t* rows) {
  uint64_t* wanted = scratch->Get<uint64_t>(m);
  uint32_t* found = scratch->Get<uint32_t>(m);
  cpu.executor.For(m, 10, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) wanted[k] = keys[missing[k]];
  });
  MadeRows made;
  index_->InsertMissing(cpu, scratch, wanted, m, found, [&](const bool* first, int64_t num_new) {
    // The n-th new key gets the n-th row from the end of free_rows_, or else from next_row_ on.
    const int64_t num_free = static_cast<int64_t>(free_rows_.size()), taken = std::min(num_new, num_free);
    const int64_t next = next_row_ + num_new - taken;
    if (next > config_.capacity) {
      int64_t room = num_free + config_.capacity - next_row_, k = 0;
      while (!first[k] || room-- > 0) ++k;
      config_.ThrowFull(wanted[k]);
    }
    for (int64_t row = next_row_; row < next; row = (row | (rows_.rows_per_slab() - 1)) + 1) MakeRoom(row);
    saved_.MakeRoom(next);
    made = {scratch->Get<MadeRow>(num_new), num_new};
    const int64_t tasks = (m + kKeysPerInsertTask - 1) / kKeysPerInsertTask;
    int64_t* before = scratch->Get<int64_t>(tasks + 1);  // new keys before each task
    auto task_end = [&](int64_t t) { return std::min(m, (t + 1) * kKeysPerInsertTask); };
    before[0] = 0;
    ForTasks(cpu, tasks, m, [&](int64_t, int64_t t) {
      before[t + 1] = std::count(first + t * kKeysPerInsertTask, first + task_end(t), true);
    });
    for (int64_t t = 0; t < tasks; ++t) before[t + 1] += before[t];
    ForTasks(cpu, tasks, m * 10, [&](int64_t, int64_t t) {
      int64_t at = before[t];
      for (int64_t k = t * kKeysPerInsertTask; k < task_end(t); ++k) {
        if (!first[k]) continue;
        found[k] = at < num_free ? free_rows_[static_cast<size_t>(num_free - 1 - at)]
                                 : static_cast<uint32_t>(next_row_ + at - num_free);
        made.rows[at++] = {found[k], wanted[k]};
      }
    });
    next_row_ = next;
    free_rows_.resize(static_cast<size_t>(num_free - taken));
  });
  cpu.executor.For(m, 10, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) rows[missing[k]] = found[k];
  });
  return made;
}

EmbeddingTable::MadeRows EmbeddingTable::InsertIdentity(Scratch* scratch, const uint64_t* keys, const int64_t* missing,
                                                        int64_t m, uint32_t* rows) {
  const uint64_t shards = static_cast<uint64_t>(config_.partition().num_shards());
  MadeRows made = {scratch->Get<MadeRow>(m), 0};
  saved_.MakeRoom(config_.capacity);
  for (int64_t k = 0; k < m; ++k) MakeRoom(static_cast<int64_t>(keys[missing[k]] / shards));
  for (int64_t k = 0; k < m; ++k) {
    const int64_t i = missing[k];
    rows[i] = static_cast<uint32_t>(keys[i] / shards);
    if (InUse(rows[i])) continue;
    MarkInUse(rows[i], true);
    made.rows[made.n++] = {rows[i], keys[i]};
  }
  return made;
}

void EmbeddingTable::InsertMissing(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing,
                                   int64_t m, uint32_t* rows, Fresh fresh) {
  if (m == 0) return;
  CheckWhole();
  if (rows_.tier() != nullptr) {
    rows_.tier()->SetBeside(BytesBeside());
    rows_.tier()->CheckRoom();
  }
  uint32_t* made_rows = rows_.tier() == nullptr ? nullptr : scratch->Get<uint32_t>(m);
  if (candidates_) ReserveForgetting(keys, missing, m);
  if (rows_.tier() != nullptr && config_.hashed) ReserveMore(&free_rows_, static_cast<size_t>(m));  // see TakeBack
  const MadeRows made = config_.hashed ? InsertHashed(cpu, scratch, keys, missing, m, rows)
                                       : InsertIdentity(scratch, keys, missing, m, rows);
  // Nothing from here on takes memory: a row that its key can find but nobody has written must never be.
  num_rows_ += made.n;
  made_ += made.n;
  for (int64_t k = 0; saved_.is_on() && k < made.n; ++k) saved_.Mark(made.rows[k].row);
  for (int64_t k = 0; snapshot_ && k < made.n; ++k) {
    // A number that nobody had when the save began is not of the snapshot, though it may be below the limit.
    if (made.rows[k].row < snapshot_->rows) snapshot_->states[made.rows[k].row] = Snapshot::kDone;
  }
  for (int64_t k = 0; keeps_keys_ && k < made.n; ++k) *row_keys_.At(made.rows[k].row) = made.rows[k].key;
  for (int64_t k = 0; by_bucket_ && k < made.n; ++k) by_bucket_->Add(BucketOf(made.rows[k].key), made.rows[k].row);
  for (int64_t k = 0; made_rows != nullptr && k < made.n; ++k) made_rows[k] = made.rows[k].row;
  auto fill = [&](int64_t first, int64_t last) {
    cpu.executor.For(last - first, 50 + 10 * config_.dim,
                     [&](int64_t begin, int64_t end) { InitRows(made.rows + first + begin, end - begin); });
    if (candidates_) TakeHistories(made.rows + first, last - first);
  };
  try {
    if (fresh != Fresh::kNo) ForBrought(cpu, made_rows, made.n, RowUse::kWrite, fill);
    if (fresh == Fresh::kInherits) Inherit(cpu, made.rows, made.n);
  } catch (...) {  // the file has no room for rows that these push out of memory, or does not give what they inherit
    TakeBack(made);
    throw;
  }
  if (candidates_) ForgetCandidates(made.rows, made.n);
}

void EmbeddingTable::TakeBack(const MadeRows& made) {
  const bool is_watched = RowsAreWatched();
  for (int64_t k = made.n - 1; k >= 0; --k) {
    const auto [row, key] = made.rows[k];
    if (saved_.is_on()) saved_.Unmark(row);
    ForgetRow(row, key, is_watched);
  }
  num_rows_ -= made.n;
  made_ -= made.n;
  ++losses_;
}

}  // namespace sok
