// Rows and slots out and in by row id, for rules that are not ours.
#include <cstring>
#include <mutex>

#include "slot_set.h"
#include "sok/embedding_table.h"

namespace sok {
namespace {

constexpr int64_t kCopyCycles = 100;  // per row: cache misses
constexpr uint32_t kNoRow = HashTable::kNoRow;

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

void EmbeddingTable::Gather(const Cpu& cpu, const UpdateRule& rule, const std::string& slot_set, const int64_t* row_ids,
                            int64_t n, float* rows, float* slots) {
  Lock lock(mutex_);
  const std::vector<uint32_t> numbers = RowsOfIds(row_ids, n);
  SlotSet& set = *FindOrAttach(rule, slot_set);
  set.SetRule(rule);  // a file may have had slots that start as something else
  SettleRows(numbers.data(), n);
  const int64_t dim = config_.dim, floats = rule.num_slots() * dim;
  cpu.executor.For(n, kCopyCycles + dim + floats, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = numbers[static_cast<size_t>(i)];
      if (row == kNoRow) {
        std::memset(rows + i * dim, 0, static_cast<size_t>(dim) * sizeof(float));
        rule.FillSlots(dim, slots + i * floats);
        continue;
      }
      const float* record = rows_.Record(row);
      std::memcpy(rows + i * dim, record, static_cast<size_t>(dim) * sizeof(float));
      std::memcpy(slots + i * floats, record + set.offset, static_cast<size_t>(floats) * sizeof(float));
    }
  });
}

void EmbeddingTable::Scatter(const Cpu& cpu, const UpdateRule& rule, const std::string& slot_set,
                             const int64_t* row_ids, int64_t n, const float* rows, const float* slots) {
  Lock lock(mutex_);
  const std::vector<uint32_t> numbers = RowsOfIds(row_ids, n);
  const SlotSet& set = *FindOrAttach(rule, slot_set);
  const int64_t dim = config_.dim, floats = rule.num_slots() * dim;
  if (saved_.is_on()) {
    for (const uint32_t row : numbers)
      if (row != kNoRow) saved_.Mark(row);
  }
  CopyAside(numbers.data(), n);
  cpu.executor.For(n, kCopyCycles + dim + floats, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t row = numbers[static_cast<size_t>(i)];
      if (row == kNoRow) continue;
      float* record = rows_.Record(row);
      std::memcpy(record, rows + i * dim, static_cast<size_t>(dim) * sizeof(float));
      std::memcpy(record + set.offset, slots + i * floats, static_cast<size_t>(floats) * sizeof(float));
    }
  });
}

}  // namespace sok
