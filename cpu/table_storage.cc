// Rows of an EmbeddingTable that come into memory, and what can go wrong with them.
#include <mutex>

#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/file_error.h"

namespace sok {

int64_t EmbeddingTable::Bring(const Cpu& cpu, const uint32_t* rows, int64_t n, RowUse use) const {
  RowTier* tier = rows_.tier();
  if (tier == nullptr) return n;
  CheckWhole();
  tier->SetBeside(BytesBeside());
  try {
    return tier->Bring(cpu, rows, n, use);
  } catch (const RowTier::Unreadable& row) {
    ThrowUnreadable(row);
  }
}

void EmbeddingTable::ThrowUnreadable(const RowTier::Unreadable& row) const {
  const std::string key = "the row of key " + KeyText(KeyOfRow(row.row)) + " of " + Label();
  if (row.error != 0) throw FileError(row.error, "read " + key, row.file);
  throw DamagedFile(
      row.file + ": " + key +
      " is damaged: it is not what was written there. Other rows can be used. Erase the key, or restore the "
      "table from a checkpoint.");
}

const float* const* EmbeddingTable::PeekAll(const Cpu& cpu, Records* records) const {
  if (rows_.tier() == nullptr) return nullptr;
  records->all.resize(records->rows.size());
  try {
    rows_.tier()->PeekAll(cpu, records->rows.data(), static_cast<int64_t>(records->rows.size()), &records->aside,
                          records->all.data());
  } catch (const RowTier::Unreadable& row) {
    ThrowUnreadable(row);
  }
  return records->all.data();
}

void EmbeddingTable::CheckPeeks() const {
  if (rows_.tier() == nullptr) return;
  try {
    peeks_.Throw(*rows_.tier());
  } catch (const RowTier::Unreadable& row) {
    ThrowUnreadable(row);
  }
}

void EmbeddingTable::CheckWhole() const {
  if (!is_broken_) return;
  throw FailedPrecondition(Label() + ": an error has left it half changed: " + broken_ +
                           " Restore it from a checkpoint.");
}

StorageCounts EmbeddingTable::storage_counts() const {
  StorageCounts counts;
  {
    SharedLock lock(mutex_);
    if (rows_.tier() != nullptr) counts = rows_.tier()->counts();
  }
  counts.memory_bytes = memory_bytes();
  return counts;
}

}  // namespace sok
