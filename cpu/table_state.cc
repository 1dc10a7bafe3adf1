// Whole tables in and out: rows together with everything that optimizers keep of them.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "brought_or_break.h"
#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sort_by_row.h"
#include "table_snapshot.h"

namespace sok {
namespace {

constexpr int64_t kCopyCycles = 150;       // per row: cache misses, partly hidden by prefetching
constexpr int64_t kRowsPerPart = 1 << 19;  // of an identity table

}  // namespace

std::vector<EmbeddingTable::SlotSetInfo> EmbeddingTable::SlotSets() const {
  SharedLock lock(mutex_);
  std::vector<SlotSetInfo> sets;
  for (const auto& set : sets_) sets.push_back({set->name, set->rule, set->history.calls(), {}});
  return sets;
}

int64_t EmbeddingTable::NumParts() const {
  return config_.hashed ? index_->num_segments() : (config_.capacity + kRowsPerPart - 1) / kRowsPerPart;
}

void EmbeddingTable::RowsOfPart(int64_t part, bool changes, std::vector<std::pair<uint32_t, uint64_t>>* rows) const {
  rows->clear();
  if (config_.hashed) {
    index_->ForEachIn(part, [&](uint64_t key, uint32_t row) {
      if (!changes || saved_.IsSaved(row)) rows->emplace_back(row, key);
    });
    return;
  }
  const int64_t end = std::min((part + 1) * kRowsPerPart, config_.capacity);
  for (int64_t row = part * kRowsPerPart; row < end; ++row)
    if (InUse(row) && (!changes || saved_.IsSaved(row))) rows->emplace_back(static_cast<uint32_t>(row), KeyOfRow(row));
}

void EmbeddingTable::CopyOut(const std::pair<uint32_t, uint64_t>* rows, const float* const* records, int64_t n,
                             const RowTarget& target, int64_t begin) const {
  constexpr int64_t kAhead = 8;
  const int64_t dim = config_.dim;
  for (int64_t i = 0; i < n; ++i) {
    if (records == nullptr && i + kAhead < n) {
      const float* next = rows_.Record(rows[i + kAhead].first);
      for (int64_t at = 0; at < rows_.floats(); at += 16) __builtin_prefetch(next + at);
    }
    const auto [row, key] = rows[i];
    const float* record = records == nullptr ? rows_.Record(row) : records[i];
    float* weights = target.rows + (begin + i) * dim;
    target.keys[begin + i] = key;
    std::memcpy(weights, record, static_cast<size_t>(dim) * sizeof(float));
    for (size_t s = 0; s < sets_.size(); ++s) {
      const SlotSet& set = *sets_[s];
      const int64_t floats = set.rule.slot_floats(dim);
      if (floats == 0) continue;
      float* slots = target.slots[s] + (begin + i) * floats;
      std::memcpy(slots, set.SlotsOf(row, record), static_cast<size_t>(floats) * sizeof(float));
      if (set.rule.decays()) set.Settle(row, dim, weights, slots);  // in the copy; the row itself stays as it is
    }
  }
}

void EmbeddingTable::CopyAllOut(const Cpu& cpu, const std::pair<uint32_t, uint64_t>* rows, int64_t n,
                                const RowTarget& target, Records* records) const {
  CheckWhole();
  records->rows.clear();
  for (int64_t i = 0; rows_.tier() != nullptr && i < n; ++i) records->rows.push_back(rows[i].first);
  const float* const* all = PeekAll(cpu, records);
  cpu.executor.For(n, kCopyCycles + rows_.floats(), [&](int64_t begin, int64_t end) {
    CopyOut(rows + begin, all == nullptr ? nullptr : all + begin, end - begin, target, begin);
  });
}

void EmbeddingTable::ReadAll(const Cpu& cpu, RowSink* sink) const {
  SharedLock lock(mutex_);
  ReadRows(cpu, sink, /*changes=*/false);
}

// Expects the lock to be held.
void EmbeddingTable::ReadRows(const Cpu& cpu, RowSink* sink, bool changes) const {
  std::vector<SlotSetInfo> sets;
  for (const auto& set : sets_) {
    sets.push_back({set->name, set->rule, set->history.calls(), {}});
    if (changes) sets.back().missed = set->history.RunsAfter(set->calls_at_base);
    if (saved_.is_saving() && !snapshot_) set->calls_read.store(set->history.calls());
  }
  const int64_t rows_per_batch = sink->Begin(num_rows_, sets);
  if (changes) sink->Erased(saved_.saved_erased());
  std::vector<std::pair<uint32_t, uint64_t>> part, batch;
  Records records;
  auto flush = [&] {
    if (batch.empty()) return;
    const int64_t n = static_cast<int64_t>(batch.size());
    const RowTarget target = sink->Allocate(n);
    CopyAllOut(cpu, batch.data(), n, target, &records);
    sink->Commit();
    batch.clear();
  };
  for (int64_t p = 0; p < NumParts(); ++p) {
    RowsOfPart(p, changes, &part);
    if (config_.hashed) SortByRow(&part);  // records one behind the other, where keys came together
    for (size_t taken = 0; taken < part.size();) {
      const size_t room = static_cast<size_t>(rows_per_batch) - batch.size();
      const size_t count = std::min(room, part.size() - taken);
      batch.insert(batch.end(), part.begin() + static_cast<int64_t>(taken),
                   part.begin() + static_cast<int64_t>(taken + count));
      taken += count;
      if (static_cast<int64_t>(batch.size()) == rows_per_batch) flush();
    }
  }
  flush();
}

int64_t EmbeddingTable::Restore(const Cpu& cpu, Scratch* scratch, const std::vector<SlotSetInfo>& infos,
                                const RowValues& values) {
  CheckKeys(values.keys, values.n);
  uint64_t* mine = scratch->Get<uint64_t>(values.n);
  int64_t* source = scratch->Get<int64_t>(values.n);
  uint32_t* rows = scratch->Get<uint32_t>(values.n);
  int64_t* missing = scratch->Get<int64_t>(values.n);
  int64_t count = 0, num_missing = 0;
  for (int64_t i = 0; i < values.n; ++i) {
    if (OwnerOf(values.keys[i]) != config_.rank) continue;
    mine[count] = values.keys[i];
    source[count++] = i;
  }
  Lock lock(mutex_);
  for (const SlotSetInfo& info : infos) {
    const SlotSet* known = FindSet(info.name);
    if (known == nullptr || known->rule.rule == info.rule.rule) continue;
    throw InvalidArgument(Label() + ": slot set '" + info.name + "' belongs to rule '" + RuleName(known->rule.rule) +
                          "' here, and to '" + RuleName(info.rule.rule) + "' in what is restored.");
  }
  std::vector<SlotSet*> sets;
  for (const SlotSetInfo& info : infos) {
    const bool known = FindSet(info.name) != nullptr;
    sets.push_back(known ? const_cast<SlotSet*>(FindSet(info.name)) : FindOrAttach(info.rule, info.name));
  }
  cpu.executor.For(count, kCopyCycles, [&](int64_t begin, int64_t end) {
    bool bad = false;
    FindRows(mine + begin, end - begin, rows + begin, &bad);
  });
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] == kNoRow) missing[num_missing++] = i;
  std::vector<SlotSet*> others;
  for (const auto& set : sets_)
    if (std::find(sets.begin(), sets.end(), set.get()) == sets.end()) others.push_back(set.get());
  const int64_t rows_before = num_rows_;
  const Columns columns = values.columns.dim > 0 ? values.columns : Columns{config_.dim, 0, 0, config_.dim};
  const bool are_whole = columns.n == config_.dim && columns.dim == config_.dim;
  const bool all_new = num_missing == count && are_whole;
  InsertMissing(cpu, scratch, mine, missing, num_missing, rows, all_new ? Fresh::kNo : Fresh::kInitial);
  if (values.changed == nullptr) {
    MarkChanged(rows, count);
  } else {
    for (int64_t k = 0; saved_.is_on() && k < num_missing; ++k) saved_.Unmark(rows[missing[k]]);  // as they were made
    for (int64_t i = 0; i < count; ++i)
      if (values.changed[source[i]]) MarkChanged(rows + i, 1);
  }
  CopyAside(rows, count);
  const int64_t num_new = num_rows_ - rows_before, dim = config_.dim;
  auto store = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* record = rows_.Record(rows[i]);
      if (all_new) {  // nobody has written the record
        for (const SlotSet* set : others) set->rule.FillSlots(dim, set->SlotsOf(rows[i], record));
      }
      // Missed decay of the other sets belongs to the old weights: settle it, or it would move the new ones.
      for (const auto& set : sets_) {
        if (!set->rule.decays()) continue;
        if (!all_new) set->Settle(rows[i], dim, record, record + set->offset);
        *set->Stamp(rows[i]) = static_cast<uint32_t>(set->history.calls());
      }
      auto copy = [&](const float* from, float* to) {
        std::memcpy(to + columns.to, from + columns.from, static_cast<size_t>(columns.n) * sizeof(float));
      };
      copy(values.rows + source[i] * columns.dim, record);
      for (size_t s = 0; s < sets.size(); ++s) {
        const UpdateRule& rule = sets[s]->rule;
        const float* from = values.slots[s] + source[i] * rule.slot_floats(columns.dim);
        float* to = sets[s]->SlotsOf(rows[i], record);
        const int64_t vectors = rule.slots().vectors;
        for (int64_t k = 0; k < vectors; ++k) copy(from + k * columns.dim, to + k * dim);
        std::copy(from + vectors * columns.dim, from + rule.slot_floats(columns.dim), to + vectors * dim);
      }
    }
  };
  // No row comes twice if all were new and each made one; else the last of equal keys has to come last.
  auto store_part = [&](int64_t first, int64_t last) {
    if (num_new != count) return store(first, last);
    cpu.executor.For(last - first, kCopyCycles + rows_.floats(),
                     [&](int64_t begin, int64_t end) { store(first + begin, first + end); });
  };
  ForBroughtOrBreak(cpu, rows, count, /*is_begun=*/num_missing > 0, store_part);
  return num_new;
}

// Expects both to be locked.
void EmbeddingTable::CheckSwapLocked(const EmbeddingTable& other) const {
  const TableConfig &a = config_, &b = other.config_;
  if (a.dim != b.dim || a.capacity != b.capacity || a.hashed != b.hashed || a.is_unsigned != b.is_unsigned ||
      a.world_size != b.world_size || a.rank != b.rank || a.owner != b.owner || a.num_keys != b.num_keys ||
      !(a.policies == b.policies) || !(a.storage == b.storage)) {
    throw InvalidArgument(Label() + " and " + other.Label() + " are configured differently: they cannot swap rows.");
  }
  for (const EmbeddingTable* table : {this, &other}) {
    if (!table->snapshot_ && !table->version_) continue;
    throw FailedPrecondition(table->Label() + ": an asynchronous save is under way. Wait for its result first.");
  }
}

void EmbeddingTable::CheckSwap(const EmbeddingTable& other) const {
  if (&other == this) return;
  std::lock(mutex_, other.mutex_);
  const Lock mine(mutex_, std::adopt_lock), theirs(other.mutex_, std::adopt_lock);
  CheckSwapLocked(other);
}

void EmbeddingTable::Swap(TableStore* with) {
  if (with == this) return;
  auto* other = dynamic_cast<EmbeddingTable*>(with);
  if (other == nullptr) {
    throw InvalidArgument(Label() + " is in the memory of this process, and " + with->Label() +
                          " on a device: they cannot swap rows.");
  }
  std::lock(mutex_, other->mutex_);
  Lock mine(mutex_, std::adopt_lock), theirs(other->mutex_, std::adopt_lock);
  CheckSwapLocked(*other);
  auto keeps_versions = [](const EmbeddingTable& table) {
    return table.rows_.tier() != nullptr && table.rows_.tier()->has_versions();
  };
  const bool versions = keeps_versions(*this);  // which is this table's way to be saved, not its contents'
  if (versions && !keeps_versions(*other)) other->StartVersions();
  // A table that never had a row has given nobody an id of one: it stays as it was made, and keys may go on being row ids.
  auto is_untouched = [](const EmbeddingTable& table) {
    return table.num_rows_ == 0 && table.losses_ == 0 && table.epoch_ == 0;
  };
  const bool untouched = is_untouched(*this), other_untouched = is_untouched(*other);
  std::swap(index_, other->index_);
  rows_.Swap(&other->rows_);
  in_use_.swap(other->in_use_);
  unused_.swap(other->unused_);
  std::swap(num_rows_, other->num_rows_);
  std::swap(next_row_, other->next_row_);
  free_rows_.swap(other->free_rows_);
  sets_.swap(other->sets_);
  std::swap(history_, other->history_);
  for (auto inner : {&EmbeddingTable::candidates_, &EmbeddingTable::filter_})  // their handles stay where they are
    if (this->*inner) (this->*inner)->Swap((other->*inner).get());
  refused_keys_.clear();
  other->refused_keys_.clear();
  by_bucket_.swap(other->by_bucket_);
  std::swap(keeps_keys_, other->keeps_keys_);
  std::swap(is_broken_, other->is_broken_);
  broken_.swap(other->broken_);
  std::swap(row_keys_, other->row_keys_);
  for (EmbeddingTable* table : {this, other})
    if (keeps_versions(*table)) table->rows_.tier()->SetFacts(table->FactsForTier());
  for (auto [table, keeps] : {std::pair{this, untouched}, std::pair{other, other_untouched}}) {
    table->saved_.TurnOff();
    ++table->losses_;
    if (keeps) continue;
    ++table->epoch_;
    table->first_epoch_ = table->epoch_;
    table->erased_.Clear();
  }
}

}  // namespace sok
