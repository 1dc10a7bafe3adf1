// Keys that wait for a row, rows that are counted, and rows that leave an EmbeddingTable.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "rated_row.h"
#include "remove_row.h"
#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/reserve_more.h"
#include "sort_by_row.h"
#include "tasks.h"

namespace sok {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && sizeof(RowHistory) == 8,
              "a history is one word, its count below");

// The step whose update will be number `now` holds the key; false: that was counted before. Threads that meet in one row and find
// the same history there write the same: a locked operation would take longer.
inline bool Count(RowHistory* history, uint32_t now) {
  using Word = uint64_t __attribute__((__may_alias__));
  Word* word = reinterpret_cast<Word*>(history);
  const uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  const uint32_t count = static_cast<uint32_t>(seen);
  const bool is_new = static_cast<uint32_t>(seen >> 32) != now;
  const uint64_t next = static_cast<uint64_t>(now) << 32 | (count + (count != UINT32_MAX));
  __atomic_store_n(word, is_new ? next : seen, __ATOMIC_RELAXED);  // nobody can guess which: no branch
  return is_new;
}

constexpr int64_t kRowsPerSweepTask = 4096;
constexpr int64_t kCyclesPerRow = 60;  // a cache miss, partly hidden
constexpr int64_t kLeastMaxRows = 16 << kBucketBits;
constexpr size_t kLeastRepeats = 1 << 16;  // of keys that a step refused, before they are looked through
constexpr int64_t kMaxHashes = 32;
constexpr int64_t kMaxCandidates = INT64_C(0xFFFFFFFE);

void DropRepeats(std::vector<uint64_t>* keys) {
  std::sort(keys->begin(), keys->end());
  keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
}

double Norm(const float* weights, int64_t dim) {
  double sum = 0.0;
  for (int64_t j = 0; j < dim; ++j) sum += static_cast<double>(weights[j]) * static_cast<double>(weights[j]);
  return std::sqrt(sum);
}

}  // namespace

void Policies::Check(const TableConfig& table) const {
  auto check = [&](bool ok, const std::string& text) {
    if (!ok) throw InvalidArgument("table '" + table.name + "': " + text);
  };
  check(after >= 0 && after <= INT64_C(0xFFFFFFFF),
        "admission after n steps takes n in [1, 2^32 - 1]. Received: " + std::to_string(after) + ".");
  check(bloom_cells >= 0 && bloom_cells % 4 == 0 && bloom_cells <= 4 * kMaxDim,
        "cells of a bucket must be a multiple of 4 up to 4 * 2^20. Received: " + std::to_string(bloom_cells) + ".");
  check(bloom_cells == 0 || (bloom_hashes >= 1 && bloom_hashes <= kMaxHashes && after >= 1 && after <= UINT8_MAX),
        "a Bloom filter takes 1 to " + std::to_string(kMaxHashes) + " hashes and counts up to 255. Received: " +
            std::to_string(bloom_hashes) + " hashes, after " + std::to_string(after) + ".");
  check(!admits() || table.hashed, "a table whose keys are row numbers admits every key.");
  check(older_than >= 0, "`older_than` must not be negative. Received: " + std::to_string(older_than) + ".");
  check(norm_below >= 0.0f && std::isfinite(norm_below),
        "`norm_below` must be finite and not negative. Received: " + std::to_string(norm_below) + ".");
  check(!when_full || (max_rows >= int64_t{1} << kBucketBits && table.hashed),
        "rows that leave when it is full need keys that are hashed, and room for at least 4096, one for each bucket. "
        "Received: max_rows " +
            std::to_string(max_rows) + ".");
  check(shared_rows >= 0 && shared_rows % (1 << kBucketBits) == 0 && shared_rows <= int64_t{1} << (2 * kBucketBits),
        "shared rows must be a multiple of 4096 up to 4096 * 4096. Received: " + std::to_string(shared_rows) + ".");
  check(std::isfinite(constant), "what keys without rows read must be finite.");
  check(shared_rows == 0 || admits(), "rows are shared by keys that wait for their own: it needs an admission.");
  check(max_rows == 0 || when_full || max_rows >= kLeastMaxRows,
        "`max_rows` must be at least " + std::to_string(kLeastMaxRows) +
            ", 16 for each of 4096 buckets. Received: " + std::to_string(max_rows) + ".");
  check(half_life >= 0, "`half_life` must not be negative. Received: " + std::to_string(half_life) + ".");
  check(every >= 1, "`every` must be at least 1. Received: " + std::to_string(every) + ".");
}

void EmbeddingTable::MakeHistory() {
  UpdateRule rule;
  rule.rule = ParseRule(kHistoryRule);
  history_ = FindOrAttach(rule, kHistorySet);
  if (config_.policies.after == 0) return;
  const bool is_filter = config_.policies.bloom_cells > 0;
  TableConfig config = config_;
  config.name += is_filter ? "/sok.filter" : "/sok.candidates";
  config.dim = is_filter ? config_.policies.bloom_cells / 4 : static_cast<int64_t>(sizeof(RowHistory) / sizeof(float));
  config.capacity = is_filter ? int64_t{1} << kBucketBits : kMaxCandidates;
  config.is_unsigned = config.is_unsigned || is_filter;
  config.policies = Policies();
  config.storage = StorageConfig();
  config.initializer = Initializer();
  config.initializer.kind = InitKind::kConstant;
  config.initializer.a = 0.0f;
  (is_filter ? filter_ : candidates_) = std::make_shared<EmbeddingTable>(std::move(config));
}

RowHistory* EmbeddingTable::HistoryOf(int64_t row) const {
  if (history_ != nullptr) return history_->beside.At(row);
  return reinterpret_cast<RowHistory*>(const_cast<float*>(rows_.Record(row)));  // of candidates it is the whole record
}

void EmbeddingTable::CountRows(const uint32_t* rows, int64_t n) {
  constexpr int64_t kBlock = 32;
  const uint32_t now = static_cast<uint32_t>(step + 1);
  const bool marks = saved_.is_on();
  const RowColumn<RowHistory>::View histories = history_->beside.view();
  RowHistory* blocks[2][kBlock];  // one on its way to the cache while the other is counted
  auto locate = [&](int64_t begin) {
    RowHistory** block = blocks[begin / kBlock & 1];
    for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i) {
      block[i - begin] = rows[i] == kNoRow ? nullptr : histories.At(rows[i]);
      __builtin_prefetch(block[i - begin], 1);
    }
  };
  locate(0);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    locate(begin + kBlock);
    RowHistory* const* block = blocks[begin / kBlock & 1];
    for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i) {
      if (block[i - begin] == nullptr) continue;
      const bool is_new = Count(block[i - begin], now);
      if (marks && is_new) saved_.Mark(rows[i]);
    }
  }
}

int64_t EmbeddingTable::Admit(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t* missing, int64_t m) {
  const Policies& policies = config_.policies;
  if (!policies.admits() || m == 0) return m;
  bool* passes = scratch->Get<bool>(m);
  uint64_t* wanted = scratch->Get<uint64_t>(m);
  uint32_t* rows = scratch->Get<uint32_t>(m);
  bool bad = false;
  for (int64_t k = 0; k < m; ++k) wanted[k] = keys[missing[k]];
  FindRows(wanted, m, rows, &bad);  // another feature, or another call, may have made rows since the search
  if (filter_) FilterPasses(scratch, wanted, m, passes);
  for (int64_t k = 0; k < m; ++k) {
    passes[k] = rows[k] != kNoRow || (filter_ ? passes[k] : policies.HasLuck(wanted[k]));
    if (!filter_ || passes[k]) continue;
    // Many lookups may come before the step ends: where the list would grow, its repeats go first.
    if (refused_keys_.size() == refused_keys_.capacity() && refused_keys_.size() >= kLeastRepeats) {
      DropRepeats(&refused_keys_);
      if (2 * refused_keys_.size() > refused_keys_.capacity()) refused_keys_.reserve(2 * refused_keys_.capacity());
    }
    refused_keys_.push_back(wanted[k]);
  }
  if (candidates_) {
    int64_t *counted = scratch->Get<int64_t>(m), *absent = scratch->Get<int64_t>(m), num_counted = 0, num_absent = 0;
    for (int64_t k = 0; k < m; ++k)
      if (rows[k] == kNoRow) counted[num_counted++] = k;
    for (int64_t i = 0; i < num_counted; ++i) wanted[i] = keys[missing[counted[i]]];
    const Lock lock(candidates_->mutex_);
    candidates_->FindRows(wanted, num_counted, rows, &bad);
    for (int64_t i = 0; i < num_counted; ++i)
      if (rows[i] == kNoRow) absent[num_absent++] = i;
    candidates_->InsertMissing(cpu, scratch, wanted, absent, num_absent, rows);
    candidates_->CopyAside(rows, num_counted);
    const uint32_t now = static_cast<uint32_t>(step + 1);
    for (int64_t i = 0; i < num_counted; ++i) {
      RowHistory* history = candidates_->HistoryOf(rows[i]);
      if (Count(history, now) && candidates_->saved_.is_on()) candidates_->saved_.Mark(rows[i]);
      passes[counted[i]] = history->count >= policies.after;
    }
  }
  int64_t* refused = scratch->Get<int64_t>(m);
  int64_t num_passed = 0, num_refused = 0;
  for (int64_t k = 0; k < m; ++k) (passes[k] ? missing[num_passed++] : refused[num_refused++]) = missing[k];
  std::copy(refused, refused + num_refused, missing + num_passed);
  return num_passed;
}

void EmbeddingTable::FilterPasses(Scratch* scratch, const uint64_t* keys, int64_t n, bool* passes) const {
  const Policies& policies = config_.policies;
  uint64_t* buckets = scratch->Get<uint64_t>(n);
  uint32_t* rows = scratch->Get<uint32_t>(n);
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) buckets[i] = KeyOfBucket(BucketOf(keys[i]));
  const SharedLock lock(filter_->mutex_);
  filter_->FindRows(buckets, n, rows, &bad);
  for (int64_t i = 0; i < n; ++i) {
    int64_t count = rows[i] == kNoRow ? 0 : UINT8_MAX;
    if (rows[i] != kNoRow) {
      const auto* cells = reinterpret_cast<const unsigned char*>(filter_->rows_.Record(rows[i]));
      for (int64_t h = 0; h < policies.bloom_hashes; ++h)
        count = std::min<int64_t>(count, cells[policies.CellOf(keys[i], h)]);
    }
    passes[i] = count + 1 >= policies.after;
  }
}

void EmbeddingTable::CountRefused(const Cpu& cpu) {
  const Policies& policies = config_.policies;
  DropRepeats(&refused_keys_);
  const int64_t n = static_cast<int64_t>(refused_keys_.size());
  Scratch scratch;
  uint64_t* buckets = scratch.Get<uint64_t>(n);
  uint32_t* rows = scratch.Get<uint32_t>(n);
  int64_t* missing = scratch.Get<int64_t>(n);
  int64_t num_missing = 0;
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) buckets[i] = KeyOfBucket(BucketOf(refused_keys_[static_cast<size_t>(i)]));
  const Lock lock(filter_->mutex_);
  filter_->FindRows(buckets, n, rows, &bad);
  for (int64_t i = 0; i < n; ++i)
    if (rows[i] == kNoRow) missing[num_missing++] = i;
  filter_->InsertMissing(cpu, &scratch, buckets, missing, num_missing, rows);
  filter_->MarkChanged(rows, n);
  filter_->CopyAside(rows, n);
  for (int64_t i = 0; i < n; ++i) {
    auto* cells = reinterpret_cast<unsigned char*>(filter_->rows_.Record(rows[i]));
    int64_t found[kMaxHashes], *end = found;
    for (int64_t h = 0; h < policies.bloom_hashes; ++h)
      *end++ = policies.CellOf(refused_keys_[static_cast<size_t>(i)], h);
    std::sort(found, end);
    end = std::unique(found, end);  // two hashes of a key may meet
    for (const int64_t* cell = found; cell != end; ++cell)
      if (cells[*cell] != UINT8_MAX) ++cells[*cell];
  }
  refused_keys_.clear();
}

void EmbeddingTable::ReserveForgetting(const uint64_t* keys, const int64_t* missing, int64_t m) {
  const Lock lock(candidates_->mutex_);
  std::vector<uint32_t> rows;
  for (int64_t k = 0; k < m && candidates_->num_rows_ > 0; ++k) {
    const uint32_t row = candidates_->FindRow(keys[missing[k]]);
    if (row != kNoRow) rows.push_back(row);
  }
  candidates_->ReserveRemoval(rows.data(), static_cast<int64_t>(rows.size()));
}

void EmbeddingTable::TakeHistories(const MadeRow* made, int64_t n) {
  const SharedLock lock(candidates_->mutex_);
  for (int64_t k = 0; k < n && candidates_->num_rows_ > 0; ++k) {
    const uint32_t row = candidates_->FindRow(made[k].key);
    if (row != kNoRow) *HistoryOf(made[k].row) = *candidates_->HistoryOf(row);
  }
}

void EmbeddingTable::ForgetCandidates(const MadeRow* made, int64_t n) {
  const Lock lock(candidates_->mutex_);
  if (candidates_->num_rows_ == 0) return;
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t row = candidates_->FindRow(made[k].key);
    if (row == kNoRow) continue;
    candidates_->RemoveRow(row, made[k].key, candidates_->RowsAreWatched());
    --candidates_->num_rows_;
  }
  ++candidates_->losses_;
}

std::vector<std::pair<uint32_t, uint64_t>> EmbeddingTable::Leaving(const Cpu& cpu, const Policies& policies,
                                                                   int64_t now) {
  std::vector<std::pair<uint32_t, uint64_t>> leaving, part;
  std::vector<uint8_t> leaves;
  const int64_t dim = config_.dim, floats = (1 + kMaxSlots) * dim;  // the weights, and scratch of ReadRow
  std::vector<float> buffers;
  for (int64_t p = 0; p < NumParts(); ++p) {
    RowsOfPart(p, /*changes=*/false, &part);
    SortByRow(&part);  // the order in which numbers are given out again
    if (CountsInRecords()) BeginToAge(cpu, part, now);
    const int64_t n = static_cast<int64_t>(part.size()), tasks = (n + kRowsPerSweepTask - 1) / kRowsPerSweepTask;
    leaves.assign(part.size(), 0);
    buffers.resize(policies.norm_below > 0.0f ? static_cast<size_t>(MaxWorkers(cpu, tasks) * floats) : 0);
    ForTasks(cpu, tasks, n * (kCyclesPerRow + (buffers.empty() ? 0 : dim)), [&](int64_t worker, int64_t task) {
      for (int64_t i = task * kRowsPerSweepTask; i < std::min(n, (task + 1) * kRowsPerSweepTask); ++i) {
        const auto [row, key] = part[static_cast<size_t>(i)];
        RowHistory* history = HistoryOf(row);
        bool goes = false;
        if (history->last == 0) {
          CopyAside(&row, 1);
          history->last = static_cast<uint32_t>(now);
          if (saved_.is_on()) saved_.Mark(row);
        } else {
          goes = policies.older_than > 0 && now - int64_t{history->last} >= policies.older_than;
        }
        const bool may_go = !config_.policies.NeverLeaves(key);
        if (!goes && may_go && policies.norm_below > 0.0f) {
          float* buffer = buffers.data() + worker * floats;
          RowTier::Failure failure;
          const float* record = rows_.Peek(row, &failure);
          // A row that is damaged stays: whoever wants it hears of that.
          goes = !failure.is_noted() &&
                 Norm(ReadRow(row, key, buffer, buffer + dim, record), dim) < static_cast<double>(policies.norm_below);
          // What the system could not read now it may read the next time, and workers must not differ by that: the pass is made again.
          if (failure.is_noted() && !failure.is_damage()) peeks_.Note(row, failure.error());
        }
        leaves[static_cast<size_t>(i)] = goes && may_go ? 1 : 0;
      }
    });
    CheckPeeks();
    for (size_t i = 0; i < part.size(); ++i)
      if (leaves[i] != 0) leaving.push_back(part[i]);
  }
  return leaving;
}

void EmbeddingTable::AddCrowded(int64_t now, std::vector<std::pair<uint32_t, uint64_t>>* leaving) {
  const Policies& policies = config_.policies;
  constexpr size_t kBuckets = size_t{1} << kBucketBits;
  std::vector<int64_t> sizes(kBuckets, 0);
  std::vector<std::pair<uint32_t, uint64_t>> part;
  std::vector<uint32_t> gone;
  for (const auto& [row, key] : *leaving) gone.push_back(row);
  std::sort(gone.begin(), gone.end());
  const auto for_each = [&](const auto& body) {
    for (int64_t p = 0; p < NumParts(); ++p) {
      RowsOfPart(p, /*changes=*/false, &part);
      for (const auto& [row, key] : part)
        if (gone.empty() || !std::binary_search(gone.begin(), gone.end(), row)) body(row, key);
    }
  };
  for_each([&](uint32_t, uint64_t key) { ++sizes[static_cast<size_t>(BucketOf(key))]; });
  std::vector<std::vector<Rated>> crowded(kBuckets);
  bool any = false;
  for (size_t b = 0; b < kBuckets; ++b) {
    if (sizes[b] <= policies.MaxRowsOf(static_cast<int64_t>(b))) continue;
    crowded[b].reserve(static_cast<size_t>(sizes[b]));
    any = true;
  }
  if (!any) return;
  for_each([&](uint32_t row, uint64_t key) {
    std::vector<Rated>& bucket = crowded[static_cast<size_t>(BucketOf(key))];
    if (bucket.capacity() == 0 || policies.NeverLeaves(key)) return;
    const RowHistory* history = HistoryOf(row);
    bucket.push_back({policies.Score(history->count, history->last, now), key, row});
  });
  gone.clear();
  std::vector<std::pair<uint32_t, uint64_t>> more;
  for (size_t b = 0; b < kBuckets; ++b) {
    std::vector<Rated>& bucket = crowded[b];
    const int64_t over = std::min(sizes[b] - policies.MaxRowsOf(static_cast<int64_t>(b)),
                                  static_cast<int64_t>(bucket.size()));  // what never leaves is not among them
    if (over <= 0) continue;
    std::nth_element(bucket.begin(), bucket.begin() + over - 1, bucket.end());
    for (auto rated = bucket.begin(); rated != bucket.begin() + over; ++rated)
      more.emplace_back(rated->row, rated->key);
  }
  SortByRow(&more);
  leaving->insert(leaving->end(), more.begin(), more.end());
}

int64_t EmbeddingTable::RemoveLeaving(std::vector<std::pair<uint32_t, uint64_t>> leaving, bool has_ids) {
  std::vector<uint32_t> rows;
  for (const auto& [row, key] : leaving) {
    rows.push_back(row);
    if (has_ids) erased_.Touch(row);
  }
  const int64_t n = static_cast<int64_t>(rows.size());
  const bool hands_over = wants_evicted_ && has_ids;
  const size_t dim = static_cast<size_t>(config_.dim), known = taken_away_.keys.size();
  std::vector<float> scratch(hands_over ? (1 + kMaxSlots) * dim : 0);
  if (hands_over) ReserveMore(&taken_away_.keys, leaving.size());
  if (hands_over) ReserveMore(&taken_away_.rows, leaving.size() * dim);
  ReserveRemoval(rows.data(), n);
  // Nothing from here on takes memory.
  for (size_t i = 0; hands_over && i < leaving.size(); ++i) {
    RowTier::Failure failure;
    const float* weights =
        ReadRow(rows[i], leaving[i].second, scratch.data(), scratch.data() + dim, rows_.Peek(rows[i], &failure));
    if (failure.is_noted() && !failure.is_damage()) {  // nothing has left yet: the step is ended later
      taken_away_.keys.resize(known);
      taken_away_.rows.resize(known * dim);
      peeks_.Note(rows[i], failure.error());
      CheckPeeks();
    }
    if (failure.is_noted()) {  // it is lost, and leaves all the same
      std::fill_n(scratch.data(), dim, std::nanf(""));
      weights = scratch.data();
    }
    taken_away_.keys.push_back(leaving[i].second);
    taken_away_.rows.insert(taken_away_.rows.end(), weights, weights + dim);
  }
  const bool is_watched = RowsAreWatched();
  for (const auto& [row, key] : leaving) {
    if (has_ids) *erased_.At(row) = epoch_ + 1;
    RemoveRow(row, key, is_watched);
  }
  num_rows_ -= n;
  if (n > 0) ++losses_;
  if (n > 0 && has_ids) ++epoch_;
  return n;
}

void EmbeddingTable::FinishStep(const Cpu& cpu, int64_t now) {
  const Policies& policies = config_.policies;
  const bool is_pass = policies.IsPassAt(now);
  if (!filter_ && !is_pass && !by_bucket_) return;
  const Lock lock(mutex_);
  unfinished_ = now;
  if (filter_) CountRefused(cpu);
  if (is_pass) {
    auto leaving = Leaving(cpu, policies, now);
    if (policies.max_rows > 0 && !by_bucket_) AddCrowded(now, &leaving);
    evicted_ += RemoveLeaving(std::move(leaving), true);
    if (candidates_ != nullptr && policies.older_than > 0) {
      Policies by_age;
      by_age.older_than = policies.older_than;
      const Lock theirs(candidates_->mutex_);
      candidates_->RemoveLeaving(candidates_->Leaving(cpu, by_age, now), false);
    }
  }
  if (by_bucket_) evicted_ += RemoveLeaving(LeavingFull(now), true);
  unfinished_ = 0;
}

void EmbeddingTable::EndStep(const Cpu& cpu) {
  const int64_t now = step + 1;
  try {
    FinishLate(cpu);
    step = now;
    FinishStep(cpu, now);
  } catch (const std::exception&) {
    if (step != now)
      EndStepLater();  // see FinishLate: one worker alone must not leave the others in a step that it has not ended
  }
}

void EmbeddingTable::EndStepLater() {
  const int64_t now = ++step;
  // A pass that was put off is not given up for a step that makes none.
  if (unfinished_ == 0 || config_.policies.IsPassAt(now)) unfinished_ = now;
}

bool EmbeddingTable::ReadsRowsAtEndOf(int64_t step) const {
  const Policies& policies = config_.policies;
  const bool is_pass = policies.IsPassAt(step);
  return (policies.norm_below > 0.0f && is_pass) || (wants_evicted_ && (is_pass || by_bucket_ != nullptr));
}

void EmbeddingTable::Histories(const uint64_t* keys, int64_t n, RowHistory* histories) const {
  CheckKeys(keys, n);
  const SharedLock lock(mutex_);
  if (history_ == nullptr)
    throw FailedPrecondition(Label() + " has neither admission nor eviction: it keeps no histories.");
  SharedLock theirs;
  if (candidates_) theirs = SharedLock(candidates_->mutex_);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t row = FindRow(keys[i]);
    const EmbeddingTable* table = this;
    if (row == kNoRow && candidates_) {
      table = candidates_.get();
      row = table->FindRow(keys[i]);
    }
    histories[i] = RowHistory();
    if (row == kNoRow) continue;
    histories[i] = *table->HistoryOf(row);
  }
}

int64_t EmbeddingTable::collisions() const {
  const SharedLock lock(mutex_);
  return index_ ? index_->collisions() : 0;
}

PolicyCounts EmbeddingTable::policy_counts() const {
  return {candidates_ ? candidates_->size() : 0, made_, refused_, evicted_};
}

}  // namespace sok
