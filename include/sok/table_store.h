// What can be done with a shard of a table wherever its rows lie, in the memory of this process (EmbeddingTable), on a
// device (DeviceStore), or in that memory and those in use on a device (DeviceTier): all but lookups and updates. Pointers are
// to memory of this process; every call has happened when it returns.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sok/adam_decay.h"
#include "sok/device.h"
#include "sok/initializer.h"
#include "sok/partition.h"
#include "sok/policies.h"
#include "sok/scratch.h"
#include "sok/sparse_update.h"
#include "sok/storage_config.h"

namespace sok {

// Floats of a row at most: of tables, and in their files.
constexpr int64_t kMaxDim = int64_t{1} << 20;

class EmbeddingTable;

struct TableConfig {
  std::string name;  // for messages
  int64_t dim = 0;
  int64_t capacity = 0;      // rows of this shard
  bool hashed = true;        // false: row = key / number of ranks that hold rows
  bool is_unsigned = false;  // how keys are printed, and what `mod` means for them
  int world_size = 1;
  int rank = 0;
  int owner = kByKey;    // the rank that holds all rows; kByKey, kByHash: see Partition
  int64_t num_keys = 0;  // of an identity table: legal are keys below it; 0: as many as the ranks have rows
  Initializer initializer;
  Policies policies;
  StorageConfig storage;

  // Throws InvalidArgument if the configuration makes no sense.
  void Check() const;
  // "table 'item' (rank 1 of 4)": how messages name this shard; and a key of it.
  std::string Label() const;
  std::string KeyText(uint64_t key) const;
  // Throws InvalidArgument naming the key if an identity table cannot hold it; always fine for a hashed one.
  void CheckKey(uint64_t key) const;
  // The same, and for a key of another rank: a shard that stored it would hide it from every lookup.
  void CheckOwned(uint64_t key) const;
  // Throws TableFull: the shard has no row for this new key; says what to do.
  [[noreturn]] void ThrowFull(uint64_t key) const;

  Partition partition() const { return {world_size, owner, is_unsigned}; }
  // A negative key is huge as an unsigned word, so one comparison serves both.
  bool IsLegal(uint64_t key) const { return hashed || key < num_legal(); }
  // Keys of an identity table are below it.
  uint64_t num_legal() const {
    return num_keys > 0 ? static_cast<uint64_t>(num_keys)
                        : static_cast<uint64_t>(capacity) * static_cast<uint64_t>(partition().num_shards());
  }
};

class TableStore {
 public:
  TableStore() : step(own_step_) {}
  TableStore(const TableStore&) = delete;
  TableStore& operator=(const TableStore&) = delete;
  virtual ~TableStore() = default;

  virtual const TableConfig& config() const = 0;
  int64_t dim() const { return config().dim; }
  std::string Label() const { return config().Label(); }

  // Update calls so far, with gradients or without: the same on all ranks.
  std::atomic<int64_t>& step;
  // One more update call has been made. Rows that have to leave after it do.
  virtual void EndStep(const Cpu& /*cpu*/) { ++step; }

  virtual int64_t size() const = 0;

  // Keys in use, in row order (deterministic for a fixed history).
  virtual std::vector<uint64_t> Keys() const = 0;

  // Everything in use at one point in time, in row order: no update or erasure falls in between. allocate is called once,
  // with the number of rows and of slot floats per row (0 without a slot set), and gives where to write; null: not wanted.
  // Throws FailedPrecondition for an unknown set. An empty name means no slots.
  struct ExportTarget {
    uint64_t* keys = nullptr;   // [n]
    float* rows = nullptr;      // [n, dim]
    float* slots = nullptr;     // [n, slot_floats]
    int64_t* stamps = nullptr;  // [n]
  };
  virtual void Export(const Cpu& cpu, const std::string& slot_set,
                      const std::function<ExportTarget(int64_t n, int64_t slot_floats)>& allocate) const = 0;

  // Slots of one set for the given keys: slots [n, slot_floats], stamps [n] (-1 where the rule keeps none).
  // Missed decay is included. Throws FailedPrecondition for an unknown set, InvalidArgument for an unknown key.
  virtual int64_t SlotFloats(const std::string& slot_set) const = 0;
  virtual void Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
                     int64_t* stamps) const = 0;

  // Stores rows (making them if needed) for the keys this rank owns; others are ignored. Optimizer slots of rows
  // that exist stay. All or none.
  virtual void Assign(const Cpu& cpu, Scratch* scratch, const uint64_t* keys,
                      const float* rows,  // [n, dim]
                      int64_t n) = 0;

  // A slot set without its slots.
  struct SlotSetInfo {
    std::string name;
    UpdateRule rule;    // of the last call
    int64_t calls = 0;  // of a decaying rule: updates so far
    // Of a decaying rule, where a delta is read or written: the alphas of the calls since the save before it, up to `calls`.
    std::vector<AlphaHistory::Run> missed;
    int64_t num_missed() const { return missed.empty() ? 0 : calls - missed[0].first_call + 1; }
  };
  virtual std::vector<SlotSetInfo> SlotSets() const = 0;

  // Where ReadAll puts rows. The table is locked for reading meanwhile: do not call it.
  struct RowTarget {
    uint64_t* keys = nullptr;   // [n]
    float* rows = nullptr;      // [n, dim]
    std::vector<float*> slots;  // for each slot set [n, slot_floats]
  };
  class RowSink {
   public:
    virtual ~RowSink() = default;
    // Called once, also if there are no rows. num_rows: in the table. Gives how many rows it takes at a time, at least 1.
    virtual int64_t Begin(int64_t num_rows, const std::vector<SlotSetInfo>& sets) = 0;
    // Called once after Begin, with the keys erased since the save before; ascending, none of them has a row. Only by
    // ReadChanges.
    virtual void Erased(const std::vector<uint64_t>&) {}
    virtual RowTarget Allocate(int64_t n) = 0;  // where the next n rows go
    virtual void Commit() = 0;                  // they are there
  };

  // Gives every row with all its slots, as they stand after every update so far, to the sink: one point in time, in memory
  // that does not grow with the table. The order is unspecified, but the same for the same history. Passes on what the
  // sink throws.
  virtual void ReadAll(const Cpu& cpu, RowSink* sink) const = 0;

  // Saving by changes. From the first BeginSave on the table notes which rows change. BeginSave: what has changed so far
  // belongs to a save that begins. EndSave: it is complete under the name `base`, and changes since BeginSave are counted
  // from it; with an empty name it failed, and no change is forgotten.
  //
  // With a snapshot, ReadSnapshot gives what the table holds at this moment, of all rows or of those that have changed,
  // whatever is done to it until EndSave: rows are copied aside just before they change, if they were not read before.
  // Takes 4 bytes a row, and the records of the rows that change before they are read. Throws FailedPrecondition while
  // another snapshot is there, OutOfMemory.
  //
  // kVersion, of a table over a file that keeps versions: what it holds at this moment is a version, which EmbeddingTable::WriteVersion
  // writes beside training.
  enum class SnapshotOf { kNothing, kAllRows, kChanges, kVersion };
  virtual void BeginSave(SnapshotOf snapshot = SnapshotOf::kNothing) = 0;
  virtual void EndSave(const std::string& base) = 0;

  // As ReadAll or ReadChanges, of the snapshot. Holds the lock for one block of rows, or one segment of the index, at a
  // time: updates wait no longer than that. Once per snapshot. Throws FailedPrecondition without one, and on a host if
  // EndSave comes before its end; OutOfMemory if there was none to copy rows aside.
  virtual void ReadSnapshot(const Cpu& cpu, RowSink* sink) = 0;

  // As ReadAll, but only the rows that belong to the save that was begun. Rows that no update has touched are left out,
  // though an exact Adam has moved them: the sets' `missed` says how. Throws FailedPrecondition without BeginSave, or if no
  // save was completed before.
  virtual void ReadChanges(const Cpu& cpu, RowSink* sink) const = 0;

  // Catches up with calls that the save `save` counts and this table has not seen, for rows as they are now: rows that
  // are stored afterwards are current. Attaches the sets. Once per save: again with the same name it does nothing. Throws
  // InvalidArgument for a set of another rule, for other calls than before under the same name, or too many.
  virtual void SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& sets) = 0;

  // What has changed since the last complete save.
  struct ChangeInfo {
    bool is_on = false;
    std::string base;               // that save; empty: none
    int64_t rows = 0;               // that have changed
    int64_t erased = 0;             // keys, at most
    std::vector<SlotSetInfo> sets;  // with what they have missed
    int64_t copied_bytes = 0;       // room for rows that a snapshot has had copied aside
  };
  virtual ChangeInfo Changes() const = 0;

  // Stores rows with slots for the keys this rank owns; others are ignored. A slot set that the table does not have is
  // attached, with no calls. Slots of the table's other sets: of rows that exist they stay, of new rows they are fresh. Of
  // equal keys the last one counts. Every row is current: it has missed no call of any set. Gives how many of the rows
  // were new.
  // All or none: throws InvalidArgument for a key that the table cannot hold or a set that belongs to another rule,
  // TableFull, OutOfMemory; then no row was stored.
  //
  // Values of rows that are cut otherwise than the table's: `n` columns of them, from `from` on, are those of the table
  // from `to` on. The other columns of a row stay; those of a new row are fresh.
  struct Columns {
    int64_t dim = 0;  // of the values; 0: they have the table's columns, all of them
    int64_t from = 0, to = 0, n = 0;
  };
  struct RowValues {
    const uint64_t* keys = nullptr;   // [n]
    const float* rows = nullptr;      // [n, dim]
    std::vector<const float*> slots;  // for each of `sets` [n, slot_floats]
    int64_t n = 0;
    Columns columns = {};
    const bool* changed = nullptr;  // [n]: only these count as changed (on a device all, if one does); null: all
  };
  virtual int64_t Restore(const Cpu& cpu, Scratch* scratch, const std::vector<SlotSetInfo>& sets,
                          const RowValues& values) = 0;

  // Exchanges the contents (keys, rows, slot sets) with a table of the same configuration; throws InvalidArgument for
  // another one. Gradients of lookups from before are ignored by both.
  virtual void Swap(TableStore* other) = 0;

  // Makes room for n rows in all: filling up to there rebuilds nothing, and the system has been asked for the memory.
  // With `rows` false for their keys only: records come with the rows, as wide as slot sets have made them by then.
  // Throws InvalidArgument for more than the capacity, OutOfMemory.
  virtual void Reserve(const Cpu& cpu, int64_t n, bool rows = true) = 0;

  // Removes keys; their row numbers may be used again. Gives how many existed.
  virtual int64_t Erase(const uint64_t* keys, int64_t n) = 0;

  // Bytes of keys, rows and bookkeeping.
  virtual int64_t memory_bytes() const = 0;

  // Since the table was made. What comes by Swap was made by the other one.
  virtual PolicyCounts policy_counts() const = 0;
  // How often a key of the index had to pass by a place that others had filled; 0 where nobody counts it.
  virtual int64_t collisions() const { return 0; }

  // The table of the host that has all keys, what policies know of them, and their rows, but for what a device has changed in these
  // since it last wrote home; for calls that change no row. Null: there is none.
  virtual EmbeddingTable* OnHost() { return nullptr; }
  virtual StorageCounts storage_counts() const { return {}; }
  // Reads rows of keys [n] that lie in a file alone into memory: EmbeddingTable::ReadAhead.
  virtual int64_t ReadAhead(const Cpu& /*cpu*/, const uint64_t* /*keys*/, int64_t /*n*/, int64_t /*batches*/) {
    return 0;
  }

 protected:
  explicit TableStore(TableStore* counts) : step(counts->step) {}  // for one that is made of another

 private:
  std::atomic<int64_t> own_step_{0};
};

}  // namespace sok
