// How a row leaves a table: a few instructions in loops, which a call would double. num_rows_ is the loop's.
#pragma once

#include "sok/embedding_table.h"
#include "table_snapshot.h"

namespace sok {

// Whether anything beside the index keeps account of rows: asked once for all that leave in a call.
inline bool EmbeddingTable::RowsAreWatched() const {
  return saved_.is_on() || snapshot_ != nullptr || by_bucket_ != nullptr || rows_.tier() != nullptr || tells_losses_;
}

inline void EmbeddingTable::RemoveRow(uint32_t row, uint64_t key, bool is_watched) {
  if (is_watched) {
    if (saved_.is_on()) saved_.MarkErased(key);
    SnapshotLosesRow(row, key);
    if (tells_losses_) lost_.push_back({key, row});
  }
  ForgetRow(row, key, is_watched);
}

inline void EmbeddingTable::ForgetRow(uint32_t row, uint64_t key, bool is_watched) {
  if (is_watched) {
    if (by_bucket_) by_bucket_->Remove(BucketOf(key), row);
    if (RowTier* tier = rows_.tier(); tier != nullptr) tier->Forget(row);
  }
  if (config_.hashed) {
    index_->Erase(key);
    free_rows_.push_back(row);
  } else {
    MarkInUse(row, false);
  }
}

}  // namespace sok
