// Rows that leave an EmbeddingTable when it is full, those that have left, and rows that keys share.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "rated_row.h"
#include "sok/embedding_table.h"
#include "sort_by_row.h"

namespace sok {

int64_t EmbeddingTable::FindShared(const uint64_t* keys, int64_t n, uint32_t* rows) const {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] != kNoRow) continue;
    rows[i] = FindRow(config_.policies.SharedKey(keys[i]));
    found += rows[i] != kNoRow;
  }
  return found;
}

void EmbeddingTable::ShareRows(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing,
                               int64_t m, uint32_t* rows) {
  if (m == 0) return;
  uint64_t* shared = scratch->Get<uint64_t>(m);
  uint32_t* found = scratch->Get<uint32_t>(m);
  int64_t *absent = scratch->Get<int64_t>(m), num_absent = 0;
  bool bad = false;
  for (int64_t k = 0; k < m; ++k) shared[k] = config_.policies.SharedKey(keys[missing[k]]);
  FindRows(shared, m, found, &bad);
  for (int64_t k = 0; k < m; ++k)
    if (found[k] == kNoRow) absent[num_absent++] = k;
  InsertMissing(cpu, scratch, shared, absent, num_absent, found);
  for (int64_t k = 0; k < m; ++k) rows[missing[k]] = found[k];
}

void EmbeddingTable::Inherit(const Cpu& cpu, const MadeRow* made, int64_t n) {
  const size_t bytes = static_cast<size_t>(rows_.floats()) * sizeof(float);
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t from = FindRow(config_.policies.SharedKey(made[k].key)), pair[] = {from, made[k].row};
    if (from == kNoRow) continue;
    ForBrought(cpu, pair, 2, RowUse::kWrite, [&](int64_t, int64_t) {
      CopyAside(&from, 1);
      SettleRows(&from, 1);
      std::memcpy(rows_.Record(made[k].row), rows_.Record(from), bytes);
    });
  }
}

std::vector<std::pair<uint32_t, uint64_t>> EmbeddingTable::LeavingFull(int64_t now) const {
  const Policies& policies = config_.policies;
  std::vector<std::pair<uint32_t, uint64_t>> leaving;
  std::vector<Rated> rated;
  for (int64_t b = 0; b < int64_t{1} << kBucketBits; ++b) {
    if (by_bucket_->size(b) <= policies.MaxRowsOf(b)) continue;
    rated.clear();
    by_bucket_->ForEach(b, [&](uint32_t row) {
      const uint64_t key = *row_keys_.At(row);
      const RowHistory* history = HistoryOf(row);
      if (!policies.NeverLeaves(key)) rated.push_back({policies.Score(history->count, history->last, now), key, row});
    });
    const int64_t over = std::min(by_bucket_->size(b) - policies.LeftOf(b), static_cast<int64_t>(rated.size()));
    if (over <= 0) continue;
    std::nth_element(rated.begin(), rated.begin() + over - 1, rated.end());
    for (auto one = rated.begin(); one != rated.begin() + over; ++one) leaving.emplace_back(one->row, one->key);
  }
  SortByRow(&leaving);  // the order in which numbers are given out again
  return leaving;
}

EmbeddingTable::Evicted EmbeddingTable::TakeEvicted(bool keeps) {
  const Lock lock(mutex_);
  wants_evicted_ = keeps;
  const size_t dim = static_cast<size_t>(config_.dim), n = taken_away_.keys.size();
  std::vector<std::pair<uint64_t, size_t>> order;
  for (size_t i = 0; i < n; ++i) order.emplace_back(taken_away_.keys[i], i);
  std::sort(order.begin(), order.end());
  Evicted sorted;
  sorted.keys.reserve(n);
  sorted.rows.reserve(n * dim);
  for (const auto& [key, i] : order) {
    const auto from = taken_away_.rows.begin() + static_cast<int64_t>(i * dim);
    sorted.keys.push_back(key);
    sorted.rows.insert(sorted.rows.end(), from, from + static_cast<int64_t>(dim));
  }
  taken_away_ = Evicted();
  return sorted;
}

}  // namespace sok
