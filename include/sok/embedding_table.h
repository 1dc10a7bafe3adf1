// One shard of an embedding table: keys, rows, optimizer slots.
//
// Every batched call locks the table once: calls that only read run side by side, calls that write have the table to
// themselves (each is parallel inside). A concurrent reader therefore never sees a torn row.
//
// Keys are 64-bit words: signed 32-bit keys sign-extended, unsigned ones zero-extended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/hash_table.h"
#include "sok/initializer.h"
#include "sok/partition.h"
#include "sok/row_changes.h"
#include "sok/row_store.h"
#include "sok/scratch.h"
#include "sok/sparse_update.h"

namespace sok {

struct TableConfig {
  std::string name;  // for messages
  int64_t dim = 0;
  int64_t capacity = 0;      // rows of this shard
  bool hashed = true;        // false: row = key / number of ranks that hold rows
  bool is_unsigned = false;  // how keys are printed, and what `mod` means for them
  int world_size = 1;
  int rank = 0;
  int owner = kByKey;    // the rank that holds all rows; kByKey: each row is on the rank of its key
  int64_t num_keys = 0;  // of an identity table: legal are keys below it; 0: as many as the ranks have rows
  Initializer initializer;

  // Throws InvalidArgument if the configuration makes no sense.
  void Check() const;
  // "table 'item' (rank 1 of 4)": how messages name this shard; and a key of it.
  std::string Label() const;
  std::string KeyText(uint64_t key) const;
  // Throws InvalidArgument naming the key if an identity table cannot hold it; always fine for a hashed one.
  void CheckKey(uint64_t key) const;
  // The same, and for a key of another rank: a shard that stored it would hide it from every lookup.
  void CheckOwned(uint64_t key) const;

  Partition partition() const { return {world_size, owner, is_unsigned}; }
  // A negative key is huge as an unsigned word, so one comparison serves both.
  bool IsLegal(uint64_t key) const { return hashed || key < num_legal(); }
  // Keys of an identity table are below it.
  uint64_t num_legal() const {
    return num_keys > 0 ? static_cast<uint64_t>(num_keys)
                        : static_cast<uint64_t>(capacity) * static_cast<uint64_t>(partition().num_shards());
  }
};

class EmbeddingTable {
 public:
  // Throws InvalidArgument if the configuration makes no sense.
  explicit EmbeddingTable(TableConfig config);
  ~EmbeddingTable();

  const TableConfig& config() const { return config_; }
  int64_t dim() const { return config_.dim; }

  std::string Label() const { return config_.Label(); }
  std::string KeyText(uint64_t key) const { return config_.KeyText(key); }
  int OwnerOf(uint64_t key) const;

  // Throws InvalidArgument naming the key if an identity table cannot hold it; always fine for a hashed one.
  void CheckKey(uint64_t key) const { config_.CheckKey(key); }
  bool IsLegal(uint64_t key) const { return config_.IsLegal(key); }

  // One feature of a lookup: keys of one table, and where its answers go.
  struct Feature {
    EmbeddingTable* table = nullptr;
    const uint64_t* keys = nullptr;  // [n]
    int64_t n = 0;
    const int64_t* row_splits = nullptr;  // [segments + 1], checked by the caller; null: nothing is pooled
    int64_t segments = 0;
    const float* weights = nullptr;  // [n] or null; only with row_splits
    Combiner combiner = Combiner::kSum;
    const int64_t* place =
        nullptr;                 // [n], only without row_splits: where in the outputs each answer goes; null: in order
    float* output = nullptr;     // [segments, dim], or [n, dim]: a segment's rows combined, or each key's row
    int64_t* row_ids = nullptr;  // [n]; -1: the key has no row
    // If given and set to true by the lookup, the keys are the row ids, and row_ids was not written: so it is in an
    // identity table that is full, with one worker, never erased from.
    bool* keys_are_row_ids = nullptr;
  };

  // Rows of the features' keys, as they stand after every update so far; all features in one parallel loop. Empty
  // segments give zeros. With insert, a missing key gets a fresh row, all or none in each feature: throws TableFull, and
  // no key of that feature was stored. Without, it reads as its fresh row, row id -1, and nothing is stored.
  // Throws InvalidArgument for a key that its table cannot hold; then nothing is stored in any.
  // Waits for nothing but the tables. Repeats bit for bit.
  static void LookupGroup(const Cpu& cpu, Scratch* scratch, const Feature* features, int64_t num_features, bool insert);

  // LookupGroup of one feature that is not pooled.
  void Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, bool insert,
              const int64_t* place,  // [n]: where in the outputs each answer goes; null: in order
              float* rows,           // [n, dim]
              int64_t* row_ids);     // [n]

  // LookupGroup of one feature that is pooled.
  void LookupCombine(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n,
                     const int64_t* row_splits,  // [segments + 1], checked by the caller
                     const float* weights,       // [n] or null
                     int64_t segments, Combiner combiner, bool insert,
                     float* output,      // [segments, dim]
                     int64_t* row_ids);  // [n]

  // Gradients of one table's rows.
  struct Gradients {
    EmbeddingTable* table = nullptr;
    const int64_t* row_ids = nullptr;  // [n], of lookups in this table; negative ones are ignored
    const float* grads = nullptr;      // [n, dim]
    int64_t n = 0;
    bool distinct = false;  // no row id comes twice: spares the search for duplicates
  };

  // Sums duplicate row ids, then applies the rule once per distinct row; all tables in one parallel loop. Attaches the
  // slot set on first use. A gradient for a row that was erased since its lookup is ignored. Throws InvalidArgument for a
  // table given twice, for row ids that do not exist and, with Nonfinite::kRaise, for a gradient that is not finite;
  // nothing changed then in any table.
  static void ApplyGroup(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                         Nonfinite nonfinite, const Gradients* gradients, int64_t num_tables);

  // ApplyGroup of this table.
  void Apply(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set, Nonfinite nonfinite,
             const int64_t* row_ids,  // [n]
             const float* grads,      // [n, dim]
             int64_t n);

  int64_t size() const;

  // Keys in use, in row order (deterministic for a fixed history).
  std::vector<uint64_t> Keys() const;

  // Everything in use at one point in time, in row order: no update or erasure falls in between. allocate is called once,
  // with the number of rows and of slot floats per row (0 without a slot set), and gives where to write; null: not wanted.
  // Throws FailedPrecondition for an unknown set. An empty name means no slots.
  struct ExportTarget {
    uint64_t* keys = nullptr;   // [n]
    float* rows = nullptr;      // [n, dim]
    float* slots = nullptr;     // [n, slot_floats]
    int64_t* stamps = nullptr;  // [n]
  };
  void Export(const Cpu& cpu, const std::string& slot_set,
              const std::function<ExportTarget(int64_t n, int64_t slot_floats)>& allocate) const;

  // Slots of one set for the given keys: slots [n, num_slots * dim], stamps [n] (-1 where the rule keeps none).
  // Missed decay is included. Throws FailedPrecondition for an unknown set, InvalidArgument for an unknown key.
  int64_t SlotFloats(const std::string& slot_set) const;
  void Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots, int64_t* stamps) const;

  // Stores rows (making them if needed) for the keys this rank owns; others are ignored. Optimizer slots of rows
  // that exist stay. All or none.
  void Assign(const Cpu& cpu, Scratch* scratch, const uint64_t* keys,
              const float* rows,  // [n, dim]
              int64_t n);

  // A slot set without its slots.
  struct SlotSetInfo {
    std::string name;
    UpdateRule rule;    // of the last call
    int64_t calls = 0;  // of a decaying rule: updates so far
    // Of a decaying rule, where a delta is read or written: the alphas of the calls since the save before it, up to `calls`.
    std::vector<AlphaHistory::Run> missed;
    int64_t num_missed() const { return missed.empty() ? 0 : calls - missed[0].first_call + 1; }
  };
  std::vector<SlotSetInfo> SlotSets() const;

  // Where ReadAll puts rows. The table is locked for reading meanwhile: do not call it.
  struct RowTarget {
    uint64_t* keys = nullptr;   // [n]
    float* rows = nullptr;      // [n, dim]
    std::vector<float*> slots;  // for each slot set [n, num_slots * dim]
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
  void ReadAll(const Cpu& cpu, RowSink* sink) const;

  // Saving by changes. From the first BeginSave on the table notes which rows change. BeginSave: what has changed so far
  // belongs to a save that begins. EndSave: it is complete under the name `base`, and changes since BeginSave are counted
  // from it; with an empty name it failed, and no change is forgotten.
  //
  // With a snapshot, ReadSnapshot gives what the table holds at this moment, of all rows or of those that have changed,
  // whatever is done to it until EndSave: rows are copied aside just before they change, if they were not read before.
  // Takes 4 bytes a row, and the records of the rows that change before they are read. Throws FailedPrecondition while
  // another snapshot is there, OutOfMemory.
  enum class SnapshotOf { kNothing, kAllRows, kChanges };
  void BeginSave(SnapshotOf snapshot = SnapshotOf::kNothing);
  void EndSave(const std::string& base);

  // As ReadAll or ReadChanges, of the snapshot. Holds the lock for one block of rows, or one segment of the index, at a
  // time: updates wait no longer than that. Once per snapshot. Throws FailedPrecondition without one, OutOfMemory if there
  // was none to copy rows aside.
  void ReadSnapshot(const Cpu& cpu, RowSink* sink);

  // As ReadAll, but only the rows that belong to the save that was begun. Rows that no update has touched are left out,
  // though an exact Adam has moved them: the sets' `missed` says how. Throws FailedPrecondition without BeginSave, or if no
  // save was completed before.
  void ReadChanges(const Cpu& cpu, RowSink* sink) const;

  // Catches up with calls that the save `save` counts and this table has not seen, for rows as they are now: rows that
  // are stored afterwards are current. Attaches the sets. Once per save: again with the same name it does nothing. Throws
  // InvalidArgument for a set of another rule, for other calls than before under the same name, or too many.
  void SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& sets);

  // What has changed since the last complete save.
  struct ChangeInfo {
    bool is_on = false;
    std::string base;               // that save; empty: none
    int64_t rows = 0;               // that have changed
    int64_t erased = 0;             // keys, at most
    std::vector<SlotSetInfo> sets;  // with what they have missed
    int64_t copied_bytes = 0;       // room for rows that a snapshot has had copied aside
  };
  ChangeInfo Changes() const;

  // Stores rows with slots for the keys this rank owns; others are ignored. A slot set that the table does not have is
  // attached, with no calls. Slots of the table's other sets: of rows that exist they stay, of new rows they are fresh. Of
  // equal keys the last one counts. Every row is current: it has missed no call of any set. Gives how many of the rows
  // were new.
  // All or none: throws InvalidArgument for a key that the table cannot hold or a set that belongs to another rule,
  // TableFull, OutOfMemory; then no row was stored.
  struct RowValues {
    const uint64_t* keys = nullptr;   // [n]
    const float* rows = nullptr;      // [n, dim]
    std::vector<const float*> slots;  // for each of `sets` [n, num_slots * dim]
    int64_t n = 0;
  };
  int64_t Restore(const Cpu& cpu, Scratch* scratch, const std::vector<SlotSetInfo>& sets, const RowValues& values);

  // Exchanges the contents (keys, rows, slot sets) with a table of the same configuration; throws InvalidArgument for
  // another one. Gradients of lookups from before are ignored by both.
  void Swap(EmbeddingTable* other);

  // Makes room for n rows in all: filling up to there rebuilds nothing, and the system has been asked for the memory.
  // With `rows` false for their keys only: records come with the rows, as wide as slot sets have made them by then.
  // Throws InvalidArgument for more than the capacity, OutOfMemory.
  void Reserve(const Cpu& cpu, int64_t n, bool rows = true);

  // Removes keys; their row numbers may be used again. Gives how many existed.
  int64_t Erase(const uint64_t* keys, int64_t n);

  // Bytes of keys, rows and bookkeeping.
  int64_t memory_bytes() const;

 private:
  static constexpr int kCountShift = 12;  // identity tables count unused rows in stretches of 4,096

  struct SlotSet;
  struct Snapshot;
  struct Task;
  struct Stretch;
  using Lock = std::unique_lock<std::shared_mutex>;
  using SharedLock = std::shared_lock<std::shared_mutex>;

  void CheckKeys(const uint64_t* keys, int64_t n) const;
  void CheckOwned(const uint64_t* keys, int64_t n) const;

  // All below expect the lock to be held (shared for const members).
  uint32_t FindRow(uint64_t key) const;
  // rows of keys, or kNoRow; *bad becomes true for a key that this shard cannot hold.
  void FindRows(const uint64_t* keys, int64_t n, uint32_t* rows, bool* bad) const;
  // Looks up what `task` covers, or with `find` false only reads what rows already says. buffer: [kBlock, dim].
  void Run(const Feature& feature, Task* task, bool find, uint32_t* rows, float* buffer) const;
  // Brings rows up to the last call of every decaying set, for good. Threads may settle the same rows at the same time,
  // but nobody else may look at the table meanwhile. Logically const: it changes no answer.
  void SettleRows(const uint32_t* rows, int64_t n) const;
  void Locate(const uint32_t* rows, int64_t n, bool decays, const float** records) const;
  static void CollectMissing(const Cpu& cpu, Scratch* scratch, const Task* tasks, int64_t num_tasks,
                             const uint32_t* rows, int64_t** missing, int64_t* count);
  static void FinishFeature(const Cpu& cpu, Scratch* scratch, const Feature& feature, Task* tasks, int64_t num_tasks,
                            int64_t changes, uint32_t* rows, float* buffers);
  // Gives a row to each of the m positions listed in `missing` (ascending); all or none, then throws TableFull. With
  // `fresh` false the caller writes the whole record of new rows, and their stamps.
  void InsertMissing(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing, int64_t m,
                     uint32_t* rows, bool fresh = true);
  void InsertHashed(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing, int64_t m,
                    uint32_t* rows, std::vector<std::pair<uint32_t, uint64_t>>* fresh);
  void MakeRoom(int64_t row);
  void InitRows(const std::pair<uint32_t, uint64_t>* fresh, int64_t n);
  bool KeysAreRowIds(const Feature& feature) const;
  int64_t RowId(uint32_t row) const { return row == HashTable::kNoRow ? -1 : (epoch_ << 32) | row; }
  // Ids of an epoch before it mean rows that Swap has taken away.
  int64_t FirstEpoch() const {
    const auto all = erased_.find(HashTable::kNoRow);
    return all == erased_.end() ? 0 : all->second;
  }
  bool CheckGradients(const Gradients& gradients, int64_t begin, int64_t end, Nonfinite nonfinite, bool* stale) const;
  [[noreturn]] void RaiseBadGradient(const Gradients& gradients, Nonfinite nonfinite) const;
  static void SumDuplicates(const Cpu& cpu, Scratch* scratch, Gradients* gradients, int64_t num_tables);
  void DropStale(Scratch* scratch, Gradients* gradients) const;
  void Update(const Gradients& gradients, int64_t begin, int64_t end, SlotSet* set, Nonfinite nonfinite);
  bool InUse(int64_t row) const {
    // A table in full use pays for no bits: the counts of a million rows are one kilobyte.
    return unused_[static_cast<size_t>(row >> kCountShift)] == 0 ||
           ((in_use_[static_cast<size_t>(row >> 6)] >> (row & 63)) & 1) != 0;
  }
  void MarkInUse(int64_t row, bool used);
  uint64_t KeyOfRow(int64_t row) const;
  bool HasDecay() const;
  // The weights of a row after every update so far: in its record, or worked out in out [dim]. scratch: [2 * dim].
  const float* ReadRow(uint32_t row, uint64_t key, float* out, float* scratch) const;
  SlotSet* FindOrAttach(const UpdateRule& rule, const std::string& slot_set);
  const SlotSet* FindSet(const std::string& slot_set) const;
  const SlotSet& RequireSet(const std::string& slot_set) const;
  void ReadSlots(const SlotSet& set, uint32_t row, float* slots, int64_t* stamp) const;
  std::vector<std::pair<uint32_t, uint64_t>> RowsInOrder() const;
  // The same in parts of about half a million rows at most, [0, NumParts()), in any order.
  int64_t NumParts() const;
  void RowsOfPart(int64_t part, bool changes, std::vector<std::pair<uint32_t, uint64_t>>* rows) const;
  void ReadRows(const Cpu& cpu, RowSink* sink, bool changes) const;
  void MarkChanged(const uint32_t* rows, int64_t n);
  // Before rows change: if a snapshot still needs them, it gets a copy. Threads may do this at the same time, for the same
  // rows too; when it returns, all of these may change.
  void CopyAside(const uint32_t* rows, int64_t n) const;
  std::unique_ptr<Snapshot> MakeSnapshot(SnapshotOf of);
  void SnapshotLosesRow(uint32_t row, uint64_t key);  // as its key is erased
  void CopySnapshotRows(const Cpu& cpu, const std::vector<uint32_t>& rows, const std::vector<uint32_t>& copies,
                        const RowTarget& target) const;
  void CopyOut(const std::pair<uint32_t, uint64_t>* rows, int64_t n, const RowTarget& target, int64_t begin) const;

  const TableConfig config_;
  mutable std::shared_mutex mutex_;
  std::unique_ptr<HashTable> index_;  // null for an identity table
  RowStore rows_;
  std::vector<uint64_t> in_use_;  // identity: one bit per row
  std::vector<uint32_t> unused_;  // identity: rows not in use in each stretch of 4,096; where 0, no bit is read
  int64_t num_rows_ = 0;          // rows in use
  int64_t changes_ = 0;           // of the set of keys: row numbers found before the last one may be stale
  // Calls of Erase that erased something, modulo 2^31: the upper half of row ids. An id with an older epoch may mean a
  // row that was erased since; erased_ tells, for rows erased so far, in which epoch they were last, and of kNoRow when
  // Swap took all rows away.
  int64_t epoch_ = 0;
  std::unordered_map<uint32_t, int64_t> erased_;
  int64_t next_row_ = 0;             // hashed: row numbers given out so far
  std::vector<uint32_t> free_rows_;  // hashed: erased row numbers
  std::vector<std::unique_ptr<SlotSet>> sets_;
  RowChanges saved_;
  std::unique_ptr<Snapshot> snapshot_;  // of a save that goes on beside training
};

}  // namespace sok
