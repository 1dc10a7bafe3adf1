// The rows of a version, out of the log that has them: see RowTier.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "row_slots.h"
#include "shard_format.h"
#include "sok/direct_file.h"
#include "sok/file_error.h"
#include "sok/version_order.h"

namespace sok {
namespace {

constexpr int kTries = 20;

// Whether a process has it locked.
bool IsInUse(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool is_free = flock(file, LOCK_SH | LOCK_NB) == 0;
  close(file);
  return !is_free;
}

bool HasRow(const std::vector<uint64_t>& bits, uint32_t row) { return ((bits[row / 64] >> (row % 64)) & 1) != 0; }

// Calls body(slot) for every slot of a log that could be of one of these rows, in the order of the file.
class LogReader {
 public:
  explicit LogReader(const ShardLog& log)
      : log_(log),
        slot_bytes_(SlotBytesOf(log.floats, /*has_versions=*/true)),
        per_block_(log.block_bytes / slot_bytes_),
        buffer_(new char[static_cast<size_t>(log.segment_bytes)]) {
    struct stat status;
    if (stat(log.path.c_str(), &status) != 0) throw FileError(errno, "open", log.path);
    if (!S_ISREG(status.st_mode)) throw DamagedFile(log.path + ": not a file");
    if (log.block_bytes != BlockBytesOf(slot_bytes_)) throw DamagedFile(log.path + ": not a log of such rows");
  }

  template <class Body>
  void ForSlots(const std::vector<uint64_t>& bits, const Body& body) const {
    DirectFile file(log_.path, O_RDONLY, "open");
    for (;;) {
      const size_t got = file.Read(buffer_.get(), static_cast<size_t>(log_.segment_bytes));
      const int64_t blocks = static_cast<int64_t>(got) / log_.block_bytes;
      for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t i = 0; i < per_block_; ++i) {
          const char* slot = buffer_.get() + b * log_.block_bytes + i * slot_bytes_;
          const uint32_t row = RowOfSlot(slot);
          if (row < log_.rows && HasRow(bits, row)) body(slot);
        }
      }
      if (got < static_cast<size_t>(log_.segment_bytes)) return;
    }
  }

 private:
  const ShardLog& log_;
  const int64_t slot_bytes_, per_block_;
  const std::unique_ptr<char[]> buffer_;
};

}  // namespace

int64_t ScanVersion(const ShardHead& head, const std::vector<uint64_t>& bits, int64_t per_part,
                    const std::function<void(const TableStore::RowValues&)>& rows) {
  const ShardLog& log = head.log;
  const LogReader reader(log);
  // Of each row the newest record that is not newer than the version. A job that goes on moves records while they are looked for, so
  // that one may be missed: what is found in several readings counts together.
  std::vector<uint64_t> orders(static_cast<size_t>(log.rows));
  int64_t count = 0, missing = 0;
  uint64_t digest = ~log.digest;
  for (int tries = 0; (missing > 0 || digest != log.digest) && (tries == 0 || (tries < kTries && IsInUse(log.path)));
       ++tries) {
    reader.ForSlots(bits, [&](const char* slot) {
      SlotHead of;
      std::memcpy(&of.order, slot + 16, sizeof(of.order));
      uint64_t& newest = orders[RowOfSlot(slot)];
      if (of.order <= newest || VersionOfOrder(of.order) > log.version || VersionOfOrder(of.order) == 0) return;
      if (ReadSlotHead(slot, /*has_versions=*/true, log.floats, &of)) newest = of.order;
    });
    digest = 0;
    count = missing = 0;
    for (int64_t row = 0; row < log.rows; ++row) {
      if (!HasRow(bits, static_cast<uint32_t>(row))) continue;
      ++count;
      const uint64_t order = orders[static_cast<size_t>(row)];
      missing += order == 0;
      digest += DigestOf(static_cast<uint32_t>(row), order);
    }
  }
  if (missing > 0 || digest != log.digest) {
    throw DamagedFile(log.path + ": damaged: of " + std::to_string(count) + " rows of version " +
                      std::to_string(log.version) + " of table '" + head.table + "' " +
                      (missing > 0 ? std::to_string(missing) + " are not there." : "some are not what was written.") +
                      " Restore another version.");
  }
  std::vector<std::unique_ptr<EmbeddingTable::Settler>> settlers;
  for (const auto& set : head.sets) settlers.push_back(set.rule.decays() ? EmbeddingTable::SettlerOf(set) : nullptr);
  // Rows of one part.
  int64_t n = 0, left = count;
  std::vector<uint64_t> keys(static_cast<size_t>(per_part));
  std::vector<float> weights(static_cast<size_t>(per_part * head.dim));
  std::vector<std::vector<float>> of_sets;
  TableStore::RowValues values;
  values.keys = keys.data();
  values.rows = weights.data();
  for (const auto& set : head.sets) {
    of_sets.emplace_back(static_cast<size_t>(per_part * set.rule.slot_floats(head.dim)));
    values.slots.push_back(of_sets.back().data());
  }
  auto give = [&] {
    values.n = n;
    if (n > 0) rows(values);
    n = 0;
  };
  const auto take = [&](const char* slot) {
    const uint32_t row = RowOfSlot(slot);
    SlotHead of;
    std::memcpy(&of.order, slot + 16, sizeof(of.order));
    if (of.order == 0 || of.order != orders[row] || !ReadSlotHead(slot, /*has_versions=*/true, log.floats, &of)) return;
    orders[row] = 0;
    --left;
    auto copy = [&](int64_t first, int64_t count, float* to) {
      std::memcpy(to, slot + SlotHeadBytes(true) + first * 4, static_cast<size_t>(count) * sizeof(float));
      return to;
    };
    keys[static_cast<size_t>(n)] = of.key;
    float* w = copy(0, head.dim, weights.data() + n * head.dim);
    for (size_t s = 0; s < head.sets.size(); ++s) {
      const int64_t floats = head.sets[s].rule.slot_floats(head.dim);
      float* of_set = copy(log.offsets[s], floats, of_sets[s].data() + n * floats);
      if (settlers[s] == nullptr) continue;
      uint32_t stamp;
      std::memcpy(&stamp, slot + SlotHeadBytes(true) + log.stamps[s] * 4, sizeof(stamp));
      if (stamp > head.sets[s].calls) throw DamagedFile(log.path + ": a row is newer than its version");
      settlers[s]->Settle(stamp, head.dim, w, of_set);
    }
    if (++n == per_part) give();
  };
  for (int tries = 0; left > 0 && tries < kTries; ++tries) reader.ForSlots(bits, take);
  give();
  if (left > 0) throw DamagedFile(log.path + ": " + std::to_string(left) + " rows have gone while it was read.");
  return count;
}

}  // namespace sok
