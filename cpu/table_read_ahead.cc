// Rows of an EmbeddingTable over a file that are read before the step that needs them.
#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "sok/embedding_table.h"

namespace sok {
namespace {

constexpr int64_t kKeysAtOnce = 4096;        // found with the lock held
constexpr int64_t kReadsAheadAtOnce = 1024;  // whoever reads by the same ring waits for as many

template <class Body>
void ForParts(const std::vector<uint32_t>& rows, int64_t size, const Body& body) {
  const int64_t n = static_cast<int64_t>(rows.size());
  for (int64_t begin = 0; begin < n; begin += size) body(rows.data() + begin, std::min(size, n - begin));
}

}  // namespace

int64_t EmbeddingTable::ReadAhead(const Cpu& cpu, const uint64_t* keys, int64_t n, int64_t batches) {
  int64_t read = 0;
  const int rounds = static_cast<int>(RowTier::kRoundsOfABatch * std::min<int64_t>(batches + 1, 1000));
  try {
    std::vector<uint32_t> rows = RowsOfKeys(keys, n);
    std::vector<std::pair<uint32_t, uint32_t>> wanted;  // slot in the file, row
    int64_t room = 0, kept = 0;
    ForParts(rows, kKeysAtOnce, [&](const uint32_t* some, int64_t count) {
      const Lock lock(mutex_);
      RowTier* tier = rows_.tier();
      if (tier == nullptr) return;  // it was exchanged
      room = MostAhead(tier->most_rows_here(), batches);
      for (int64_t i = 0; i < count; ++i) {
        if (tier->IsInFile(some[i])) {
          wanted.emplace_back(tier->SlotOf(some[i]), some[i]);
        } else if (kept < room) {
          tier->Keep(some[i], rounds);
          ++kept;
        }
      }
    });
    std::sort(wanted.begin(), wanted.end());  // so that one read serves all rows of a block
    wanted.resize(std::min(wanted.size(), static_cast<size_t>(room - kept)));
    rows.clear();
    for (const auto& [slot, row] : wanted) rows.push_back(row);
    RowTier::Ahead ahead;
    ForParts(rows, kReadsAheadAtOnce, [&](const uint32_t* some, int64_t count) {
      {
        const SharedLock lock(mutex_);
        if (rows_.tier() == nullptr || is_broken_) return;
        rows_.tier()->WhatToRead(some, count, &ahead);
      }
      RowTier::ReadAside(cpu, &ahead);
      const Lock lock(mutex_);
      if (rows_.tier() == nullptr || is_broken_) return;
      rows_.tier()->SetBeside(BytesBeside());
      read += rows_.tier()->TakeIn(&ahead, rounds);
    });
  } catch (const std::exception&) {  // whoever needs the rows meets it again
  }
  return read;
}

// Those that there are, each once. None of a table in memory, or one that is half changed.
std::vector<uint32_t> EmbeddingTable::RowsOfKeys(const uint64_t* keys, int64_t n) const {
  std::vector<uint32_t> rows(static_cast<size_t>(n));
  for (int64_t begin = 0; begin < n; begin += kKeysAtOnce) {
    const int64_t count = std::min(kKeysAtOnce, n - begin);
    bool is_bad = false;  // the step says so
    const SharedLock lock(mutex_);
    if (rows_.tier() == nullptr || is_broken_) return {};
    FindRows(keys + begin, count, rows.data() + begin, &is_bad);
    if (config_.policies.shared_rows > 0) FindShared(keys + begin, count, rows.data() + begin);
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  if (!rows.empty() && rows.back() == HashTable::kNoRow) rows.pop_back();
  return rows;
}

}  // namespace sok
