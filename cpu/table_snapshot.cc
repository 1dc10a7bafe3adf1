#include "table_snapshot.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "sok/error.h"
#include "sok/file_error.h"
#include "sort_by_row.h"

namespace sok {
namespace {

constexpr int64_t kSnapshotCycles = 150;  // per row: cache misses, partly hidden by prefetching
constexpr uint32_t kFromTable = 0;        // in place of a copy's number

}  // namespace

void CopiedRecords::Take(int64_t n, uint32_t* numbers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t taken = 0;
  for (; taken < n && !free_.empty(); ++taken) {
    numbers[taken] = free_.back();
    free_.pop_back();
  }
  for (; taken < n; ++taken) {
    auto& chunk = chunks_[next_ / kPerChunk];
    if (!chunk) {
      free_.reserve(free_.capacity() + static_cast<size_t>(kPerChunk));  // so that giving back never fails
      chunk.reset(new float[static_cast<size_t>(kPerChunk * floats_)]);
      num_chunks_.fetch_add(1);
    }
    numbers[taken] = next_++;
  }
}

void CopiedRecords::GiveBack(const uint32_t* numbers, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.insert(free_.end(), numbers, numbers + n);
}

// Expects the lock to be held by this thread alone.
std::shared_ptr<EmbeddingTable::Snapshot> EmbeddingTable::MakeSnapshot(SnapshotOf of) {
  std::shared_ptr<Snapshot> made;
  try {
    int64_t words_beside = 0;
    for (const auto& set : sets_) words_beside += set->words_beside();
    made = std::make_shared<Snapshot>(config_.hashed ? next_row_ : config_.capacity, rows_.floats(), words_beside);
    made->changes = of == SnapshotOf::kChanges;
    made->num_rows = num_rows_;
    for (const auto& set : sets_) {
      made->infos.push_back({set->name, set->rule, set->history.calls(), {}});
      if (made->changes) made->infos.back().missed = set->history.RunsAfter(set->calls_at_base);
      auto frozen = std::make_unique<SlotSet>();
      frozen->name = set->name;
      frozen->rule = set->rule;
      frozen->offset = set->offset;
      frozen->is_beside = set->is_beside;
      frozen->history = set->history;
      if (set->sums) frozen->sums = std::make_unique<DecaySums>(*set->sums);
      made->sets.push_back(std::move(frozen));
    }
    if (made->changes) made->erased = saved_.saved_erased();
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(Label() + ": no memory for an asynchronous save.");
  }
  return made;
}

void EmbeddingTable::CopyAside(const uint32_t* rows, int64_t n) const {
  constexpr int64_t kAtOnce = 256;
  Snapshot* s = snapshot_.get();
  if (s == nullptr) return;
  uint32_t claimed[kAtOnce], numbers[kAtOnce];
  for (int64_t begin = 0; begin < n; begin += kAtOnce) {
    const int64_t end = std::min(n, begin + kAtOnce);
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = rows[i];
      if (row == HashTable::kNoRow || row >= s->rows || (s->changes && !saved_.IsSaved(row))) continue;
      uint32_t seen = Snapshot::kWaiting;
      if (__atomic_load_n(&s->states[row], __ATOMIC_RELAXED) == Snapshot::kWaiting &&
          __atomic_compare_exchange_n(&s->states[row], &seen, Snapshot::kBusy, false, __ATOMIC_ACQUIRE,
                                      __ATOMIC_RELAXED)) {
        claimed[count++] = row;
      }
    }
    if (count > 0) {
      bool has_memory = true;
      try {
        s->copies.Take(count, numbers);
      } catch (const std::bad_alloc&) {  // the save fails, and training goes on
        has_memory = false;
        s->no_memory.store(true);
      }
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t row = claimed[i];
        if (has_memory) {
          float* copy = s->copies.Record(numbers[i]);
          std::memcpy(copy, rows_.Peek(row, &s->unreadable), static_cast<size_t>(s->stamps_at) * sizeof(float));
          char* stamp = reinterpret_cast<char*>(copy + s->stamps_at);
          for (size_t j = 0; j < s->sets.size(); ++j) {
            const size_t bytes = static_cast<size_t>(s->sets[j]->words_beside()) * sizeof(uint32_t);
            if (bytes > 0) std::memcpy(stamp, sets_[j]->Beside(row), bytes);
            stamp += bytes;
          }
        }
        __atomic_store_n(&s->states[row], has_memory ? numbers[i] + Snapshot::kFirstCopy : Snapshot::kDone,
                         __ATOMIC_RELEASE);
      }
    }
    for (int64_t i = begin; i < end; ++i) {  // what other threads copy may not change before they have
      if (rows[i] == HashTable::kNoRow || rows[i] >= s->rows) continue;
      while (__atomic_load_n(&s->states[rows[i]], __ATOMIC_ACQUIRE) == Snapshot::kBusy) {
      }
    }
  }
}

void EmbeddingTable::SnapshotLosesRow(uint32_t row, uint64_t key) {
  Snapshot* s = snapshot_.get();
  if (s == nullptr || row >= s->rows) return;
  CopyAside(&row, 1);
  uint32_t& state = s->states[row];
  if (state != Snapshot::kWaiting && state != Snapshot::kDone)
    s->orphans.emplace_back(key, state - Snapshot::kFirstCopy);
  state = Snapshot::kDone;
}

void EmbeddingTable::CopySnapshotRows(const Cpu& cpu, const std::vector<uint32_t>& rows,
                                      const std::vector<uint32_t>& copies, const RowTarget& target) const {
  constexpr int64_t kAhead = 8;
  const Snapshot& s = *snapshot_;
  const int64_t dim = config_.dim, floats = s.stamps_at;
  Records records;
  for (size_t i = 0; rows_.tier() != nullptr && i < rows.size(); ++i)
    if (copies[i] == kFromTable) records.rows.push_back(rows[i]);
  const float* const* all = PeekAll(cpu, &records);
  std::vector<const float*> from(all == nullptr ? 0 : rows.size());
  for (size_t i = 0, taken = 0; i < from.size(); ++i)
    if (copies[i] == kFromTable) from[i] = all[taken++];
  cpu.executor.For(static_cast<int64_t>(rows.size()), kSnapshotCycles + floats, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (all == nullptr && i + kAhead < end && copies[static_cast<size_t>(i + kAhead)] == kFromTable) {
        const float* next = rows_.Record(rows[static_cast<size_t>(i + kAhead)]);
        for (int64_t at = 0; at < floats; at += 16) __builtin_prefetch(next + at);
      }
      const uint32_t row = rows[static_cast<size_t>(i)], copy = copies[static_cast<size_t>(i)];
      const float* record = copy != kFromTable ? s.copies.Record(copy - Snapshot::kFirstCopy)
                            : all == nullptr   ? rows_.Record(row)
                                               : from[static_cast<size_t>(i)];
      const char* stamps = reinterpret_cast<const char*>(record + floats);  // of a copy
      float* weights = target.rows + i * dim;
      std::memcpy(weights, record, static_cast<size_t>(dim) * sizeof(float));
      for (size_t j = 0; j < s.sets.size(); ++j) {
        const SlotSet& set = *s.sets[j];
        const int64_t slot_floats = set.rule.slot_floats(dim);
        if (slot_floats == 0) continue;
        float* slots = target.slots[j] + i * slot_floats;
        if (set.is_beside) {
          const void* history = copy == kFromTable ? static_cast<const void*>(sets_[j]->beside.At(row)) : stamps;
          std::memcpy(slots, history, sizeof(RowHistory));
          stamps += sizeof(RowHistory);
          continue;
        }
        std::memcpy(slots, record + set.offset, static_cast<size_t>(slot_floats) * sizeof(float));
        if (!set.rule.decays()) continue;
        uint32_t stamp;
        std::memcpy(&stamp, copy == kFromTable ? reinterpret_cast<const char*>(sets_[j]->Stamp(row)) : stamps,
                    sizeof(stamp));
        stamps += sizeof(stamp);
        set.SettleFrom(stamp, dim, weights, slots);
      }
    }
  });
}

void EmbeddingTable::ReadSnapshot(const Cpu& cpu, RowSink* sink) {
  const std::shared_ptr<Snapshot> s = [this] {
    SharedLock lock(mutex_);
    if (snapshot_ && !snapshot_->is_read.exchange(true)) return snapshot_;
    throw FailedPrecondition(Label() + ": there is no snapshot to read.");
  }();
  // States need the lock, and the table copies rows aside for no longer than it has the snapshot.
  auto lock_both = [&] {
    SharedLock lock(mutex_);
    if (snapshot_ == s) return lock;
    throw FailedPrecondition(Label() + ": the save ended while its snapshot was read.");
  };
  const int64_t rows_per_batch = sink->Begin(s->num_rows, s->infos);
  if (s->changes) sink->Erased(s->erased);
  std::vector<std::pair<uint32_t, uint64_t>> part, batch;
  std::vector<uint32_t> rows, copies;
  std::vector<uint64_t> keys;

  // What is in rows, copies and keys goes to the sink, in the order of keys. Expects the lock to be held.
  auto give = [&] {
    const int64_t n = static_cast<int64_t>(keys.size());
    if (n == 0) return false;
    const RowTarget target = sink->Allocate(n);
    std::copy(keys.begin(), keys.end(), target.keys);
    CopySnapshotRows(cpu, rows, copies, target);
    std::vector<uint32_t> taken;
    for (const uint32_t copy : copies)
      if (copy != kFromTable) taken.push_back(copy - Snapshot::kFirstCopy);
    s->copies.GiveBack(taken.data(), static_cast<int64_t>(taken.size()));
    return true;
  };
  auto clear = [&] {
    rows.clear();
    copies.clear();
    keys.clear();
  };
  auto check_copies = [&] {
    try {
      if (rows_.tier() != nullptr) s->unreadable.Throw(*rows_.tier());
    } catch (const RowTier::Unreadable& row) {
      throw DamagedFile(row.file + ": a row of " + Label() +
                        " that changed during an asynchronous save cannot be read. The save is given up.");
    }
    if (s->no_memory.load()) throw OutOfMemory(Label() + ": no memory to copy rows aside during an asynchronous save.");
  };
  auto flush = [&] {
    clear();
    bool any;
    {
      const SharedLock lock = lock_both();  // who writes states has the table alone, or is this thread
      for (const auto& [row, key] : batch) {
        uint32_t& state = s->states[row];
        if (state == Snapshot::kDone) continue;  // another key's by now, or erased and among the orphans
        rows.push_back(row);
        copies.push_back(state == Snapshot::kWaiting ? kFromTable : state);
        keys.push_back(key);
      }
      any = give();
      for (const uint32_t row : rows) s->states[row] = Snapshot::kDone;
    }
    batch.clear();
    check_copies();
    if (any) sink->Commit();
  };
  for (int64_t p = 0; p < NumParts(); ++p) {
    {
      const SharedLock lock = lock_both();
      RowsOfPart(p, s->changes, &part);
    }
    if (config_.hashed) SortByRow(&part);  // outside of the lock, as it takes longest
    for (const auto& row : part) {
      if (row.first >= s->rows) continue;
      batch.push_back(row);
      if (static_cast<int64_t>(batch.size()) == rows_per_batch) flush();
    }
  }
  flush();
  // Every row of the snapshot has been read, or its key was erased before: no more orphans come.
  for (size_t taken = 0;;) {
    clear();
    bool any;
    {
      const SharedLock lock = lock_both();
      for (; taken < s->orphans.size() && static_cast<int64_t>(keys.size()) < rows_per_batch; ++taken) {
        rows.push_back(0);
        copies.push_back(s->orphans[taken].second + Snapshot::kFirstCopy);
        keys.push_back(s->orphans[taken].first);
      }
      any = give();
    }
    check_copies();
    if (!any) return;
    sink->Commit();
  }
}

}  // namespace sok
