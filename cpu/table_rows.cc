// Rows out and in by row id, for what is calculated outside: penalties and constraints.
#include <cstring>
#include <mutex>

#include "brought_or_break.h"
#include "slot_set.h"
#include "sok/embedding_table.h"

namespace sok {
namespace {

constexpr int64_t kReadCycles = 100;  // per row: cache misses

}  // namespace

std::vector<uint32_t> EmbeddingTable::RowsOfIds(const int64_t* row_ids, int64_t n) const {
  Gradients gradients;
  gradients.row_ids = row_ids;
  gradients.n = n;
  bool stale = false;
  if (!CheckGradients(gradients, 0, n, Nonfinite::kAllow, &stale)) RaiseBadGradient(gradients, Nonfinite::kAllow);
  std::vector<uint32_t> rows(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    rows[static_cast<size_t>(i)] = IsGone(row_ids[i]) ? kNoRow : static_cast<uint32_t>(row_ids[i]);
  return rows;
}

void EmbeddingTable::Gather(const Cpu& cpu, const int64_t* row_ids, int64_t n, float* rows) {
  Lock lock(mutex_);
  const std::vector<uint32_t> numbers = RowsOfIds(row_ids, n);
  const int64_t dim = config_.dim;
  const size_t bytes = static_cast<size_t>(dim) * sizeof(float);
  const RowUse use = HasDecay() ? RowUse::kReadAndWrite : RowUse::kRead;
  ForBrought(cpu, numbers.data(), n, use, [&](int64_t first, int64_t last) {
    SettleRows(numbers.data() + first, last - first);
    cpu.executor.For(last - first, kReadCycles + dim, [&](int64_t begin, int64_t end) {
      for (int64_t i = first + begin; i < first + end; ++i) {
        const uint32_t row = numbers[static_cast<size_t>(i)];
        if (row == kNoRow) {
          std::memset(rows + i * dim, 0, bytes);
        } else {
          std::memcpy(rows + i * dim, rows_.Record(row), bytes);
        }
      }
    });
  });
}

void EmbeddingTable::Scatter(const Cpu& cpu, const int64_t* row_ids, int64_t n, const float* rows) {
  Lock lock(mutex_);
  const std::vector<uint32_t> numbers = RowsOfIds(row_ids, n);
  if (saved_.is_on()) {
    for (const uint32_t row : numbers)
      if (row != kNoRow) saved_.Mark(row);
  }
  CopyAside(numbers.data(), n);
  const int64_t dim = config_.dim;
  auto store = [&](int64_t first, int64_t last) {
    SettleRows(numbers.data() + first, last - first);
    cpu.executor.For(last - first, kReadCycles + dim, [&](int64_t begin, int64_t end) {
      for (int64_t i = first + begin; i < first + end; ++i) {
        const uint32_t row = numbers[static_cast<size_t>(i)];
        if (row == kNoRow) continue;
        std::memcpy(rows_.Record(row), rows + i * dim, static_cast<size_t>(dim) * sizeof(float));
      }
    });
  };
  ForBroughtOrBreak(cpu, numbers.data(), n, /*is_begun=*/false, store);
}

}  // namespace sok
