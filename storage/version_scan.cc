// The rows of a version, out of the log that has them: see RowTier.
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "row_slots.h"
#include "shard_format.h"
#include "sok/direct_file.h"
#include "sok/file_error.h"
#include "sok/version_order.h"

namespace sok {
namespace {

bool HasRow(const std::vector<uint64_t>& bits, uint32_t row) { return ((bits[row / 64] >> (row % 64)) & 1) != 0; }

// Calls body(slot, head) for every slot of a log that could be of one of these rows, in the order of the file.
class LogReader {
 public:
  explicit LogReader(const ShardLog& log)
      : log_(log),
        slot_bytes_(SlotBytesOf(log.floats, /*has_versions=*/true)),
        per_block_(log.block_bytes / slot_bytes_),
        buffer_(new char[static_cast<size_t>(log.segment_bytes)]) {
    if (log.block_bytes != BlockBytesOf(slot_bytes_)) throw DamagedFile(log.path + ": not a log of such rows");
  }

  template <class Body>
  void ForSlots(const std::vector<uint64_t>& bits, const Body& body) const {
    DirectFile file(log_.path, O_RDONLY, "open");
    int64_t number = 0;
    for (;;) {
      const size_t got = file.Read(buffer_.get(), static_cast<size_t>(log_.segment_bytes));
      const int64_t blocks = static_cast<int64_t>(got) / log_.block_bytes;
      for (int64_t b = 0; b < blocks; ++b) {
        for (int64_t i = 0; i < per_block_; ++i, ++number) {
          const char* slot = buffer_.get() + b * log_.block_bytes + i * slot_bytes_;
          const uint32_t row = RowOfSlot(slot);
          if (row < log_.rows && HasRow(bits, row)) body(number, slot);
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
  // Of each row the newest record that is not newer than the version.
  std::vector<uint64_t> orders(static_cast<size_t>(log.rows));
  std::vector<uint32_t> slots(static_cast<size_t>(log.rows));
  reader.ForSlots(bits, [&](int64_t number, const char* slot) {
    SlotHead of;
    std::memcpy(&of.order, slot + 16, sizeof(of.order));
    uint64_t& newest = orders[RowOfSlot(slot)];
    if (of.order <= newest || VersionOfOrder(of.order) > log.version || VersionOfOrder(of.order) == 0) return;
    if (!ReadSlotHead(slot, /*has_versions=*/true, log.floats, &of)) return;
    newest = of.order;
    slots[of.row] = static_cast<uint32_t>(number);
  });
  uint64_t digest = 0;
  int64_t count = 0, missing = 0;
  for (int64_t row = 0; row < log.rows; ++row) {
    if (!HasRow(bits, static_cast<uint32_t>(row))) continue;
    ++count;
    const uint64_t order = orders[static_cast<size_t>(row)];
    missing += order == 0;
    digest += DigestOf(static_cast<uint32_t>(row), order);
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
  int64_t n = 0;
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
  reader.ForSlots(bits, [&](int64_t number, const char* slot) {
    const uint32_t row = RowOfSlot(slot);
    if (slots[row] != static_cast<uint32_t>(number) || orders[row] == 0) return;
    SlotHead of;
    std::memcpy(&of.key, slot + 8, sizeof(of.key));
    std::memcpy(&of.order, slot + 16, sizeof(of.order));
    if (of.order != orders[row])
      throw DamagedFile(log.path +
                        ": it has changed while it was read. A job that goes on with it must not be running.");
    orders[row] = 0;
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
  });
  give();
  return count;
}

}  // namespace sok
