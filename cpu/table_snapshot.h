// What a table held when an asynchronous save began, while training goes on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "slot_set.h"
#include "sok/embedding_table.h"

namespace sok {

// Copies of records, numbered; room that was given back is used again.
class CopiedRecords {
 public:
  CopiedRecords(int64_t floats, int64_t max_records)
      : floats_(floats), chunks_(static_cast<size_t>(max_records / kPerChunk + 1)) {}

  // n numbers. Throws std::bad_alloc. Safe from several threads, as the rest of this class.
  void Take(int64_t n, uint32_t* numbers);
  void GiveBack(const uint32_t* numbers, int64_t n);

  // [floats]; valid as long as the number is taken.
  float* Record(uint32_t number) const {
    return chunks_[number / kPerChunk].get() + static_cast<int64_t>(number % kPerChunk) * floats_;
  }
  int64_t bytes() const { return num_chunks_.load() * kPerChunk * floats_ * static_cast<int64_t>(sizeof(float)); }

 private:
  static constexpr int64_t kPerChunk = 1024;

  const int64_t floats_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<float[]>> chunks_;  // never resized: readers need no lock
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
  std::atomic<int64_t> num_chunks_{0};
};

struct EmbeddingTable::Snapshot {
  // What has become of a row; anything else is the number of its copy.
  static constexpr uint32_t kWaiting = 0;         // as it was: it is read from the table
  static constexpr uint32_t kBusy = 0xFFFFFFFFu;  // a thread copies it
  static constexpr uint32_t kDone = 0xFFFFFFFEu;  // read, or was no row when the save began
  static constexpr uint32_t kFirstCopy = 1;

  Snapshot(int64_t num_rows, int64_t floats, int64_t words_beside)
      : rows(num_rows),
        stamps_at(floats),
        states(static_cast<uint32_t*>(std::calloc(static_cast<size_t>(num_rows) + 1, sizeof(uint32_t)))),
        copies(floats + words_beside, num_rows) {
    if (!states) throw std::bad_alloc();
  }

  struct Free {
    void operator()(uint32_t* p) const { std::free(p); }
  };

  const int64_t rows;       // numbers below it may be of the snapshot
  const int64_t stamps_at;  // a copy is a record and, behind it, what lies beside: set by set its stamp, or its slots
  bool changes = false;     // of the changed rows alone
  int64_t num_rows = 0;     // that the table held
  std::vector<SlotSetInfo> infos;
  std::vector<std::unique_ptr<SlotSet>> sets;  // as they were, without stamps: what settles rows as of then
  std::vector<uint64_t> erased;
  const std::unique_ptr<uint32_t[], Free> states;  // [rows]
  mutable CopiedRecords copies;
  std::vector<std::pair<uint64_t, uint32_t>> orphans;  // keys that were erased before they were read, and their copies
  std::atomic<bool> no_memory{false};
  RowTier::Failure unreadable;  // of rows to be copied
  std::atomic<bool> is_read{false};
};

}  // namespace sok
