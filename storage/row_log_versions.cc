// A RowLog whose records versions may need.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "log_files.h"
#include "row_slots.h"
#include "sok/file_error.h"
#include "sok/row_log.h"

namespace sok {

RowLogShape RowLog::shape() const { return {floats_ + words_, block_bytes_, segment_bytes_}; }

void RowLog::ReleaseSome(int64_t segments) {
  const int64_t end = std::min(released_to_ + segments, static_cast<int64_t>(live_.size()));
  for (; released_to_ < end; ++released_to_) {
    for (int64_t slot = released_to_ * slots_; slot < (released_to_ + 1) * slots_; ++slot) {
      uint32_t& tag = tags_[static_cast<size_t>(slot)];
      if (tag == 0 || tag >= oldest_) continue;
      tag = 0;
      --retained_;
      Drop(static_cast<uint32_t>(slot));
    }
  }
}

bool RowLog::IsShardGone(const std::string& shard) { return sok::IsShardGone(shard); }

void RowLog::RemoveLeftOver(const std::string& path) { RemoveLogsLeftOver(path); }

void RowLog::SyncWritten() {
  if (fdatasync(file_) != 0) throw FileError(errno, "sync", file_name_);
  free_.insert(free_.end(), emptied_.begin(), emptied_.end());
  emptied_.clear();
}

int RowLog::Flush() {
  if (open_ != UINT32_MAX && used_ > 0) {
    // Blocks that are on the disk are not written again: what follows begins in the next one.
    used_ = RoundedUp(used_, per_block_);
    WriteOpen(used_ / per_block_ * block_bytes_);
  }
  const int copy = fcntl(file_, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw FileError(errno, "use", file_name_);
  return copy;
}

}  // namespace sok
