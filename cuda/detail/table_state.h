// What a DeviceTable is made of, and how its calls on several streams keep out of each other's way.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "event.h"
#include "growing_array.h"
#include "home_device.h"
#include "row_changes.h"
#include "sok/device_memory.h"
#include "sok/device_table.h"
#include "sok/hash_table.h"

namespace sok {

// A block of device memory that belongs to a table for as long as the table lives.
template <class T>
class DeviceBlock {
 public:
  explicit DeviceBlock(DeviceMemory* memory) : memory_(memory) {}
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;
  ~DeviceBlock() { Free(); }

  void Allocate(const Cuda& cuda, int64_t n, const char* what) {
    Free();
    data_ = static_cast<T*>(memory_->Allocate(cuda, n * static_cast<int64_t>(sizeof(T)), what));
    n_ = n;
  }
  // With a block of the same memory.
  void Swap(DeviceBlock* other) {
    std::swap(data_, other->data_);
    std::swap(n_, other->n_);
  }

  T* data() const { return data_; }
  int64_t size() const { return n_; }
  int64_t bytes() const { return n_ * static_cast<int64_t>(sizeof(T)); }

 private:
  void Free() {
    memory_->Free(data_, n_ * static_cast<int64_t>(sizeof(T)));
    data_ = nullptr;
    n_ = 0;
  }
  DeviceMemory* const memory_;
  T* data_ = nullptr;
  int64_t n_ = 0;
};

// One value in memory of the host that a stream can copy to while the host goes on.
template <class T>
class PinnedValue {
 public:
  PinnedValue() { SOK_CUDA(cudaHostAlloc(&value_, sizeof(T), cudaHostAllocDefault)); }
  PinnedValue(const PinnedValue&) = delete;
  PinnedValue& operator=(const PinnedValue&) = delete;
  ~PinnedValue() { Ignore(cudaFreeHost(value_)); }

  T* get() const { return value_; }

 private:
  T* value_ = nullptr;
};

struct DeviceTable::State {
  struct SlotSet;

  using Bad = TableBad;

  State(TableConfig config, int64_t budget_bytes, DeviceAllocator* owner);
  ~State();  // waits for the device

  bool HasDecay() const;
  int64_t num_rows() const;  // row numbers are below
  Reading ReadUnder(std::shared_ptr<void> lock) const;
  int64_t room() const;  // rows that have memory for all that belongs to a row
  void MakeRoom(const Cuda& cuda, int64_t num_rows);
  // rows[i] = row of keys[i], kNoRow where it has none, kBadRow where the shard cannot hold it (and keeps the key for
  // ThrowIfBadToHost, if keep_bad). Unless null, also what a lookup gives: out for every key that has a row, or with
  // fresh_too for every key; row_ids.
  void FindRows(const Cuda& cuda, const uint64_t* keys, int64_t n, bool keep_bad, bool fresh_too, uint32_t* rows,
                float* out, int64_t* row_ids);
  // Gives rows to the keys without, their records and slots as of a fresh row. Unless null, also what a lookup gives for them.
  // notes: they count as changed.
  void InsertRows(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, uint32_t* rows, float* out,
                  int64_t* row_ids, bool notes = true);
  // Stores floats first .. first + count - 1 of the records of keys that are this shard's, making rows where there are none.
  void Store(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, int64_t first, int64_t count,
             const float* values);
  // Its first half: rows[i] = the row that position i is to write, settled; kNoRow where it writes none, as its key is not
  // this shard's or comes again. All or none. notes: as InsertRows.
  void Place(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, uint32_t* rows,
             bool notes = true);
  void Erase(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n);
  // Keys and rows in use among those rows first .. first + count - 1 that the filter has, in order. Gives, on the device,
  // how many. Reads only.
  const uint32_t* List(const Cuda& cuda, DeviceScratch* scratch, int64_t first, int64_t count,
                       uint64_t* keys,  // [count]
                       uint32_t* rows,  // [count]
                       const RowFilter& filter = {}) const;
  // Rows in use. Waits for the stream. Reads only.
  int64_t CountToHost(const Cuda& cuda) const;
  void ThrowIfIllegalToHost(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n) const;
  void RowsOfIds(const Cuda& cuda, const int64_t* row_ids, int64_t n, uint32_t* rows) const;
  void CheckCount(int64_t n) const;

  // Brings rows up to the last call of every decaying set. The table must be locked for writing.
  void Settle(const Cuda& cuda, DeviceScratch* scratch, const uint32_t* rows, int64_t n);
  SlotSet* FindSet(const std::string& slot_set);
  SlotSet& RequireSet(const std::string& slot_set);
  // Catches up with calls that were applied elsewhere: TableStore::SkipCalls.
  void SkipCalls(const Cuda& cuda, const std::string& save, const std::vector<TableStore::SlotSetInfo>& infos);
  // Throws InvalidArgument if one of the sets belongs to another rule here.
  void CheckRules(const std::vector<TableStore::SlotSetInfo>& infos);
  // Throws InvalidArgument if the set belongs to another rule.
  void CheckRule(const SlotSet& set, const UpdateRule& rule) const;
  SlotSet* FindOrAttach(const Cuda& cuda, const UpdateRule& rule, const std::string& slot_set);

  const TableConfig config;
  const HomeDevice home;
  DeviceMemory memory;
  DeviceRowStore rows;
  std::unique_ptr<DeviceHashTable> index;  // null for an identity table
  GrowingWords in_use;                     // identity: one bit per row
  DeviceBlock<int64_t> num_in_use;         // identity: [1]
  GrowingWords erasures;     // of each row number: the upper half of its row ids; empty until one is erased
  DeviceRowChanges changes;  // since the last save
  // Of a hashed table whose rows are copies that come and go: with the memory of rows it takes what their erasure will need, and no
  // spare rows.
  bool holds_copies = false;
  bool has_snapshot = false;  // an asynchronous save is under way
  InitializerView initializer;
  DeviceBlock<float> bank;
  DeviceBlock<float> defaults;  // [floats - dim] what the slots of a fresh row hold
  DeviceBlock<Bad> bad;         // [1]
  // What of it the host may look at: a copy that is, or was, under way.
  std::mutex seen_mutex;
  PinnedValue<Bad> seen;
  Event seen_copied;
  bool is_seen_asked = false;
  std::vector<std::unique_ptr<SlotSet>> sets;

  // Readers share it on the host while they put their work on a stream; writers have it alone.
  std::shared_mutex mutex;
  std::shared_ptr<Event> written;  // the last call that wrote has come past this; null: none has
  struct Read {
    cudaStream_t stream;
    std::shared_ptr<Event> done;  // null: not yet
  };
  std::vector<Read> reads;  // since then, the last one of each stream
};

// Row numbers are below 2^32 - 2: this one marks a key that the shard cannot hold.
constexpr uint32_t kBadRow = 0xFFFFFFFEu;

// Locks tables, each of which may come more than once, in one order for all threads. What the stream has to wait for, and what
// others will wait for, is one event however many tables took part in a call.

// The stream waits for the last writer; writers that come later will wait for it.
class TableReading {
 public:
  TableReading(std::vector<DeviceTable::State*> states, const Cuda& cuda);
  TableReading(DeviceTable::State* state, const Cuda& cuda) : TableReading(std::vector{state}, cuda) {}
  TableReading(const TableReading&) = delete;
  TableReading& operator=(const TableReading&) = delete;
  ~TableReading();

 private:
  const std::vector<DeviceTable::State*> states_;
  const HomeDevice home_;
  const Cuda cuda_;
  const std::shared_ptr<Event> done_;
  std::vector<std::shared_lock<std::shared_mutex>> locks_;
};

// The stream waits for all readers and the last writer; everyone who comes later will wait for it.
class TableWriting {
 public:
  TableWriting(std::vector<DeviceTable::State*> states, const Cuda& cuda);
  TableWriting(DeviceTable::State* state, const Cuda& cuda) : TableWriting(std::vector{state}, cuda) {}
  TableWriting(const TableWriting&) = delete;
  TableWriting& operator=(const TableWriting&) = delete;
  ~TableWriting();

 private:
  const std::vector<DeviceTable::State*> states_;
  const Cuda cuda_;
  const std::shared_ptr<Event> done_;
  std::vector<std::unique_lock<std::shared_mutex>> locks_;
};

}  // namespace sok
